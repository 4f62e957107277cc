"""Why a plan is as it is: what fills memory at the peak, what more memory would save, the largest decisions."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from lowtide.units import format_bytes

_WIDTH = 100
_MOST_DECISIONS = 10
_MOST_NAMES = 4
_SHADES = " .:-=+*#%@"
_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10), ("byte", 0))
_SMALL_SHARE = 0.125
_NUMBERED = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_REPEATED = re.compile(r"^(.*\*\.[^.]+)\..*$")


def collapse_path(path: str) -> str:
    """``model.layers.7.mlp.up_proj -> model.layers.*.mlp``: numbered layers, and one level in them, share a row."""
    starred = _NUMBERED.sub("*", path)
    return _REPEATED.sub(r"\1", starred) or "(outside modules)"


def short_op(name: str) -> str:
    """``aten.mul.Tensor -> mul``: overloads of one operator share a row; other namespaces stay visible."""
    namespace, _, rest = name.partition(".")
    op = rest.partition(".")[0]
    return op if namespace == "aten" and op else f"{namespace}.{op}" if op else name


@dataclass(frozen=True)
class PeakGroup:
    """Storages that live at the peak, with the same kind, module and operator.

    Attributes:
        kind: ``saved`` for backward or a replay, ``replayed``, ``leaving`` for another tier or ``fetched`` from there,
            made in ``backward``, or still ``in use`` in forward.
        module, op: What makes them, with numbered siblings and overloads together.
    """

    kind: str
    module: str
    op: str
    count: int
    bytes: int


@dataclass(frozen=True)
class DecisionGroup:
    """Decisions with the same action, module and operator, numbered siblings together.

    Attributes:
        recompute_ms: Time of their replays; 0 for what is saved.
        rent_ms: Step time that their bytes would save elsewhere, where the price of memory is known; 0 for what is not
            saved.
    """

    action: str
    module: str
    op: str
    count: int
    bytes: int
    recompute_ms: float
    rent_ms: float


@dataclass(frozen=True)
class LinkUse:
    """What one direction of a link carries.

    Attributes:
        direction: ``store`` or ``fetch``.
        busy_ms: Time of all its transfers. ``waited_ms``: how long the step stands still for them.
        shares: Busy share of each slice of the step; slices are equally long.
    """

    tier: str
    direction: str
    bytes: int
    busy_ms: float
    waited_ms: float
    shares: tuple[float, ...]

    def __str__(self) -> str:
        bar = "".join(_SHADES[min(int(share * len(_SHADES)), len(_SHADES) - 1)] for share in self.shares)
        waits = f", waited {self.waited_ms:.1f} ms" if self.waited_ms else ""
        name = f"{self.tier} {self.direction}"
        return f"  {format_bytes(self.bytes):>11}  {name:<11} |{bar}| busy {self.busy_ms:.1f} ms{waits}"


@dataclass(frozen=True)
class FunctionGroup:
    """Calls of one autograd Function whose kernels no dispatcher sees, or of modules that are one op each.

    Attributes:
        ms: What they take in forward, all together; 0 in plans of an older lowtide.
        stored_bytes: What autograd stores of what they make.
        kept_bytes: So much of that is saved under any plan, for the reason ``why_kept``.
    """

    name: str
    num_calls: int
    stored_bytes: int
    kept_bytes: int = 0
    why_kept: str = ""
    ms: float = 0.0
    is_module: bool = False

    def __str__(self) -> str:
        kept = f": {format_bytes(self.kept_bytes)} always saved, it {self.why_kept}" if self.why_kept else ""
        return f"{self.num_calls} x {self.name}{f', {self.ms:.1f} ms' if self.ms else ''}{kept}"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a plan knows of its own step beyond the decisions; enough to explain it without the graph.

    Attributes:
        when: ``forward``, ``backward`` or ``replay``: what the step does when the peak is reached.
        module, op: What runs then.
        holders: What fills memory then beside what lived before the step, most bytes first.
        other_bytes: The rest: smaller holders, workspace, generator state.
        ms_per_byte: What one more byte of budget takes off the time bound, for small changes; None without a budget.
        links: What each direction of a link to another tier carries.
        functions: Calls whose kernels no dispatcher sees, most stored bytes first. Of ``stored_bytes``, which autograd
            stores in all, a replay of single operators does not reach what they make.
    """

    when: str
    module: str
    op: str
    holders: tuple[PeakGroup, ...] = ()
    other_bytes: int = 0
    ms_per_byte: float | None = None
    links: tuple[LinkUse, ...] = ()
    functions: tuple[FunctionGroup, ...] = ()
    stored_bytes: int = 0

    @staticmethod
    def from_dict(body: Any) -> "Evidence":
        """What ``asdict`` made of one. Raises: TypeError, KeyError: it is something else."""
        holders = tuple(PeakGroup(**holder) for holder in body["holders"])
        links = tuple(LinkUse(**{**link, "shares": tuple(link["shares"])}) for link in body["links"])
        functions = tuple(FunctionGroup(**group) for group in body.get("functions", ()))
        return Evidence(**{**body, "holders": holders, "links": links, "functions": functions})


@dataclass(frozen=True, kw_only=True)
class Explanation(Evidence):
    """What binds a plan. ``print`` it; it fits 100 columns.

    Attributes:
        peak_bytes, resident_bytes: Absolute; what lives before the step is part of the peak.
        counted_peak_bytes: What the device's statistics count for it, where that is known; else the same.
        reserved_peak_bytes: What the device's allocator takes for it; None where that is not known.
        ms_per_gib: What one more GiB takes off the step at most; never more than all of the overhead.
        decisions: Those with the largest time, else the most bytes.
        when: "" for a plan that has no evidence.
    """

    peak_bytes: int
    resident_bytes: int
    counted_peak_bytes: int
    reserved_peak_bytes: int | None
    ms_per_gib: float | None
    decisions: tuple[DecisionGroup, ...]

    def __str__(self) -> str:
        links = ["links over the step, forward to backward", *map(str, self.links)] if self.links else []
        price = filter(None, [self.price()])
        device = self._device()
        lines = (*self._peak(), *device, *price, *links, *self._decisions(), *self._functions())
        return "\n".join(line[:_WIDTH].rstrip() for line in lines)

    def _peak(self) -> list[str]:
        peak = format_bytes(self.peak_bytes)
        if not self.when:
            return [f"peak {peak}; what binds it was not written down: plan again with this lowtide"]
        how = {"replay": "in backward, while {} runs again"}.get(self.when, f"in {self.when}, while {{}} runs")
        lines = [f"peak {peak}, {how.format(f'{shorten(self.op, 34)} of {shorten(self.module, 34)}')}"]
        lines.append(f"  {format_bytes(self.resident_bytes):>11}  before the step")
        for h in self.holders:
            lines.append(f"  {format_bytes(h.bytes):>11}  {h.kind:<9}  {_origin(h.count, h.op, h.module)}")
        if self.other_bytes:
            lines.append(f"  {format_bytes(self.other_bytes):>11}  others")
        return lines

    def _device(self) -> list[str]:
        lines = []
        if more := self.counted_peak_bytes - self.peak_bytes:
            counted = f"counted {format_bytes(self.counted_peak_bytes)} by the device"
            lines.append(f"{counted}: {format_bytes(more)} more, in blocks not full")
        if self.reserved_peak_bytes is not None:
            unused = format_bytes(self.reserved_peak_bytes - self.peak_bytes)
            lines.append(
                f"reserved {format_bytes(self.reserved_peak_bytes)}: {unused} more, in segments that are not full"
            )
        return lines

    def price(self) -> str:
        """What a little more budget buys, in a unit that is small beside the peak; "" where that is not known."""
        if self.ms_per_byte is None or self.ms_per_gib is None:
            return ""
        # The largest unit that is small beside the peak: nobody adds a GiB to 37 MiB.
        unit, size = next((u, 2**p) for u, p in _UNITS if 2**p <= _SMALL_SHARE * self.peak_bytes or not p)
        saved_ms = min(self.ms_per_byte * size, self.ms_per_gib)
        takes = f"one more {unit} takes at most {saved_ms:.3g} ms off the step"
        return takes if self.ms_per_byte else "more memory buys no time"

    def _functions(self) -> list[str]:
        if not self.functions:
            return []
        lines = []
        for is_module in (False, True):
            groups = [f for f in self.functions if f.is_module is is_module]
            made = "made in modules that are one op each" if is_module else "made by kernels that no dispatcher sees"
            if groups:
                lines.append(f"{made}: {share_of_stored(groups, self.stored_bytes)} of what is stored")
            lines += [f"  {format_bytes(f.stored_bytes):>11}  {f}" for f in groups]
        return lines

    def _decisions(self) -> list[str]:
        if not self.decisions:
            return []
        rents = any(d.rent_ms for d in self.decisions)
        lines = ["largest decisions" + (" (saved: the time that their memory would save elsewhere)" if rents else "")]
        for d in self.decisions:
            ms = d.recompute_ms or d.rent_ms
            time, origin = f"{ms:.1f} ms" if ms else "", _origin(d.count, d.op, d.module, 46)
            lines.append(f"  {format_bytes(d.bytes):>11}  {d.action:<12} {time:>11}  {origin}")
        return lines


def share_of_stored(groups: Iterable[FunctionGroup], stored_bytes: int) -> str:
    return f"{100 * sum(g.stored_bytes for g in groups) / max(stored_bytes, 1):.0f} %"


def told_of_functions(evidence: Evidence, again: Collection[str]) -> str:
    """What share of the stored bytes calls that are one op made, and which run again; "" if there are none.

    Args:
        again: Names of those that do.
    """
    storing = [group for group in evidence.functions if group.stored_bytes]
    if not storing:
        return ""
    share = share_of_stored(storing, evidence.stored_bytes)
    runs = _some(g.name for g in storing if g.name in again)
    stays = _some(g.name for g in storing if g.name not in again)
    parts = [f"run again: {runs}" if runs else "none runs again", f"saved: {stays}" if stays and runs else ""]
    return f"opaque calls made {share} of what is stored; {'; '.join(filter(None, parts))}"


def _some(names: Iterable[str]) -> str:
    first, *others = [*names] or [""]
    shown = [first, *others[: _MOST_NAMES - 1]]
    more = len(others) + 1 - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def largest_decisions(
    rows: Iterable[tuple[str, str, str, int, float]], ms_per_byte: float | None
) -> tuple[DecisionGroup, ...]:
    """The ten groups of decisions with the largest time, else the most bytes.

    Args:
        rows: Action, module path, operator, bytes and replay milliseconds of each decision.
    """
    groups: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for action, module, op, size, ms in rows:
        groups.setdefault((action, collapse_path(module), short_op(op)), []).append((size, ms))
    found = []
    for (action, module, op), members in groups.items():
        size, ms = map(sum, zip(*members))
        rent_ms = size * (ms_per_byte or 0.0) if action == "save" else 0.0
        found.append(DecisionGroup(action, module, op, len(members), size, ms, rent_ms))
    found.sort(key=lambda w: (-max(w.recompute_ms, w.rent_ms), -w.bytes, w.module, w.op))
    return tuple(found[:_MOST_DECISIONS])


def _origin(count: int, op: str, module: str, width: int = 70) -> str:
    return shorten(f"{f'{count} x ' if count > 1 else ''}{shorten(op, 34)}, {module}", width)


def shorten(text: str, width: int) -> str:
    """``text`` with its middle cut out where it is too long: both ends of a name identify it."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"
