"""Joint plans: save, recompute or offload each storage, on top of the exact method.

Offload candidates are what the recompute-only plan saves: memory is worth most there. In program order each of them is
offloaded if the link can carry it out before the next one, and back before it is needed. The exact method then plans
the rest (``rewrite.py``), and the simulator compares several loads of the links with the recompute-only plan.

Known weaknesses: two stages instead of one model; a storage is offloaded whole; among storages that the link could
carry only program order decides. The lower bound (``lower_bound/relaxation.py``) shares nothing with this search
and says how much that can lose.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

from lowtide.errors import BudgetInfeasibleError
from lowtide.explanation import collapse_path
from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, SAVE, TIER_OF, Moves
from lowtide.simulation.simulator import Timeline
from lowtide.solvers import tuning
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.graph_queries import choices, complete_actions, movable
from lowtide.solvers.infeasible import infeasible_error
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.offload.rewrite import rewrite_without_tiers
from lowtide.solvers.offload.transfer_schedule import schedule_transfers
from lowtide.solvers.search_context import Evaluated, Limits, SearchContext

_ACTION = {tier: action for action, tier in TIER_OF.items()}


class OffloadSearch:
    """Joint plans of one step, for any number of budgets; ``capacities``: most bytes to offload by tier, None: any."""

    def __init__(self, context: SearchContext, capacities: Mapping[str, int | None]) -> None:
        graph, costs, limits = context.graph, context.costs, context.limits
        # Limits by number of nodes: a default time limit goes, so that the plan does not depend on the machine.
        time_limit_s = math.inf if limits.time_limit_s >= Limits.time_limit_s else limits.time_limit_s
        nodes = min(limits.node_limit, tuning.OFFLOAD_NODE_LIMIT)
        limits = replace(limits, time_limit_s=time_limit_s, node_limit=nodes)
        self.context, self.graph = SearchContext(graph, costs, limits), graph
        # The faster link is loaded first.
        tiers = sorted(capacities, key=lambda tier: -costs.links[tier].fetch_bytes_per_s)
        self.capacities = {tier: capacities[tier] for tier in tiers}
        self.search = ExactSearch(self.context)
        stored_bytes = sum(graph.storages[s].bytes for s in graph.stored)
        self.worth_moving = sorted(
            s for s in movable(graph) if graph.storages[s].bytes >= tuning.MIN_OFFLOAD_SHARE * stored_bytes
        )

    def within(self, budget_bytes: int) -> Candidate:
        """The fastest plan found within ``budget_bytes``.

        Raises:
            BudgetInfeasibleError: no plan was found within the budget.
        """
        return replace(self._within(budget_bytes), capacities=self.capacities)

    def _within(self, budget_bytes: int) -> Candidate:
        if self.context.plain.peak_bytes <= budget_bytes:
            return self.search.within(budget_bytes)
        evaluated: list[Evaluated] = []
        tried: set[frozenset[tuple[int, str]]] = {frozenset()}

        def attempt(storages: list[int], base: Evaluated, load: float) -> None:
            """Offload what of ``storages`` the links carry at ``load``, beside the replays of ``base``."""
            offloaded = self._carried(storages, load, base.timeline)
            if frozenset(offloaded.items()) not in tried:
                tried.add(frozenset(offloaded.items()))
                evaluated.extend(self._plan_with(offloaded, base, budget_bytes))

        loads = tuning.LINK_LOADS
        try:
            base = self.context.simulated(self.search.within(budget_bytes, allow_fallback=False))
            evaluated.append(base)
        except BudgetInfeasibleError:
            if self._least_peak.peak_bytes > budget_bytes:
                return self._leanest(budget_bytes)
            leanest = min(self.search.published, key=lambda e: e.peak_bytes)
            base, loads = leanest, tuning.HEAVY_LINK_LOADS
        for load in loads:
            attempt(self._saved_by(base), base, load)
        for load in loads[1:]:
            attempt(self.worth_moving, base, load)
        if not evaluated:
            return self._leanest(budget_bytes)
        best = min(evaluated, key=lambda e: e.rank)
        attempt(self._saved_by(best), best, 1.0)
        return self._improved(min(evaluated, key=lambda e: e.rank), budget_bytes).candidate

    def _leanest(self, budget_bytes: int) -> Candidate:
        """The plan with the least peak, at any cost in time.

        Raises:
            BudgetInfeasibleError: that peak is above the budget.
        """
        if self._least_peak.peak_bytes <= budget_bytes:
            return self._least_peak.candidate
        found = [self._least_peak]
        # Recomputing alone is searched only if its lower bound allows a lower peak.
        if bound_peak(self.graph) < self._least_peak.peak_bytes:
            try:
                return self.search.within(budget_bytes)
            except BudgetInfeasibleError:
                found.append(self.search.min_peak)
        least = min(found, key=lambda e: e.peak_bytes).candidate
        raise infeasible_error(self.context, budget_bytes, least, method="exact", offload=True)

    def _improved(self, best: Evaluated, budget_bytes: int) -> Evaluated:
        """``best`` after local search: groups of storages get another action, as long as that makes a faster plan.

        It finds what choosing offloads before replays misses (``benchmarks/LOG.md``). The number of tries is limited by
        their size.
        """
        graph = self.graph
        tries = tuning.OFFLOAD_SWAP_EVENTS // max(len(graph.events), 1)
        moves = self._assign_tiers(self.worth_moving)
        groups = _groups(graph, moves)
        found, better = best, True
        while better and tries > 0:
            better = False
            for group in groups:
                for action in (SAVE, moves[group[0]], RECOMPUTE):
                    before = found.candidate
                    if tries <= 0 or all(action == before.actions.get(s, SAVE) for s in group):
                        continue
                    others = {s: moves[s] if action in TIER_OF else action for s in group}
                    actions = _changed(graph, before.actions, others)
                    if any(actions.get(s) != action for s in group) or not self._have_room(actions):
                        continue
                    tries -= 1
                    replays = {s: n for s, n in before.replays.items() if actions.get(s) == RECOMPUTE}
                    candidate = Candidate(actions, "feasible", None, before.provenance, replays)
                    other = schedule_transfers(self.context, candidate, budget_bytes)
                    if other.peak_bytes <= budget_bytes and other.rank < found.rank:
                        found, better = other, True
        return found

    def _have_room(self, actions: Mapping[int, str]) -> bool:
        """Whether the tiers have room for what ``actions`` offload."""
        left = self._room()
        for s, action in actions.items():
            if action in TIER_OF:
                left[TIER_OF[action]] -= self.graph.storages[s].bytes
        return min(left.values()) >= 0

    def _room(self) -> dict[str, float]:
        """Most bytes that plans may offload, by tier."""
        return {tier: math.inf if most is None else most for tier, most in self.capacities.items()}

    def _saved_by(self, base: Evaluated) -> list[int]:
        """Storages worth moving that ``base`` does not recompute."""
        return [s for s in self.worth_moving if base.candidate.actions.get(s, SAVE) != RECOMPUTE]

    @cached_property
    def _least_peak(self) -> Evaluated:
        """The plan with the least peak found: all that is worth moving is offloaded. It does not depend on a budget."""
        offloaded = self._assign_tiers(self.worth_moving)
        actions = {**dict.fromkeys(self.graph.stored, SAVE), **offloaded}
        moves = Moves(0)  # one at a time, and fetched when needed
        search = ExactSearch(rewrite_without_tiers(self.context, actions, moves))
        least = search.min_peak
        candidates = [
            Candidate({**self._of_graph(least.actions), **offloaded}, "feasible", replays=least.replays, moves=moves),
            Candidate(actions, moves=moves),
        ]
        return min(map(self.context.simulated, candidates), key=lambda e: (e.peak_bytes, e.timeline.step_ms))

    def _of_graph(self, actions: Mapping[int, str]) -> dict[int, str]:
        """``actions`` without those for storages that only the rewritten graph has."""
        return {s: action for s, action in actions.items() if s < len(self.graph.storages)}

    def _plan_with(self, offloaded: dict[int, str], base: Evaluated, budget_bytes: int) -> list[Evaluated]:
        """The fastest plan found that offloads ``offloaded``; empty if none is within the budget."""
        # Fetches are scheduled beside the replays of the plan that this one starts from.
        beside = replace(base.candidate, actions={**base.candidate.actions, **offloaded})
        moves = schedule_transfers(self.context, beside, budget_bytes).candidate.moves
        try:
            search = ExactSearch(rewrite_without_tiers(self.context, offloaded, moves))
            rest = search.within(budget_bytes, allow_fallback=False)
        except BudgetInfeasibleError:
            return []
        actions = {**self._of_graph(rest.actions), **offloaded}
        candidate = Candidate(actions, "feasible", None, rest.provenance, rest.replays)
        found = schedule_transfers(self.context, candidate, budget_bytes)
        return [found] if found.peak_bytes <= budget_bytes else []

    def _assign_tiers(self, storages: Iterable[int]) -> dict[int, str]:
        """Actions that offload ``storages`` in this order, each to the fastest tier with room left."""
        left, found = self._room(), {}
        for s in storages:
            size = self.graph.storages[s].bytes
            tier = next((t for t in left if left[t] >= size), None)
            if tier is not None:
                left[tier] -= size
                found[s] = _ACTION[tier]
        return found

    def _carried(self, storages: list[int], load: float, timeline: Timeline) -> dict[int, str]:
        """Actions for those ``storages`` that links of ``load`` times the speed carry out and back in time."""
        if math.isinf(load):
            return self._assign_tiers(storages)
        graph, costs = self.graph, self.context.costs
        links, at_ms = costs.links, self.context.event_times(timeline.replays)
        facts = step_facts(graph)
        made, needed = facts.birth, facts.first_use
        largest = max((graph.storages[s].bytes for s in storages), default=0)
        carried: dict[int, str] = {}
        free_ms = dict.fromkeys(self.capacities, 0.0)
        for s, action in self._assign_tiers(sorted(storages, key=lambda s: made[s])).items():
            tier, size = TIER_OF[action], graph.storages[s].bytes
            begin_ms = at_ms[made[s]] + costs.op_ms[graph.storages[s].op or 0]
            end_ms = max(begin_ms, free_ms[tier]) + links[tier].store_ms(size) / load
            # Two of the largest may be in flight, so one more may wait for one of them.
            if end_ms - begin_ms <= 2 * links[tier].store_ms(largest) / load:
                carried[s], free_ms[tier] = action, end_ms
        free_ms = dict.fromkeys(self.capacities, at_ms[facts.backward_start])
        for s in sorted(carried, key=lambda s: needed[s]):
            tier = TIER_OF[carried[s]]
            end_ms = free_ms[tier] + links[tier].fetch_ms(graph.storages[s].bytes) / load
            if end_ms > at_ms[needed[s]]:
                del carried[s]
            else:
                free_ms[tier] = end_ms
        return carried


def exact_search(context: SearchContext, capacities: Mapping[str, int | None]) -> ExactSearch | OffloadSearch:
    """The search for plans that offload up to ``capacities``, or nothing."""
    return OffloadSearch(context, capacities) if capacities else ExactSearch(context)


def _groups(graph: StepGraph, moves: Mapping[int, str]) -> list[tuple[int, ...]]:
    """Storages to change together: of one op in all layers, in every second layer, and each alone; largest first."""
    groups: dict[tuple[str, str, int, str], list[int]] = {}
    for s in sorted(moves):
        op = graph.ops[graph.storages[s].op or 0]
        key = collapse_path(graph.scope(op)), op.name, graph.storages[s].output, moves[s]
        groups.setdefault(key, []).append(s)
    found = {tuple(group) for group in groups.values()}
    found |= {tuple(group[half::2]) for group in groups.values() for half in (0, 1) if group[half:]}
    found |= {(s,) for s in moves}
    return sorted(found, key=lambda group: (-sum(graph.storages[s].bytes for s in group), group))


def _changed(graph: StepGraph, actions: Mapping[int, str], others: Mapping[int, str]) -> dict[int, str]:
    """``actions`` with ``others`` put in, completed so that every replay finds its inputs."""
    wanted = {**actions, **others}
    recomputed, saved = choices(graph, wanted)
    offloaded = {s: a for s, a in wanted.items() if a in TIER_OF}
    return {**complete_actions(graph, recomputed, saved), **offloaded}
