"""When offloaded storages are fetched: as late as the link allows without a wait, and never above the budget.

Fetches are planned backwards from the moments at which they are needed, one after the other on their link, with some
slack. While memory is above the budget, fetches in flight at that moment are delayed, those needed last first. Late
starts keep little memory in flight. A link that is then too late costs time, which the simulator counts.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace

from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import TIER_OF, Moves
from lowtide.simulation.simulator import Timeline
from lowtide.simulation.transfers import FETCH
from lowtide.solvers import tuning
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.search_context import Evaluated, SearchContext


def schedule_transfers(context: SearchContext, candidate: Candidate, budget_bytes: int) -> Evaluated:
    """``candidate`` with the moves that wait as little as ``budget_bytes`` allows.

    Returns:
        The fastest schedule within the budget; without one, that with the least peak.
    """
    graph, actions = context.graph, candidate.actions
    largest = max((graph.storages[s].bytes for s, a in actions.items() if a in TIER_OF), default=0)
    schedules: list[Evaluated] = []

    def schedule(moves: Moves) -> Evaluated:
        schedules.append(context.simulated(replace(candidate, moves=moves)))
        return schedules[-1]

    if not largest:
        return schedule(Moves())

    for copies in tuning.STORES_IN_FLIGHT:
        limit = copies * largest
        line = schedule(Moves(limit)).timeline  # fetched on demand
        needed = {t.storage: t.event for t in line.transfers if t.direction == FETCH}
        fetch_at = _latest_starts(context, line)
        for _ in range(tuning.FETCH_DELAY_ROUNDS):  # fetched early, as far as the budget allows
            early = schedule(Moves(limit, dict(fetch_at)))
            if early.peak_bytes <= budget_bytes:
                break
            if not _delay_fetches(graph, early.timeline, needed, fetch_at, budget_bytes):
                break
        within = [s for s in schedules if s.peak_bytes <= budget_bytes]
        if within:
            return min(within, key=lambda s: (s.timeline.step_ms, s.peak_bytes))
    return min(schedules, key=lambda s: (s.peak_bytes, s.timeline.step_ms))


def _latest_starts(context: SearchContext, timeline: Timeline) -> dict[int, int]:
    """By storage fetched on demand: the number of the last unpack at which its fetch may start and still be in time."""
    unpack_events, at_ms = step_facts(context.graph).unpack_events, context.event_times(timeline.replays)
    times = [at_ms[event] for event in unpack_events]
    busy_from: dict[str, float] = {}  # by tier: when the link starts with what is needed later
    found = {}
    for t in sorted((t for t in timeline.transfers if t.direction == FETCH), key=lambda t: -t.event):
        end_ms = min(at_ms[t.event], busy_from.get(t.tier, at_ms[t.event]))
        start_ms = end_ms - context.costs.links[t.tier].fetch_ms(t.bytes) * (1 + tuning.FETCH_SPARE_SHARE)
        busy_from[t.tier] = start_ms
        latest = bisect_right(times, start_ms) - 1
        found[t.storage] = max(0, min(latest, bisect_right(unpack_events, t.event) - 1))
    return found


def _delay_fetches(
    graph: StepGraph, timeline: Timeline, needed: Mapping[int, int], fetch_at: dict[int, int], budget_bytes: int
) -> bool:
    """Start fetches later that are in flight while memory is above the budget. Returns whether any could."""
    unpack_events = step_facts(graph).unpack_events
    changed = False
    delayed_until: dict[int, int] = {}  # storage -> event
    for event, peak in enumerate(timeline.event_peak_bytes):
        delayed_bytes = sum(graph.storages[s].bytes for s, until in delayed_until.items() if event < until)
        excess = peak - budget_bytes - delayed_bytes
        if excess <= 0:
            continue
        early = [s for s, at in fetch_at.items() if unpack_events[at] <= event < needed[s]]
        early = [s for s in early if delayed_until.get(s, 0) <= event]
        for storage in sorted(early, key=lambda s: -needed[s]):
            later = bisect_right(unpack_events, event)
            if later >= len(unpack_events) or unpack_events[later] > needed[storage]:
                continue
            fetch_at[storage] = later
            delayed_until[storage] = unpack_events[later]
            changed = True
            excess -= graph.storages[storage].bytes
            if excess <= 0:
                break
    return changed
