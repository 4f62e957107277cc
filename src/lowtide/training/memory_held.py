"""What held the memory when it ran out, in words for the error."""

from collections.abc import Mapping

from lowtide.explanation import collapse_path
from lowtide.plan import Plan
from lowtide.units import format_bytes

_MOST_ROWS = 8
_UNNAMED = "backward, the loss, and what is outside modules"


def held_now(resident_bytes: int, by_module: Mapping[str, int]) -> str:
    """A step without a plan: what its ops made and what still lives, numbered siblings together."""
    groups: dict[str, int] = {}
    for module, size in by_module.items():
        name = collapse_path(module) if module else _UNNAMED
        groups[name] = groups.get(name, 0) + size
    return _table("lowtide: when memory ran out, this step held", resident_bytes, list(groups.items()), 0)


def held_by_plan(plan: Plan) -> str:
    """A step under a plan, of which nothing is counted as it runs: what the plan says of its peak."""
    told = plan.explain()
    groups: dict[str, int] = {}
    for holder in told.holders:
        groups[holder.module] = groups.get(holder.module, 0) + holder.bytes
    head = f"lowtide: this step ran under a plan for {format_bytes(plan.predicted_peak_bytes)}; at its peak it holds"
    return _table(head, plan.resident_bytes, list(groups.items()), told.other_bytes)


def _table(head: str, resident_bytes: int, groups: list[tuple[str, int]], other_bytes: int) -> str:
    groups.sort(key=lambda group: (-group[1], group[0]))
    rows = [("there before the step: parameters, gradients, optimizer, batch", resident_bytes), *groups[:_MOST_ROWS]]
    rest = other_bytes + sum(size for _, size in groups[_MOST_ROWS:])
    rows += [("others", rest)] if rest else []
    return "\n".join([head, *(f"  {format_bytes(size):>11}  {name}" for name, size in rows)])
