"""The method ``exact``: the least recomputation found whose *simulated* peak stays within the budget.

"Exact" means: the simulator meets the budget to the byte, and mixed-integer programs with a bound minimise the time. It
does not mean that every plan is proven best. On graphs small enough to be modelled op by op, status ``optimal`` is a
proof for all plans that replay each op at most once; on larger ones, within the tolerance, for the plans of the model:
they replay groups of ops as a whole, at most once, and inside their segment where the step is decomposed. The gap that
a plan shows is to the lower bound for every plan (``lower_bound/bound.py``).

A MILP (``peak_model.py``) chooses and the simulator evaluates (``monolithic.py``). Steps too large for one MILP are
planned segment by segment (``decomposed_search.py``).

Budgets at and below the least peak of replaying once are left to local search from the models' least peak
(``local_search.py``) and to schedules of the chain methods (``rotor.py``, ``revolve.py``). The least peak itself comes
from the graph alone (``least_peak.py``), so it is the same whenever it is asked for.

Known weaknesses: plans that replay an op more than once are found by local search, not proven best; nor is the least
peak of large graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from itertools import islice

import highspy

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.facts import passes
from lowtide.solvers import tuning
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.decomposition.decomposed_search import DecomposedSearch
from lowtide.solvers.decomposition.master import ColumnGeneration
from lowtide.solvers.decomposition.segments import segments
from lowtide.solvers.infeasible import infeasible_error
from lowtide.solvers.least_peak import LeastPeakSearch
from lowtide.solvers.local_search import LazyPath, descent
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.milp.coarsening import CoarseGraph
from lowtide.solvers.milp.monolithic import MonolithicSearch
from lowtide.solvers.published.lazy_candidates import LazyCandidate, fastest_within
from lowtide.solvers.published.methods import chain_schedules, fixed_plans
from lowtide.solvers.search_context import Evaluated, SearchContext, SearchResult


class ExactSearch:
    """The search on one step; searches for several budgets share what they learn."""

    def __init__(self, context: SearchContext) -> None:
        self.context, self.graph = context, context.graph

    @property
    def decomposed(self) -> DecomposedSearch | None:
        """The search segment by segment; None where the step is one model."""
        return self._models[0]

    @property
    def monolithic(self) -> MonolithicSearch | None:
        """The search by one model; None for large steps that are decomposed."""
        return self._models[1]

    @cached_property
    def _models(self) -> tuple[DecomposedSearch | None, MonolithicSearch | None]:
        """Built when first asked for: the least peak is found without them."""
        whole = MonolithicSearch.of(self.context)
        coarse = None if whole is None else whole.coarse
        columns = None if coarse is not None and coarse.size <= tuning.MONOLITHIC_SIZE else self._columns(coarse)
        if columns is None and (coarse is None or coarse.size > tuning.MONOLITHIC_NO_REPEATS_SIZE):
            coarse = self._coarse_by_segment()
        return (
            None if columns is None else DecomposedSearch(self.context, columns),
            None if coarse is None else MonolithicSearch(self.context, coarse),
        )

    def _columns(self, coarse: CoarseGraph | None) -> ColumnGeneration | None:
        """Column generation for the step; None where decomposing is not possible or not worth it."""
        columns = ColumnGeneration.of(self.context)
        if columns is None:
            return None
        all_differ = len(columns.distinct_pools) == len(columns.pools)
        small = coarse is not None and coarse.size <= tuning.MONOLITHIC_NO_REPEATS_SIZE
        return None if all_differ and small else columns

    def _coarse_by_segment(self) -> CoarseGraph:
        """The model in which replays stay inside their segment."""
        return CoarseGraph(self.context, segments(self.graph), within_segments=True)

    def within(self, budget_bytes: int, *, allow_fallback: bool = True) -> Candidate:
        """The fastest candidate found within ``budget_bytes``.

        Args:
            allow_fallback: Where the models find nothing, whether to try candidates near the least peak.

        Raises:
            BudgetInfeasibleError: none was found that needs so little.
        """
        plain = self.context.plain
        if plain.peak_bytes <= budget_bytes:
            return self._candidate(plain, "optimal", self.context.costs.plain_step_ms)
        result = SearchResult(None, False, self.context.floor_ms)
        # A published method that fits is found faster than the proof that none can.
        if any(e.peak_bytes <= budget_bytes for e in self.published) or budget_bytes >= bound_peak(self.graph):
            result = self.fastest(budget_bytes)
        if result.best is None:
            if not allow_fallback:
                raise BudgetInfeasibleError("nothing found", budget_bytes=budget_bytes, least_bytes=budget_bytes + 1)
            return self._near_least_peak(budget_bytes)
        # Models within their tolerance or their limit of nodes may miss what a published method finds.
        known = min([result.best, *(e for e in self.published if e.peak_bytes <= budget_bytes)], key=lambda e: e.rank)
        best = self._improved(known, budget_bytes)
        return self._candidate(
            best, "optimal" if result.proven else "feasible", min(result.bound_ms, best.timeline.step_ms)
        )

    def first(self, budget_bytes: int, *, near_least: bool = True) -> Candidate | None:
        """A good candidate in a small part of the time of ``within``, which then goes on from there; None: none found.

        The fastest of what the published methods and the first columns, or the rounded relaxation, give. Where they
        give nothing, the budget is near the least peak: the first on the way there, or a schedule of the chain methods.
        That takes longest and gives the slowest plans; without ``near_least`` it is left out.
        """
        found = [e for e in self.published if e.peak_bytes <= budget_bytes]
        if self.context.plain.peak_bytes > budget_bytes:
            model = self.decomposed or self.monolithic
            assert model is not None
            found += model.first(budget_bytes)
            if not found and self.decomposed is not None:  # what ``fastest`` begins with
                best = self.decomposed.by_single_segments(budget_bytes).best
                found += [] if best is None else [best]
        if not found and (lean := self._least.found_within(budget_bytes)):  # an error has said that this is the least
            found = [self.context.simulated(lean.candidate)]
        elif not found and near_least and budget_bytes >= bound_peak(self.graph):
            found = self._chain_within(budget_bytes)
            # With a schedule at hand, only what is found without a descent; where the step is one model, not even that.
            most_steps = 1 if found else None
            for path in self._descents if self.decomposed is not None or not found else ():
                found += _first_within(budget_bytes, islice(path, most_steps))
                if found and most_steps is None:
                    break
        fastest = min(found, key=lambda e: e.rank, default=None)
        return None if fastest is None else self._candidate(fastest, "feasible", self.context.floor_ms)

    def published_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest published method that fits, known before any model is built; None where none does."""
        found = min((e for e in self.published if e.peak_bytes <= budget_bytes), key=lambda e: e.rank, default=None)
        return None if found is None else self._candidate(found, "feasible", self.context.floor_ms)

    def fastest(self, budget_bytes: int) -> SearchResult:
        """What the models find."""
        if self.decomposed is None:
            assert self.monolithic is not None
            return self.monolithic.fastest(budget_bytes)
        found = self.decomposed.fastest(budget_bytes)
        if self.context.limits.gap != 0 or found.proven or self.monolithic is None:
            return found
        # No gap is tolerated: a model of all layers at once may find what no column has.
        monolithic = MonolithicSearch(self.context, self._coarse_by_segment()).fastest(budget_bytes)
        return min(found, monolithic, key=lambda result: result.best_ms)

    def _near_least_peak(self, budget_bytes: int) -> Candidate:
        """Where the models find nothing: the fastest known, schedules that replay an op often included.

        Raises:
            BudgetInfeasibleError: nothing known needs so little.
        """
        lean = self._least.within(budget_bytes)
        if lean is None:
            raise infeasible_error(self.context, budget_bytes, self._least.least.candidate, method="exact")
        known = [self.context.simulated(lean.candidate)]
        known += [e for e in self.published if e.peak_bytes <= budget_bytes]
        for path in self._descents:
            known += _first_within(budget_bytes, path)
        known += self._chain_within(budget_bytes)
        improved = [self._improved(e, budget_bytes) for e in known]
        return self._candidate(min(improved, key=lambda e: e.rank), "feasible", self.context.floor_ms)

    def _improved(self, evaluated: Evaluated, budget_bytes: int) -> Evaluated:
        if self.monolithic is not None:
            evaluated = self.monolithic.lower_peak(evaluated)
        evaluated = self.context.save_what_fits(evaluated, budget_bytes)
        if passes(self.graph) == 1 or not evaluated.replays:
            return evaluated
        return self.context.save_what_fits(self.context.replay_less(evaluated, budget_bytes), budget_bytes)

    def _chain_within(self, budget_bytes: int) -> list[Evaluated]:
        """The fastest schedule of the chain methods within the budget, if there is one."""
        chain = fastest_within(self.context, self._chain_schedules, budget_bytes, for_search=True)
        return [] if chain is None else [self.context.simulated(chain)]

    @cached_property
    def _chain_schedules(self) -> list[LazyCandidate]:
        """Schedules that may replay an op many times."""
        return chain_schedules(self.context)

    @cached_property
    def published(self) -> list[Evaluated]:
        """The published methods that take no budget, the plain step first."""
        return fixed_plans(self.context)

    @cached_property
    def min_peak(self) -> Evaluated:
        """The least peak found, the same for all costs."""
        return self.context.simulated(self._least.least.candidate)

    @cached_property
    def _least(self) -> LeastPeakSearch:
        return LeastPeakSearch(self.graph)

    @cached_property
    def _descents(self) -> list[LazyPath[Evaluated]]:
        """Local searches for the least peak: from the models' least, and from the least of the published methods."""
        small = self.monolithic is not None and self.monolithic.coarse.size <= tuning.MONOLITHIC_NO_REPEATS_SIZE
        model = self.monolithic if small else self.decomposed or self.monolithic
        assert model is not None
        starts = [model.min_peak(), min(self.published, key=lambda e: (e.peak_bytes, *e.rank))]
        events = tuning.MIN_PEAK_EVENTS
        return [LazyPath(descent(self.context, s, events=events)) for s in starts if s is not None]

    def _candidate(self, evaluated: Evaluated, status: str, bound_ms: float) -> Candidate:
        solver = {"solver": f"HiGHS {highspy.Highs().version()}"}
        return replace(evaluated.candidate, status=status, bound_ms=bound_ms, provenance=solver)


def _first_within(budget_bytes: int, path: Iterable[Evaluated]) -> list[Evaluated]:
    """The first that needs no more than ``budget_bytes``, if there is one."""
    return list(islice((e for e in path if e.peak_bytes <= budget_bytes), 1))
