"""Local search for a lower peak: one change of a candidate at a time, each evaluated by the simulator.

What is live at the peak says what can change:

- a value that a replay made: its op is replayed once more, later (``Decision.replays``), alone, or together with the
  ops that make its inputs, where those have gone by then;
- a storage that is kept: it is recomputed instead, once, or twice where it is needed early and late.

The change that costs least time per byte of peak is taken. Where several moments are equally high, a change that
leaves fewer of them counts too. The search ends when no change helps: at a local optimum.

The models of ``exact.py`` replay every op at most once; this is how it learns where more often is cheaper.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.simulation.peak_contents import PeakContents, contents_at_peak
from lowtide.solvers import tuning
from lowtide.solvers.graph_queries import choices, complete_actions
from lowtide.solvers.search_context import Evaluated, SearchContext

T = TypeVar("T")


def descent(
    context: SearchContext,
    start: Evaluated,
    *,
    target_bytes: int = 0,
    max_ms_per_byte: float = math.inf,
    max_ms: float = math.inf,
    least_ms_per_byte: float = 0.0,
    events: int,
) -> Iterator[Evaluated]:
    """Yield ``start`` and candidates with ever lower peaks; the last has at most ``target_bytes`` if that was reached.

    Args:
        target_bytes: No peak needs to be lower.
        max_ms_per_byte: Changes that cost more are not taken.
        max_ms: Nothing is changed in a slower step.
        least_ms_per_byte: What every byte of peak above the target is expected to cost; where that leads above
            ``max_ms``, the search ends.
        events: How many events may be simulated.
    """
    yield start
    current, lowest_bytes = start, start.peak_bytes
    for _ in range(tuning.MAX_DESCENT_STEPS):
        expected_ms = current.timeline.step_ms + least_ms_per_byte * (current.peak_bytes - target_bytes)
        if lowest_bytes <= target_bytes or expected_ms > max_ms or events <= 0:
            break
        best: tuple[tuple[bool, float, float, int], Evaluated] | None = None
        peak_bytes = current.peak_bytes
        num_at_peak = sum(peak >= peak_bytes for peak in current.timeline.event_peak_bytes)
        numbered = enumerate(changes(context, current))
        for place, change in sorted(numbered, key=lambda n: n[1].ms_per_byte):
            if best is not None and not best[0][0] and change.ms_per_byte > best[0][1]:
                break
            events -= len(context.graph.events)
            other = context.evaluate(change.actions, change.replays)
            if other.peak_bytes > peak_bytes:
                continue
            less, added_ms = peak_bytes - other.peak_bytes, other.timeline.step_ms - current.timeline.step_ms
            if less:
                price = added_ms / less
            else:
                price = float(sum(peak >= peak_bytes for peak in other.timeline.event_peak_bytes))
            if price > max_ms_per_byte if less else price >= num_at_peak:
                continue
            rank = (not less, price, added_ms, place)  # of equal ones that with fewer replays
            if best is None or rank < best[0]:
                best = rank, other
            if events <= 0:
                break
        if best is None:
            break
        current = best[1]
        if current.peak_bytes < lowest_bytes:
            lowest_bytes = current.peak_bytes
            yield current


class LazyPath(Generic[T]):
    """What a search finds, one after the other, searched for as far as somebody asks: it is the same however it is."""

    def __init__(self, search: Iterator[T]) -> None:
        self._search = search
        self._found: list[T] = []

    def __iter__(self) -> Iterator[T]:
        yield from self._found
        for one in self._search:
            self._found.append(one)
            yield one


class Change(NamedTuple):
    """A candidate near the present one, and the least that it can cost per byte off the peak, by estimate."""

    actions: dict[int, str]
    replays: dict[int, int]
    ms_per_byte: float


def changes(context: SearchContext, current: Evaluated) -> Iterator[Change]:
    """Actions and replays with one change each that takes something off the peak."""
    graph = context.graph
    contents = contents_at_peak(graph, current.actions, current.replays, current.timeline)

    def change(actions: dict[int, str], again: list[int]) -> Change:
        """The change to ``actions``, and to one replay more of the ops ``again``."""
        dropped = [s for s, action in actions.items() if action == RECOMPUTE != current.actions.get(s)]
        replays = _with_one_more_replay(graph, actions, current.replays, again)
        return Change(actions, replays, _estimated_ms_per_byte(context, contents, dropped, again))

    for op in dict.fromkeys(graph.storages[s].op for s in _largest(contents.replayed)):
        if op is None:
            continue
        yield change(current.actions, [op])
        ancestors = _recomputed_ancestors(graph, current.actions, op)
        if len(ancestors) > 1:
            yield change(current.actions, ancestors)
    kept = [s for s, size in contents.originals.items() if current.actions.get(s) == SAVE and size]
    for storage in _largest({s: contents.originals[s] for s in kept}):
        dropped, stops = choices(graph, current.actions)
        if storage in graph.stored:
            dropped.append(storage)
        actions = complete_actions(graph, dropped, [s for s in stops if s != storage])
        maker = graph.storages[storage].op
        if actions != current.actions and maker is not None:
            yield change(actions, [])
            yield change(actions, _recomputed_ancestors(graph, actions, maker))


def _estimated_ms_per_byte(
    context: SearchContext, contents: PeakContents, dropped: list[int], again: list[int]
) -> float:
    """What a byte off the peak costs at least, if each op of ``dropped`` and ``again`` runs once more."""
    graph, costs = context.graph, context.costs
    ops = {*again, *(graph.storages[s].op for s in dropped)}
    ms = sum(costs.op_ms[op] + costs.replay_us / 1e3 for op in ops if op is not None)
    size = sum(contents.originals.get(s, 0) for s in dropped)
    size += sum(contents.replayed.get(s, 0) for op in again for s in graph.ops[op].makes)
    return ms / size if size else math.inf


def _largest(sizes: Mapping[int, int]) -> list[int]:
    return sorted(sizes, key=lambda s: (-sizes[s], s))[: tuning.MAX_PEAK_HOLDERS]


def _with_one_more_replay(
    graph: StepGraph, actions: Mapping[int, str], replays: Mapping[int, int], ops: list[int]
) -> dict[int, int]:
    more = dict(replays)
    for op in ops:
        for s in graph.ops[op].makes:
            if actions.get(s) == RECOMPUTE:
                more[s] = more.get(s, 1) + 1
    return more


def _recomputed_ancestors(graph: StepGraph, actions: Mapping[int, str], op: int) -> list[int]:
    """``op`` and every op that runs again to make what it reads."""
    found, left = {op}, [op]
    while left:
        for read in graph.ops[left.pop()].reads:
            maker = graph.storages[read].op
            if maker is not None and maker not in found and actions.get(read) == RECOMPUTE:
                found.add(maker)
                left.append(maker)
    return sorted(found)
