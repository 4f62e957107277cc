"""Save, recompute or move: the exact method, with tiers to move storages to.

What moves is chosen by what the links can carry beside the computation, what is recomputed of the rest is solved
exactly (``rewrite.py`` makes it a step without tiers), and the judge compares: several loads of the links, and no
load at all. A storage is worth moving where memory is worth most, and those are the ones that the plan without moves
keeps: what is cheap to make again is dropped there already. In program order each of them moves if the link would have
carried it off before the next, and back before it is needed.

Known weaknesses: two steps instead of one model; a storage is moved whole; which of several that the link could carry
is moved goes by program order alone. How much that loses ``bound.py`` says, which shares nothing with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import UNPACK, StepGraph, once_per_graph
from lowtide.plan import RECOMPUTE, SAVE, TIER_OF, Moves
from lowtide.simulation.simulator import Timeline, simulate_actions
from lowtide.solvers.candidate import Candidate, infeasible
from lowtide.solvers.decomposition.segments import backward_start_event
from lowtide.solvers.exact import Search
from lowtide.solvers.graph_queries import birth_and_first_use
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.offload.local_search import trade_offloads
from lowtide.solvers.offload.rewrite import rewrite_without_tiers
from lowtide.solvers.offload.transfer_schedule import Scheduled, event_times, schedule_transfers
from lowtide.solvers.search_context import Limits

_LOADS: tuple[float, ...] = (0.5, 1.0, 1.5)  # of what the links can carry without a wait
_HEAVY_LOADS = (1.0, 2.0, 4.0, math.inf)  # where recomputing alone does not do
_SMALLEST = 1e-3  # of the bytes stored: what is less is not worth a transfer
_ROUNDS = 3
_NODES = 300  # of one of many searches
_IN_THE_WAY = 0.05  # of a transfer's time: what it takes of the computation's own memory bandwidth, roughly
_LONG_WAITS = 0.1  # of the step, spent standing still
_ACTION = {tier: action for action, tier in TIER_OF.items()}


@dataclass(frozen=True)
class _Judged:
    candidate: Candidate
    timeline: Timeline

    @property
    def rank(self) -> tuple[float, int]:
        """Faster is better, and of about equally fast ones what moves less."""
        busy_ms = sum(t.end_ms - t.start_ms for t in self.timeline.transfers)
        return self.timeline.step_ms + _IN_THE_WAY * busy_ms, self.timeline.peak_bytes


def search_with_offload(
    graph: StepGraph,
    costs: Costs,
    budget_bytes: int,
    limits: Limits,
    capacities: Mapping[str, int | None],
) -> Candidate:
    """The fastest of the plans that are looked at within ``budget_bytes``.

    Args:
        capacities: Most bytes to move, by tier; None: any number.

    Raises:
        BudgetInfeasibleError: none was found that needs so little.
    """
    return OffloadSearch(graph, costs, limits, capacities).within(budget_bytes)


@once_per_graph
def movable(graph: StepGraph) -> frozenset[int]:
    """Storages that a plan may move: made in forward, stored, asked for by backward, and written by nobody since."""
    asked_for = {graph.saved[number] for kind, number in graph.events if kind == UNPACK}
    free = (s for s in graph.stored & asked_for if graph.storages[s].kind == "activation")
    return frozenset(s for s in free if not graph.storages[s].fixed)


def _by_count(limits: Limits) -> Limits:
    """Limits that count: under the clock that is only a net, what is found would depend on who else computes."""
    time_limit_s = math.inf if limits.time_limit_s >= Limits.time_limit_s else limits.time_limit_s
    return replace(limits, time_limit_s=time_limit_s, node_limit=min(limits.node_limit, _NODES))


class OffloadSearch:
    """Joint plans of one step, for any number of budgets."""

    def __init__(self, graph: StepGraph, costs: Costs, limits: Limits, capacities: Mapping[str, int | None]) -> None:
        self.graph, self.costs = graph, costs
        self.limits = _by_count(limits)
        # The faster link is loaded first.
        tiers = sorted(capacities, key=lambda tier: -costs.links[tier].fetch_bytes_per_s)
        self.capacities = {tier: capacities[tier] for tier in tiers}
        self.search = Search(graph, costs, self.limits)
        stored_bytes = sum(graph.storages[s].bytes for s in graph.stored)
        self.large = sorted(s for s in movable(graph) if graph.storages[s].bytes >= _SMALLEST * stored_bytes)

    def within(self, budget_bytes: int) -> Candidate:
        """See ``search_with_offload``."""
        return replace(self._within(budget_bytes), capacities=self.capacities)

    def _within(self, budget_bytes: int) -> Candidate:
        if self.search.plain.peak_bytes <= budget_bytes:
            return self.search.within(budget_bytes)
        tried: list[_Judged] = []
        loads = _LOADS
        try:
            like = self._judge(self.search.within(budget_bytes, allow_fallback=False))
            tried.append(like)
        except BudgetInfeasibleError:
            if self._least.timeline.peak_bytes > budget_bytes:  # with all that may be moved away, and the rest leanest
                return self._at_the_least(budget_bytes)
            leanest = min((self.search.plain, *self.search.classics), key=lambda j: j.peak_bytes)
            like, loads = self._judge(Candidate(leanest.actions)), _HEAVY_LOADS
        seen: set[frozenset[tuple[int, str]]] = {frozenset()}
        for load in loads:
            self._try(self._kept(like), like, load, budget_bytes, seen, tried)
        for load in loads[1:]:
            self._try(self.large, like, load, budget_bytes, seen, tried)
        if loads is _HEAVY_LOADS and (not tried or self._waits(tried)):
            # Dearer to find, and it keeps little: what there is to move.
            like = self._recomputed_least
            for load in loads:
                self._try(self._kept(like), like, load, budget_bytes, seen, tried)
        if tried:  # what the best of these keeps may be worth moving too
            best = min(tried, key=lambda j: j.rank)
            self._try(self._kept(best), best, 1.0, budget_bytes, seen, tried)
            return self._traded(min(tried, key=lambda j: j.rank), budget_bytes).candidate
        return self._at_the_least(budget_bytes)

    def _at_the_least(self, budget_bytes: int) -> Candidate:
        """The leanest plan there is, whatever it takes.

        Raises:
            BudgetInfeasibleError: it needs more.
        """
        if self._least.timeline.peak_bytes <= budget_bytes:
            return self._least.candidate
        found = [self._least]
        # Recomputing alone is worth its search only where nothing says that it ends higher.
        if bound_peak(self.graph) < self._least.timeline.peak_bytes:
            try:
                return self.search.within(budget_bytes)
            except BudgetInfeasibleError:
                found.append(self._recomputed_least)
        least = min(found, key=lambda j: j.timeline.peak_bytes).candidate
        raise infeasible(
            self.graph, self.costs, budget_bytes, least.actions, method="exact", replays=least.replays,
            moves=least.moves,
        )  # fmt: skip

    def _try(
        self,
        storages: list[int],
        like: _Judged,
        load: float,
        budget_bytes: int,
        seen: set[frozenset[tuple[int, str]]],
        tried: list[_Judged],
    ) -> None:
        """Move what of ``storages`` the links carry at ``load``, beside the replays of ``like``."""
        moved = self._assign(storages) if math.isinf(load) else self._carried(storages, load, like.timeline)
        if frozenset(moved.items()) in seen:
            return
        seen.add(frozenset(moved.items()))
        found = self._around(moved, like, budget_bytes)
        if found is not None:
            tried.append(found)

    def _traded(self, best: _Judged, budget_bytes: int) -> _Judged:
        sizes = {tier: math.inf if most is None else most for tier, most in self.capacities.items()}

        def fits(actions: Mapping[int, str]) -> bool:
            moved = dict.fromkeys(sizes, 0)
            for s, action in actions.items():
                if action in TIER_OF:
                    moved[TIER_OF[action]] += self.graph.storages[s].bytes
            return all(moved[tier] <= most for tier, most in sizes.items())

        def rank(found: Scheduled) -> tuple[float, int]:
            return _Judged(best.candidate, found.timeline).rank

        moves = self._assign(self.large)
        other = self._judge(trade_offloads(self.graph, self.costs, best.candidate, budget_bytes, moves, fits, rank))
        return other if other.timeline.peak_bytes <= budget_bytes and other.rank < best.rank else best

    def _kept(self, like: _Judged) -> list[int]:
        return [s for s in self.large if like.candidate.actions.get(s, SAVE) != RECOMPUTE]

    def _waits(self, tried: list[_Judged]) -> bool:
        """The best of what was tried stands still for a good part of its time."""
        best = min(tried, key=lambda j: j.rank).timeline
        return best.stall_ms > _LONG_WAITS * best.step_ms

    @cached_property
    def _recomputed_least(self) -> _Judged:
        least = self.search.least
        return self._judge(Candidate(least.actions, replays=least.replays))

    @cached_property
    def _least(self) -> _Judged:
        """The least peak that is found; the same whatever the budget was, so that asking for it succeeds."""
        moved = self._assign(self.large)
        actions = {**dict.fromkeys(self.graph.stored, SAVE), **moved}
        moves = Moves(0)  # one at a time, and back when needed
        search = Search(*rewrite_without_tiers(self.graph, self.costs, actions, moves), self.limits)
        candidates = [
            Candidate({**self._own(search.least.actions), **moved}, "feasible", moves=moves),
            Candidate(actions, moves=moves),
        ]
        return min(map(self._judge, candidates), key=lambda j: (j.timeline.peak_bytes, j.timeline.step_ms))

    def _judge(self, candidate: Candidate) -> _Judged:
        line = simulate_actions(self.graph, self.costs, candidate.actions, candidate.replays, candidate.moves)
        return _Judged(candidate, line)

    def _own(self, actions: Mapping[int, str]) -> dict[int, str]:
        return {s: action for s, action in actions.items() if s < len(self.graph.storages)}

    def _around(self, moved: dict[int, str], like: _Judged, budget_bytes: int) -> _Judged | None:
        """The fastest plan found that moves ``moved``; None where there is none within the budget."""
        graph, costs = self.graph, self.costs
        # Fetches are first planned beside the replays of the plan that this one is made from.
        before = schedule_transfers(
            graph, costs, {**like.candidate.actions, **moved}, like.candidate.replays, budget_bytes
        )
        asked_bytes = budget_bytes
        for _ in range(_ROUNDS):
            try:
                search = Search(*rewrite_without_tiers(graph, costs, moved, before.moves), self.limits)
                rest = search.within(asked_bytes, allow_fallback=False)
            except BudgetInfeasibleError:
                return None
            actions = {**self._own(rest.actions), **moved}
            found: Scheduled = schedule_transfers(graph, costs, actions, rest.replays, budget_bytes)
            if found.peak_bytes <= budget_bytes:
                candidate = Candidate(actions, "feasible", None, rest.provenance, rest.replays, found.moves)
                return _Judged(candidate, found.timeline)
            asked_bytes -= found.peak_bytes - budget_bytes
        return None

    def _assign(self, storages: Iterable[int]) -> dict[int, str]:
        """As many of ``storages`` as there is room for, on the fastest tier that has it."""
        left = {tier: math.inf if most is None else most for tier, most in self.capacities.items()}
        found = {}
        for s in storages:
            size = self.graph.storages[s].bytes
            tier = next((t for t in left if left[t] >= size), None)
            if tier is not None:
                left[tier] -= size
                found[s] = _ACTION[tier]
        return found

    def _carried(self, storages: list[int], load: float, timeline: Timeline) -> dict[int, str]:
        """Those of ``storages`` that links of ``load`` times the speed carry off in time, and back in time."""
        graph, links = self.graph, self.costs.links
        at_ms = event_times(graph, self.costs, timeline)
        made, needed = birth_and_first_use(self.graph)
        largest = max((graph.storages[s].bytes for s in storages), default=0)
        carried: dict[int, str] = {}
        free_ms = dict.fromkeys(self.capacities, 0.0)
        for s, action in self._assign(sorted(storages, key=lambda s: made[s])).items():
            tier, size = TIER_OF[action], graph.storages[s].bytes
            begin_ms = at_ms[made[s]] + self.costs.op_ms[graph.storages[s].op or 0]
            end_ms = max(begin_ms, free_ms[tier]) + links[tier].store_ms(size) / load
            # Two of the largest may be on their way, so one more may wait for one.
            if end_ms - begin_ms <= 2 * links[tier].store_ms(largest) / load:
                carried[s], free_ms[tier] = action, end_ms
        free_ms = dict.fromkeys(self.capacities, at_ms[min(backward_start_event(graph), len(at_ms) - 1)])
        for s in sorted(carried, key=lambda s: needed[s]):
            tier = TIER_OF[carried[s]]
            end_ms = free_ms[tier] + links[tier].fetch_ms(graph.storages[s].bytes) / load
            if end_ms > at_ms[needed[s]]:
                del carried[s]
            else:
                free_ms[tier] = end_ms
        return carried
