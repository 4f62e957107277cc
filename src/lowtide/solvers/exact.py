"""The exact method: the least recomputation whose *simulated* peak stays within the budget.

A MILP (``peak_model.py``) chooses, the simulator judges, and each moment at which the judge finds more memory than the
model becomes a cut, until they agree (``monolithic.py``). What comes back never exceeds the budget by the simulator.
Steps too large for one MILP are planned segment by segment out of a common pool (``decomposed_search.py``).

The search's own bound is that of the first, uncut model. It tells when to stop, and holds for all plans of that model:
every plan that replays once on a graph small enough to be modelled op by op; on larger ones those that replay each
group of ops as a whole, at most once, and, where segments are planned apart, inside its segment. What a plan shows is
``bound.py``'s.

Where the models end, at and below the least peak that replaying once can have, local search goes on from the leanest
way they know (``local_search.py``), and schedules of the chain methods stand beside it (``rotor.py``, ``revolve.py``).
No clock has a say in this part, so that the least peak is the same whenever it is asked for.

Known weaknesses: what replays an op more than once is found by local search, not proven best; on large graphs the
least peak is the best found, not proven.
"""

from __future__ import annotations

from functools import cached_property

import highspy

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE
from lowtide.solvers import tuning
from lowtide.solvers.candidate import Candidate, infeasible
from lowtide.solvers.decomposition.decomposed_search import DecomposedSearch
from lowtide.solvers.decomposition.master import ColumnGeneration
from lowtide.solvers.decomposition.segments import segments, windows, worth_replaying
from lowtide.solvers.graph_queries import droppable
from lowtide.solvers.local_search import Evaluated, reduce_peak
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.milp.coarsening import CoarseGraph
from lowtide.solvers.milp.monolithic import MonolithicSearch
from lowtide.solvers.published.lazy_candidates import LazyCandidate, fastest_within, leanest, stored_at_backward_start
from lowtide.solvers.published.methods import BUDGETED, classic_actions, lazy_candidates
from lowtide.solvers.search_context import Found, Limits, SearchContext


def exact(graph: StepGraph, costs: Costs, budget_bytes: int, limits: Limits) -> Candidate:
    """Return the fastest actions within ``budget_bytes``.

    Raises:
        BudgetInfeasibleError: no actions were found that need so little.
    """
    return Search(graph, costs, limits).within(budget_bytes)


class Search:
    """The search on one step; asking it for several budgets shares what it has learnt."""

    def __init__(self, graph: StepGraph, costs: Costs, limits: Limits) -> None:
        ops = worth_replaying(graph)
        coarse = CoarseGraph(graph, costs) if len(ops) <= tuning.MONOLITHIC_OPS else None
        self.context = SearchContext(graph, costs, limits, fine=coarse is not None and coarse.fine)
        self.graph, self.costs, self.limits, self.plain = graph, costs, limits, self.context.plain
        pool = None if coarse is not None and coarse.size <= tuning.MONOLITHIC_SIZE else self._pool(ops, coarse)
        if pool is None and (coarse is None or coarse.size > tuning.MONOLITHIC_FEW_REPEATS_SIZE):
            coarse = CoarseGraph(graph, costs, reach=0)
        self.apart = DecomposedSearch(self.context, pool) if pool is not None else None
        self.whole = MonolithicSearch(self.context, coarse) if coarse is not None else None

    def _pool(self, ops: list[int], coarse: CoarseGraph | None) -> ColumnGeneration | None:
        segment_of = segments(self.graph, ops)
        found = windows(self.graph, segment_of)
        if found is None or len(found) < tuning.MIN_SEGMENTS:
            return None
        pool = ColumnGeneration(self.graph, self.costs, segment_of, found)
        unlike = 2 * len(pool.different) > len(found) + 1
        return None if unlike and coarse is not None and coarse.size <= tuning.MONOLITHIC_FEW_REPEATS_SIZE else pool

    def within(self, budget_bytes: int, *, allow_fallback: bool = True) -> Candidate:
        """The fastest actions within ``budget_bytes``.

        Args:
            allow_fallback: Where the search finds nothing, see whether what is near the least peak would do.

        Raises:
            BudgetInfeasibleError: no actions were found that need so little.
        """
        if self.plain.peak_bytes <= budget_bytes:
            return self.candidate(self.plain, "optimal", self.costs.plain_step_ms)
        result = (
            Found([], False, self.context.floor_ms) if self._impossible(budget_bytes) else self.fastest(budget_bytes)
        )
        fitting = [j for j in result.judged if j.peak_bytes <= budget_bytes]
        if not fitting:
            if not allow_fallback:
                raise BudgetInfeasibleError("nothing found", budget_bytes=budget_bytes, least_bytes=budget_bytes + 1)
            return self._near_the_least(budget_bytes)
        best = min(fitting, key=lambda j: j.rank)
        best = min((best, *self._classics_that_may_beat(best, budget_bytes)), key=lambda j: j.rank)
        best = min((best, *self._offered(budget_bytes)), key=lambda j: j.rank)
        status = "optimal" if result.proven and best.timeline.step_ms <= result.best_ms else "feasible"
        best = self._cleaned(best, budget_bytes)
        return self.candidate(best, status, min(result.bound_ms, best.timeline.step_ms))

    def _impossible(self, budget_bytes: int) -> bool:
        # One that fits is sooner found than the proof.
        mild = (actions for actions in self._classic_actions if self._kept_bytes(actions) <= budget_bytes)
        if any(self.judge(actions).peak_bytes <= budget_bytes for actions in mild):
            return False
        return budget_bytes < bound_peak(self.graph)

    def _near_the_least(self, budget_bytes: int) -> Candidate:
        """Where the search finds nothing: the best of what is known, schedules that replay an op often among it.

        Raises:
            BudgetInfeasibleError: nothing known needs so little.
        """
        known = [j for j in self.classics if j.peak_bytes <= budget_bytes]
        for path in self._paths:
            known += [j for j in path if j.peak_bytes <= budget_bytes][:1]
        chain = fastest_within(self.graph, self.costs, self._often, budget_bytes)
        if chain is not None:
            known.append(self.judge(chain.actions, chain.replays))
        if not known:
            least = self.least
            if least.peak_bytes > budget_bytes:
                raise infeasible(
                    self.graph, self.costs, budget_bytes, least.actions, method="exact", replays=least.replays
                )
            known = [least]
        cleaned = [self._cleaned(j, budget_bytes) for j in known]
        return self.candidate(min(cleaned, key=lambda j: j.rank), "feasible", self.context.floor_ms)

    def _cleaned(self, judged: Evaluated, budget_bytes: int) -> Evaluated:
        if self.whole is not None:
            judged = self.whole.lower_peak(judged)
        return self.context.save_what_fits(judged, budget_bytes)

    @cached_property
    def _often(self) -> list[LazyCandidate]:
        """Schedules that replay an op often."""
        try:
            return [
                *lazy_candidates(self.graph, self.costs, "rotor"),
                *lazy_candidates(self.graph, self.costs, "revolve"),
            ]
        except ValueError:  # no layer repeats
            return []

    @cached_property
    def _budgeted(self) -> list[list[LazyCandidate]]:
        """What each classic with a plan for every budget would do, where listing that takes little time."""
        found = []
        for method in BUDGETED if self.limits.listed and len(self.graph.ops) <= tuning.PUBLISHED_CANDIDATES_OPS else ():
            try:
                found.append(lazy_candidates(self.graph, self.costs, method))
            except ValueError:  # no layer repeats
                continue
        return found

    def _offered(self, budget_bytes: int) -> list[Evaluated]:
        """Their plans for this budget: a search that stops within its tolerance may stop just above one."""
        candidates = [fastest_within(self.graph, self.costs, offered, budget_bytes) for offered in self._budgeted]
        return [self.judge(candidate.actions, candidate.replays) for candidate in candidates if candidate is not None]

    @cached_property
    def classics(self) -> list[Evaluated]:
        """What to be at least as good as."""
        return [self.judge(actions) for actions in self._classic_actions]

    @cached_property
    def _classic_actions(self) -> list[dict[int, str]]:
        return classic_actions(self.graph)

    def _classics_that_may_beat(self, best: Evaluated, budget_bytes: int) -> list[Evaluated]:
        """Those that fit, leaving out what takes no simulation to see: too slow, or too much saved."""
        found = []
        for actions in self._classic_actions:
            if self._least_ms(actions) <= best.timeline.step_ms and self._kept_bytes(actions) <= budget_bytes:
                judged = self.judge(actions)
                found += [judged] if judged.peak_bytes <= budget_bytes else []
        return found

    def _least_ms(self, actions: dict[int, str]) -> float:
        """Step time if nothing is replayed but what makes the storages that backward asks for."""
        asked_for, storages = droppable(self.graph), self.graph.storages
        ops = {storages[s].op for s, action in actions.items() if action == RECOMPUTE and s in asked_for}
        if not ops:
            return self.costs.plain_step_ms
        replay_ms = sum(self.costs.op_ms[op] for op in ops if op is not None)
        return self.context.floor_ms + replay_ms + len(ops) * (self.costs.replay_us + self.costs.record_us) / 1e3

    def _kept_bytes(self, actions: dict[int, str]) -> int:
        """What is saved and lives when backward begins."""
        storages = self.graph.storages
        held = sum(storages[s].bytes for s in stored_at_backward_start(self.graph) if actions.get(s) != RECOMPUTE)
        return self.graph.resident_bytes + held

    @cached_property
    def least(self) -> Evaluated:
        """The least peak that is found; the same whatever was asked before, so that asking for it succeeds."""
        known = [self.plain, *self.classics, *(path[-1] for path in self._paths)]
        chain = leanest(self.graph, self.costs, self._often)
        if chain is not None:
            known.append(self.judge(chain.actions, chain.replays))
        found = min(known, key=lambda j: (j.peak_bytes, j.timeline.step_ms))
        # Saving what need not be replayed may lower the peak again: a plan for the least is to need the least.
        while (cleaned := self._cleaned(found, found.peak_bytes)).peak_bytes < found.peak_bytes:
            found = cleaned
        return found

    @cached_property
    def _paths(self) -> list[list[Evaluated]]:
        """From the leanest that the models and the classics know to ways that nothing nearby beats."""
        model = self.apart or self.whole
        assert model is not None
        starts = [model.leanest(), min((self.plain, *self.classics), key=lambda j: (j.peak_bytes, *j.rank))]
        events = self.context.events(tuning.MIN_PEAK_EVENTS)
        return [reduce_peak(self.graph, self.costs, start, events=events) for start in starts if start is not None]

    def judge(self, actions: dict[int, str], replays: dict[int, int] | None = None) -> Evaluated:
        return self.context.judge(actions, replays)

    def candidate(self, judged: Evaluated, status: str, bound_ms: float) -> Candidate:
        solver = {"solver": f"HiGHS {highspy.Highs().version()}"}
        return Candidate(judged.actions, status, bound_ms, solver, judged.replays)

    def fastest(self, budget_bytes: int) -> Found:
        """What the models find."""
        if self.apart is None:
            assert self.whole is not None
            return self.whole.fastest(budget_bytes)
        found = self.apart.fastest(budget_bytes)
        if self.limits.gap != 0 or found.proven or self.whole is None:
            return found
        # No excess is tolerated: what a pool has no columns for, a model of all layers at once may find.
        whole = MonolithicSearch(self.context, CoarseGraph(self.graph, self.costs, reach=0)).fastest(budget_bytes)
        return min(found, whole, key=lambda f: f.best_within(budget_bytes))
