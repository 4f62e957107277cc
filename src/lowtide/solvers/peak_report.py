"""What fills memory at a plan's peak: stored in the plan, so that ``Plan.explain`` needs no graph."""

from collections.abc import Mapping
from typing import Any

from lowtide.explanation import Evidence, LinkUse, PeakGroup, collapse_path, short_op
from lowtide.graph.facts import step_facts
from lowtide.graph.function_ops import timed_function_groups
from lowtide.graph.step_graph import COMPILED_CODE, GONE_GRADIENT, NEW_GRADIENT, Op, StepGraph
from lowtide.plan import SAVE, TIER_OF
from lowtide.simulation.peak_contents import PeakContents, contents_at_peak
from lowtide.simulation.simulator import Timeline
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.search_context import SearchContext
from lowtide.units import format_bytes

_MOST_HOLDERS = 6
_MADE_IN_BACKWARD = {"backward": "backward", NEW_GRADIENT: "gradient", GONE_GRADIENT: "gradient"}
_SLICES = 40  # of the step, for each of which link use is stored


def evidence(context: SearchContext, candidate: Candidate, timeline: Timeline, ms_per_byte: float | None) -> Evidence:
    """The peak's moment, what fills it, the price of memory, what links carry.

    Args:
        timeline: What the simulator says of ``candidate``.
        ms_per_byte: Step time that one more byte of budget saves, by the bound; None: not known.
    """
    graph = context.graph
    peak = contents_at_peak(graph, candidate.actions, candidate.replays, timeline, candidate.moves)
    holders = _holders(graph, candidate.actions, peak)
    shown = holders[:_MOST_HOLDERS]
    other = peak.peak_bytes - graph.start_bytes - sum(group.bytes for group in shown)
    op = None if peak.op is None else graph.ops[peak.op]
    backward = op is not None and op.backward
    return Evidence(
        when="replay" if op is not None and peak.replay else "backward" if backward else "forward",
        module="" if op is None else module_of(graph, op) or "the step itself",
        op="" if op is None else short_op(op.name),
        holders=tuple(shown),
        other_bytes=other,
        ms_per_byte=ms_per_byte,
        links=_links(timeline),
        functions=timed_function_groups(graph, context.costs.op_ms),
        stored_bytes=sum(graph.storages[s].bytes for s in graph.stored),
    )


def _links(timeline: Timeline) -> tuple[LinkUse, ...]:
    slice_ms = timeline.step_ms / _SLICES
    rows: dict[tuple[str, str], list[Any]] = {}
    for t in timeline.transfers:
        row = rows.setdefault((t.tier, t.direction), [t.tier, t.direction, 0, 0.0, 0.0, [0.0] * _SLICES])
        row[2] += t.bytes
        row[3] += t.end_ms - t.start_ms
        row[4] += t.waited_ms
        for i in range(_SLICES):
            shared_ms = min(t.end_ms, (i + 1) * slice_ms) - max(t.start_ms, i * slice_ms)
            row[5][i] += max(shared_ms, 0.0) / slice_ms if slice_ms else 0.0
    return tuple(
        LinkUse(tier, direction, size, busy_ms, waited_ms, tuple(round(min(share, 1.0), 3) for share in shares))
        for tier, direction, size, busy_ms, waited_ms, shares in rows.values()
    )


def _holders(graph: StepGraph, actions: Mapping[int, str], peak: PeakContents) -> list[PeakGroup]:
    """What fills memory at the peak, most bytes first."""
    freed = {s for s, event in step_facts(graph).death.items() if event < peak.event}
    rows: list[tuple[str, int, int]] = []
    for s, size in peak.replayed.items():
        rows.append(("fetched" if actions.get(s) in TIER_OF else "replayed", s, size))
    for s, size in peak.originals.items():
        saved = s in freed or (s in graph.stored and actions.get(s, SAVE) == SAVE)
        made_in = graph.storages[s].kind
        kind = _MADE_IN_BACKWARD.get(made_in) or ("saved" if saved else "in use")
        kind = "leaving" if kind == "saved" and actions.get(s) in TIER_OF else kind
        rows.append((kind, s, size))
    groups: dict[tuple[str, str, str], list[int]] = {}
    for kind, s, size in rows:
        op = graph.ops[graph.storages[s].op or 0]
        groups.setdefault((kind, collapse_path(module_of(graph, op)), short_op(op.name)), []).append(size)
    found = [PeakGroup(*key, len(sizes), sum(sizes)) for key, sizes in groups.items()]
    return sorted(found, key=lambda group: (-group.bytes, group.kind, group.module, group.op))


def modules_at_peak(graph: StepGraph, candidate: Candidate, timeline: Timeline) -> dict[str, int]:
    """Bytes at the peak by module, beside what lived before the step; most first."""
    peak = contents_at_peak(graph, candidate.actions, candidate.replays, timeline, candidate.moves)
    found: dict[str, int] = {}
    for holder in _holders(graph, candidate.actions, peak):
        found[holder.module] = found.get(holder.module, 0) + holder.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def inside_compiled_code(graph: StepGraph, candidate: Candidate, timeline: Timeline, budget_bytes: int) -> str:
    """The way out where the peak is in a call of compiled code, which is one op here; "" elsewhere."""
    peak = contents_at_peak(graph, candidate.actions, candidate.replays, timeline, candidate.moves)
    if peak.op is None or graph.ops[peak.op].name != COMPILED_CODE:
        return ""
    layers = "" if module_of(graph, graph.ops[peak.op]) else ', layers=["*"]'
    makers = {op.id for op in graph.ops if op.name == COMPILED_CODE}
    stored = sum(graph.storages[s].bytes for s in graph.stored if graph.storages[s].op in makers)
    return (
        f" lowtide.compile(model{layers}, budget={budget_bytes}) plans inside of compiled code, whose "
        f"{format_bytes(stored)} are kept or made again call by call here."
    )


def bottleneck(graph: StepGraph, candidate: Candidate, timeline: Timeline) -> str:
    """Module and op that run when the peak is reached, in words."""
    peak = contents_at_peak(graph, candidate.actions, candidate.replays, timeline, candidate.moves)
    if peak.op is None:
        return "the start of the step"
    op = graph.ops[peak.op]
    how = "run again in backward" if peak.replay else "backward" if op.backward else "forward"
    return f"{module_of(graph, op) or 'the step itself'} ({op.name}, {how})"


def module_of(graph: StepGraph, op: Op) -> str:
    """Module path of ``op``; of a backward op outside all modules that of the forward op whose output it reads."""
    if op.backward and not graph.scope(op):
        makers = [graph.storages[s].op for s in op.reads if graph.storages[s].kind == "activation"]
        return next((graph.scope(graph.ops[m]) for m in makers if m is not None), "")
    return graph.scope(op)
