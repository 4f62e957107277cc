"""Local search: from one way to run a step to leaner ones, a change at a time, each judged by the simulator.

What lives at the peak says what can give way:

- a value that a replay has made: its op runs again later instead (``Decision.replays``), alone, or with all that it is
  made from where that has gone by then;
- a storage that is kept: it is recomputed instead, once, or twice where it is needed early and late.

Of the changes at hand the one that costs least time per byte of peak is taken. Where several moments are equally high,
a change that leaves fewer of them counts too. It ends when no change helps, so that the last way found is leaner than
all its neighbours, not the leanest there is.

The models of ``exact.py`` replay every op at most once; this is how it learns where more often is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.simulation.peak_contents import contents_at_peak
from lowtide.simulation.simulator import Timeline, simulate_actions
from lowtide.solvers.graph_queries import complete_actions

_MOST_HOLDERS = 16  # of each kind, the largest, that are asked to give way
_MOST_STEPS = 300


@dataclass(frozen=True)
class Evaluated:
    """One way to run a step, and what the simulator says of it; ``replays`` as in ``simulate_actions``."""

    actions: dict[int, str]
    timeline: Timeline
    replays: dict[int, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @property
    def rank(self) -> tuple[float, int]:
        """Faster is better; of equally fast ones the one with the lower peak."""
        return self.timeline.step_ms, self.timeline.peak_bytes


def judge(
    graph: StepGraph, costs: Costs, actions: dict[int, str], replays: Mapping[int, int] | None = None
) -> Evaluated:
    """``actions`` with what they take; of ``replays`` those count that are left of them."""
    again = {s: count for s, count in (replays or {}).items() if actions.get(s) == RECOMPUTE and count > 1}
    return Evaluated(actions, simulate_actions(graph, costs, actions, again), again)


def reduce_peak(
    graph: StepGraph,
    costs: Costs,
    start: Evaluated,
    *,
    target_bytes: int = 0,
    most_ms_per_byte: float = math.inf,
    most_ms: float = math.inf,
    events: int,
) -> list[Evaluated]:
    """Ways with ever lower peaks, from ``start`` on.

    Args:
        target_bytes: No way needs to be leaner.
        most_ms_per_byte: Changes that cost more are not taken.
        most_ms: A step that takes longer is not worth going on from.
        events: How many events may be simulated.

    Returns:
        ``start``, and what was found, by falling peak; the last has at most ``target_bytes`` if that was reached.
    """
    path, now = [start], start
    for _ in range(_MOST_STEPS):
        if path[-1].peak_bytes <= target_bytes or now.timeline.step_ms > most_ms or events <= 0:
            break
        best: tuple[tuple[bool, float, float], Evaluated] | None = None
        height = now.peak_bytes
        top = sum(peak >= height for peak in now.timeline.event_peak_bytes)
        for actions, replays in _changes(graph, now):
            events -= len(graph.events)
            other = judge(graph, costs, actions, replays)
            if other.peak_bytes > height:
                continue
            less, more_ms = height - other.peak_bytes, other.timeline.step_ms - now.timeline.step_ms
            if less:
                price = more_ms / less
            else:
                price = float(sum(peak >= height for peak in other.timeline.event_peak_bytes))
            if price > most_ms_per_byte if less else price >= top:
                continue
            rank = (not less, price, more_ms)
            if best is None or rank < best[0]:
                best = rank, other
            if events <= 0:
                break
        if best is None:
            break
        now = best[1]
        if now.peak_bytes < path[-1].peak_bytes:
            path.append(now)
    return path


def _changes(graph: StepGraph, now: Evaluated) -> Iterator[tuple[dict[int, str], dict[int, int]]]:
    """Actions and replays, each with something at the peak given way."""
    contents = contents_at_peak(graph, now.actions, now.replays, now.timeline)
    for op in dict.fromkeys(graph.storages[s].op for s in _largest(contents.replayed)):
        if op is None:
            continue
        yield now.actions, _once_more(graph, now.actions, now.replays, [op])
        ancestors = _recomputed_ancestors(graph, now.actions, op)
        if len(ancestors) > 1:
            yield now.actions, _once_more(graph, now.actions, now.replays, ancestors)
    kept = [s for s, size in contents.originals.items() if now.actions.get(s) == SAVE and size]
    for storage in _largest({s: contents.originals[s] for s in kept}):
        dropped = [s for s, action in now.actions.items() if action == RECOMPUTE and s in graph.stored]
        stops = [s for s, action in now.actions.items() if action == SAVE and s not in graph.stored and s != storage]
        actions = complete_actions(graph, [*dropped, storage] if storage in graph.stored else dropped, stops)
        maker = graph.storages[storage].op
        if actions != now.actions and maker is not None:
            yield actions, now.replays
            yield actions, _once_more(graph, actions, now.replays, _recomputed_ancestors(graph, actions, maker))


def _largest(sizes: Mapping[int, int]) -> list[int]:
    return sorted(sizes, key=lambda s: (-sizes[s], s))[:_MOST_HOLDERS]


def _once_more(
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
