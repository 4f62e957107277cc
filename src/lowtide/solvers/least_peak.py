"""The plan with the lowest peak that a local search finds for a graph, at any cost in time.

The search does not read op times or a clock, so its answer depends on the graph alone. It starts from several plans:

- the chain schedule with the lowest peak or, where no layer repeats, the published method with the lowest;
- the columns with the lowest peak, where segments are planned apart;
- everything recomputed, in graphs of few events; where several backward passes ask for the same, also as often as each
  of them asks;
- the best of all choices, in graphs of few storages;
- the relaxation of one model of the step, rounded in several ways, where that is small.

From each it takes the first change that lowers the peak, trying those with the fewest replays per byte first; to
compare all changes each time left no time to get as low. Where no change helps, it flips a few decisions at random and
goes on from there.

Known weakness: the result is not proven least, and in graphs of many events fewer changes are tried.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from itertools import compress, product
from typing import NamedTuple

from lowtide.graph.costs import Costs
from lowtide.graph.facts import passes
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import SAVE
from lowtide.solvers import tuning
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.decomposition.master import ColumnGeneration
from lowtide.solvers.graph_queries import choices, complete_actions, recomputable
from lowtide.solvers.local_search import LazyPath, changes
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.milp.monolithic import MonolithicSearch
from lowtide.solvers.published.lazy_candidates import least_peak
from lowtide.solvers.published.methods import chain_schedules, fixed_plans
from lowtide.solvers.search_context import Evaluated, SearchContext


class LeanPlan(NamedTuple):
    """A candidate, and its simulated peak."""

    candidate: Candidate
    peak_bytes: int


# By graph fingerprint: the least found, so that a graph that is traced again is not searched again.
_least: OrderedDict[str, LeanPlan] = OrderedDict()


class LeastPeakSearch:
    """Candidates with ever lower peaks, searched for as far as somebody asks; the path is the same however it is."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph, self._context = graph, SearchContext(graph, Costs((1.0,) * len(graph.ops)))
        self._events = tuning.LEAST_PEAK_EVENTS
        self._path = LazyPath(LeanPlan(e.candidate, e.peak_bytes) for e in self._search())

    def within(self, budget_bytes: int) -> LeanPlan | None:
        """One that needs no more than ``budget_bytes``; None where none is found."""
        known = _least.get(self._graph.fingerprint)
        candidates = self._path if known is None else (known,)
        return next((plan for plan in candidates if plan.peak_bytes <= budget_bytes), None)

    def found_within(self, budget_bytes: int) -> LeanPlan | None:
        """The least, if an earlier search of this process has found it and it fits: nothing is searched."""
        known = _least.get(self._graph.fingerprint)
        return known if known is not None and known.peak_bytes <= budget_bytes else None

    @property
    def least(self) -> LeanPlan:
        """The one with the least peak."""
        fingerprint = self._graph.fingerprint
        if fingerprint not in _least:
            *_, _least[fingerprint] = self._path
            while len(_least) > tuning.LEAST_PEAKS_KEPT:
                _least.popitem(last=False)
        return _least[fingerprint]

    def _search(self) -> Iterator[Evaluated]:
        best, proven = self._least_published, bound_peak(self._graph)
        yield best
        # Apart, so that the model's starts take no restart away from the others'.
        for starts in (self._starts(), self._starts_of_model()):
            for found in self._search_from(starts):
                if found.peak_bytes < best.peak_bytes:
                    best = found
                    yield best
                if best.peak_bytes <= proven:
                    return
        # Saving what need not be replayed may lower the peak further.
        while (saving := self._context.save_what_fits(best, best.peak_bytes)).peak_bytes < best.peak_bytes:
            best = saving
            yield best

    def _search_from(self, starts: Iterator[Evaluated]) -> Iterator[Evaluated]:
        """All that is met on the way down from ``starts``, and from where these ended with decisions turned over."""
        reached: list[Evaluated] = []  # where the descent from each start ended
        for start in starts:
            for found in self._descent(start):
                yield found
            reached.append(found)
        choose = random.Random(0)
        for turn in range(tuning.LEAST_PEAK_RESTARTS if reached else 0):
            if self._events <= 0:
                break
            place = turn % len(reached)
            for found in self._descent(self._turned_over(reached[place], choose)):
                yield found
            if found.peak_bytes <= reached[place].peak_bytes:
                reached[place] = found

    def _starts(self) -> Iterator[Evaluated]:
        graph, evaluate = self._graph, self._context.evaluate
        chain = least_peak(self._context, chain_schedules(self._context), for_search=True)
        if chain is not None:
            yield self._context.simulated(chain)
        else:
            yield self._least_published
        if passes(graph) > 1:
            yield self._least_published
            if len(graph.events) <= tuning.LEAST_PEAK_DEEP_EVENTS:  # in each pass, as often as it is asked for
                everything = complete_actions(graph, graph.stored)
                yield evaluate(everything, dict.fromkeys(everything, max(tuning.PASS_REPLAYS)))
        if (columns := ColumnGeneration.of(self._context)) is not None:
            choice = columns.min_peak_choice()
            yield evaluate(choice.actions, choice.replays)
        if len(graph.events) <= tuning.LEAST_PEAK_DEEP_EVENTS:
            yield evaluate(complete_actions(graph, graph.stored))
        if len(free := sorted(recomputable(graph))) <= tuning.LEAST_PEAK_ALL_CHOICES:
            yield min(map(evaluate, _all_actions(graph, free)), key=_height)

    def _starts_of_model(self) -> Iterator[Evaluated]:
        model = MonolithicSearch.of(self._context) if self._events > 0 else None
        if model is not None and model.coarse.size <= tuning.LEAST_PEAK_MODEL_SIZE:
            yield from model.rounded_min_peaks()

    @cached_property
    def _least_published(self) -> Evaluated:
        return min(fixed_plans(self._context), key=lambda e: (e.peak_bytes, *e.rank))

    def _descent(self, start: Evaluated) -> Iterator[Evaluated]:
        """From ``start`` on, the first change each time that lowers the peak, or at how many moments it is reached."""
        yield start
        current, found = start, True
        most = self._events - tuning.LEAST_PEAK_START_EVENTS
        while found:
            found, height = False, _height(current)
            limit_bytes = height[0] - (height[1] == 1)
            for change in sorted(changes(self._context, current), key=lambda c: c.ms_per_byte):
                if self._events <= max(most, 0):
                    return
                other = self._context.evaluate(change.actions, change.replays, limit_bytes)
                self._events -= len(other.timeline.live_bytes) + len(other.timeline.replays)
                if _height(other) < height:
                    current, found = other, True
                    yield current
                    break

    def _turned_over(self, best: Evaluated, choose: random.Random) -> Evaluated:
        """``best`` with a few decisions turned over; replay counts stay."""
        graph = self._graph
        dropped, stops = choices(graph, best.actions)
        saved = [s for s in sorted(graph.stored) if best.actions[s] == SAVE]

        def some(storages: list[int], of: int) -> set[int]:
            share = choose.choice(tuning.LEAST_PEAK_TURNS) / max(of, 1)
            return {s for s in storages if choose.random() < share}

        to_save = some(dropped, len(dropped))
        to_drop = some([*saved, *stops], len(saved) + len(stops))
        dropped = [s for s in dropped if s not in to_save] + [s for s in saved if s in to_drop]
        actions = complete_actions(graph, dropped, [s for s in stops if s not in to_drop])
        return self._context.evaluate(actions, best.replays)


def _all_actions(graph: StepGraph, free: list[int]) -> Iterator[dict[int, str]]:
    """Of every choice there is among ``free``, all that may be recomputed: of a small graph these are few."""
    for chosen in product((False, True), repeat=len(free)):
        picked = set(compress(free, chosen))
        yield complete_actions(graph, picked & graph.stored, picked - graph.stored)


def _height(evaluated: Evaluated) -> tuple[int, int]:
    """The peak, and at how many moments it is reached."""
    peaks = evaluated.timeline.event_peak_bytes
    return evaluated.peak_bytes, peaks.count(evaluated.peak_bytes)
