"""Budget and offload arguments as ``solve`` and ``frontier`` take them, turned into bytes."""

from collections.abc import Iterable, Mapping

from lowtide.graph.costs import TIERS, Costs
from lowtide.graph.gradients import with_gradients_before
from lowtide.graph.step_graph import StepGraph
from lowtide.options import did_you_mean
from lowtide.plan import ALLOCATED, BUDGET_KINDS, RESERVED
from lowtide.simulation.allocator_peaks import why_unknown
from lowtide.simulation.simulator import simulate_actions
from lowtide.units import parse_budget

TierLimits = Iterable[str] | Mapping[str, int | str | None]


def offload_capacities(costs: Costs, offload: TierLimits) -> dict[str, int | None]:
    """Most bytes that ``offload`` allows a plan to offload, by tier; None: any number.

    Raises:
        ValueError: ``offload`` makes no sense, or ``costs`` has no link to a tier.
    """
    asked = dict(offload) if isinstance(offload, Mapping) else dict.fromkeys(offload)
    found: dict[str, int | None] = {}
    for tier, capacity in asked.items():
        if tier not in TIERS:
            raise ValueError(f"offload: tier {tier!r} is not known. Use {' or '.join(map(repr, TIERS))}.")
        if tier not in costs.links:
            raise ValueError(
                f"offload={offload!r}: costs knows no link to the {tier} tier. Measure it: "
                f"lowtide.measure(graph, tiers=({tier!r},))."
            )
        size = None if capacity is None else parse_budget(capacity)
        if size is not None and not isinstance(size, int):
            raise ValueError(f'offload={offload!r}: {capacity!r} is not an amount. Pass bytes, "20GiB" or None.')
        found[tier] = size
    return found


def check_costs(graph: StepGraph, costs: Costs) -> None:
    """Refuse costs of another graph.

    Raises:
        ValueError: with both numbers of ops.
    """
    if len(costs.op_ms) != len(graph.ops):
        raise ValueError(
            f"costs has times for {len(costs.op_ms)} ops, the graph has {len(graph.ops)} ops. Measure this graph."
        )


def check_budget_kind(budget: int | str | None, kind: str, device: str) -> None:
    """Refuse a kind of budget that is unknown, or has no meaning.

    Args:
        device: Type of the device that the step runs on.

    Raises:
        ValueError: with the way out.
    """
    if kind not in BUDGET_KINDS:
        near = did_you_mean(str(kind), BUDGET_KINDS)
        raise ValueError(f"budget_kind={kind!r} is not known.{near} Use {ALLOCATED!r} or {RESERVED!r}.")
    if kind == ALLOCATED:
        return
    if reason := why_unknown(device):
        raise ValueError(f"budget_kind={kind!r} has no meaning here: {reason}. Use {ALLOCATED!r}.")
    if budget is None or isinstance(parse_budget(budget), float):
        raise ValueError(
            f'budget={budget!r} is no number of reserved bytes, which budget_kind={kind!r} needs. Pass bytes or "6GiB".'
        )


def absolute_bytes(graph: StepGraph, costs: Costs, budget: int | str) -> int:
    """``budget`` as absolute peak bytes on the device.

    Raises:
        ValueError: ``budget`` is ``"auto"``, which needs the device, or not an amount.
        TypeError: ``budget`` is neither an int nor a string.
    """
    parsed = parse_budget(budget)
    if isinstance(parsed, str):
        raise ValueError(f'budget={budget!r} depends on the device. Pass bytes, "6GiB" or "40%" to solve.')
    if isinstance(parsed, float):
        return graph.resident_bytes + int(parsed * activation_bytes(graph, costs))
    return parsed


def activation_bytes(graph: StepGraph, costs: Costs) -> int:
    """The plain step's activation memory: its peak beside what it leaves, gradients there before it.

    Where backward makes them, activations have gone when most of them are there. What may be saved is the same.
    """
    later = with_gradients_before(graph)
    return simulate_actions(later, costs, {}).peak_bytes - later.resident_bytes
