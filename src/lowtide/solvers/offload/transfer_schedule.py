"""When moved storages come back: as late as the link allows without a wait, and never where the peak forbids it.

Fetches are planned backwards from the moments at which they are needed, one after the other on their link, each with
some time to spare; then those that are on their way while memory is above the budget are put off, the last needed
first. Latest starts first is what keeps the bytes on their way few; that a link is late costs time, which the judge
counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.graph.costs import Costs, Link
from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import RUN, StepGraph
from lowtide.plan import TIER_OF, Moves
from lowtide.simulation.simulator import Timeline, simulate_actions
from lowtide.simulation.transfers import FETCH
from lowtide.solvers import tuning


@dataclass(frozen=True)
class Scheduled:
    """When moved storages travel, and what the judge says of it."""

    moves: Moves
    timeline: Timeline

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes


def schedule_transfers(
    graph: StepGraph, costs: Costs, actions: Mapping[int, str], replays: Mapping[int, int], budget_bytes: int
) -> Scheduled:
    """When the moved storages among ``actions`` travel, with as little waiting as ``budget_bytes`` allows.

    Returns:
        The fastest within the budget; where nothing is, what needs least.
    """
    moved = [s for s, a in actions.items() if a in TIER_OF]
    if not moved:
        return Scheduled(Moves(), simulate_actions(graph, costs, actions, replays, Moves()))
    largest = max(graph.storages[s].bytes for s in moved)
    tried: list[Scheduled] = []
    for copies in tuning.STORES_IN_FLIGHT:
        tried += _with_window(graph, costs, actions, replays, budget_bytes, copies * largest)
        within = [s for s in tried if s.peak_bytes <= budget_bytes]
        if within:
            return min(within, key=lambda s: (s.timeline.step_ms, s.peak_bytes))
    return min(tried, key=lambda s: (s.peak_bytes, s.timeline.step_ms))


def _with_window(
    graph: StepGraph,
    costs: Costs,
    actions: Mapping[int, str],
    replays: Mapping[int, int],
    budget_bytes: int,
    max_inflight_bytes: int,
) -> list[Scheduled]:
    """What is tried with so many bytes on their way out: on demand, and fetched early as far as the budget allows."""

    def judged(moves: Moves) -> Scheduled:
        return Scheduled(moves, simulate_actions(graph, costs, actions, replays, moves))

    tried = [judged(Moves(max_inflight_bytes))]
    unpacks = step_facts(graph).unpack_events
    needed = {t.storage: t.event for t in tried[0].timeline.transfers if t.direction == FETCH}
    fetch_at = _latest_starts(graph, costs, actions, tried[0].timeline, needed)
    for _ in range(tuning.FETCH_DELAY_ROUNDS):
        tried.append(judged(Moves(max_inflight_bytes, dict(fetch_at))))
        if tried[-1].peak_bytes <= budget_bytes:
            break
        if not _put_off(graph, tried[-1].timeline, needed, unpacks, fetch_at, budget_bytes):
            break
    return tried


def _latest_starts(
    graph: StepGraph, costs: Costs, actions: Mapping[int, str], timeline: Timeline, needed: Mapping[int, int]
) -> dict[int, int]:
    """By storage: the number of the last unpack at which its fetch may start and still be in time."""
    unpacks, at_ms = step_facts(graph).unpack_events, event_times(graph, costs, timeline)
    times = [at_ms[event] for event in unpacks]
    busy_from: dict[str, float] = {}  # by tier: when the link is wanted for what is needed later
    found = {}
    for storage, event in sorted(needed.items(), key=lambda item: -item[1]):
        tier = TIER_OF[actions[storage]]
        link: Link = costs.links[tier]
        end_ms = min(at_ms[event], busy_from.get(tier, at_ms[event]))
        start_ms = end_ms - link.fetch_ms(graph.storages[storage].bytes) * (1 + tuning.FETCH_SPARE_SHARE)
        busy_from[tier] = start_ms
        latest = bisect_right(times, start_ms) - 1
        found[storage] = max(0, min(latest, bisect_right(unpacks, event) - 1))
    return found


def _put_off(
    graph: StepGraph,
    timeline: Timeline,
    needed: Mapping[int, int],
    unpacks: list[int],
    fetch_at: dict[int, int],
    budget_bytes: int,
) -> bool:
    """Start fetches later that are on their way where memory is above the budget; return whether any was."""
    changed = False
    relief: dict[int, int] = {}  # storage -> up to which event it is away by now
    for event, peak in enumerate(timeline.event_peak_bytes):
        excess = peak - budget_bytes - sum(graph.storages[s].bytes for s, until in relief.items() if event < until)
        if excess <= 0:
            continue
        waiting = [s for s, at in fetch_at.items() if unpacks[at] <= event < needed[s] and relief.get(s, 0) <= event]
        for storage in sorted(waiting, key=lambda s: -needed[s]):
            later = bisect_right(unpacks, event)
            if later >= len(unpacks) or unpacks[later] > needed[storage]:
                continue
            fetch_at[storage] = later
            relief[storage] = unpacks[later]
            changed = True
            excess -= graph.storages[storage].bytes
            if excess <= 0:
                break
    return changed


def event_times(graph: StepGraph, costs: Costs, timeline: Timeline | None = None) -> list[float]:
    """Milliseconds from the start of the step to each event, replays included, waits not."""
    extra = [0.0] * (len(graph.events) + 1)
    for replay in timeline.replays if timeline is not None else ():
        extra[replay.event + 1] += costs.op_ms[replay.op] + costs.replay_us / 1e3
    now, found = 0.0, []
    for event, (kind, number) in enumerate(graph.events):
        now += extra[event]
        found.append(now)
        if kind == RUN:
            now += costs.op_ms[number] + (0.0 if graph.ops[number].backward else costs.dispatch_us / 1e3)
    return found
