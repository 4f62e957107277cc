"""Column generation for deep models: one column per segment, chosen together; pools grow by what would help most.

Dantzig-Wolfe decomposition (1960, https://doi.org/10.1287/opre.8.1.101) over segments. A *column* is one candidate for
one segment: its time, the bytes it takes off what is kept between forward and backward, and the peak in its own windows
while all other segments save everything. Segments add up: with ``saved`` of the columns before it, segment l peaks at
peak_l - sum_{j<l} saved_j, because backward comes to it when only the segments before it still hold anything.

    minimise    sum ms_c z_{l,c}
    such that   sum_c z_{l,c} = 1                                        each segment runs by one column
                sum_c peak_{l,c} z_{l,c} - H_l <= budget                 at its own forward and backward
                H_{l+1} = H_l + sum_c saved_c z_{l,c}                    what the segments up to l have saved

Where Python holds something until the forward pass ends (autocast's copies of weights), a column saves less by the end
of the forward pass than at the start of backward, and forward and backward have rows of their own.

The duals of the relaxation price kept bytes and peak bytes for each segment; the column that is best at those prices is
added, until none is better (``pricing.py``). Equal segments share a pool, so time grows with the number of distinct
ones. The relaxation's value, corrected by what pricing left open, bounds all plans that replay inside segments, each op
once. The final choice is the fastest path through all segments (``shortest_path.py``), where one arc may cover several
of them (``multi_segment.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.solvers import tuning
from lowtide.solvers.decomposition.pricing import Column, ColumnPool, DualPrices, SegmentRun
from lowtide.solvers.decomposition.segments import segments, windows
from lowtide.solvers.decomposition.shortest_path import fastest_path, least_budget
from lowtide.solvers.decomposition.subgraph import SubgraphContent, SubgraphSource
from lowtide.solvers.decomposition.subgraph_builder import build_subgraph
from lowtide.solvers.graph_queries import choices, complete_actions
from lowtide.solvers.milp.highs import LinearProgram, LpResult
from lowtide.solvers.search_context import SearchContext

PeakPrice = tuple[float, bool]  # ms per byte, and whether a byte kept costs more at forward's end


class _Mixture(NamedTuple):
    """Columns of which the relaxation takes a share each, by what they keep; prices as in ``PeakPrice``."""

    pool: ColumnPool
    peak_ms: float
    at_forward_end: bool
    least_bytes: int
    most_bytes: int


class _Generated(NamedTuple):
    """What the generation of columns for one budget leaves behind."""

    bound_ms: float
    peak_prices: dict[ColumnPool, set[PeakPrice]]
    mixtures: list[_Mixture]


@dataclass(frozen=True)
class ColumnChoice:
    """A column for each run of segments, as actions and replays of the whole step."""

    actions: dict[int, str]
    replays: dict[int, int]
    ms: float  # recompute time
    bound_ms: float  # a lower bound of it for all choices of columns
    longest: int  # segments of the longest run


class ColumnGeneration:
    """The column pools of one step, shared by the searches for several budgets.

    Attributes:
        pools: By segment. ``distinct_pools``: each of them once. ``runs``: the segments one by one.
        dual_prices: Of the last relaxation, by segment.
    """

    def __init__(self, source: SubgraphSource) -> None:
        self.graph, self.source = source.graph, source
        self._subgraphs = [build_subgraph(source, range(n, n + 1)) for n in range(len(source.windows))]
        self._reset_pools()

    @classmethod
    def of(cls, context: SearchContext) -> ColumnGeneration | None:
        """For the step of ``context``; None where its segments cannot be told apart, or are too few."""
        segment_of = segments(context.graph)
        found = windows(context.graph, segment_of)
        if found is None or len(found) < tuning.MIN_SEGMENTS:
            return None
        return cls(SubgraphSource(context, segment_of, found))

    def with_empty_pools(self) -> ColumnGeneration:
        """The same segments with pools that have only the plain column."""
        other = copy(self)
        other._reset_pools()
        return other

    def _reset_pools(self) -> None:
        pools: dict[SubgraphContent, ColumnPool] = {}
        self.runs: list[SegmentRun] = []
        for segment, subgraph in enumerate(self._subgraphs):
            if subgraph.content not in pools:
                pools[subgraph.content] = ColumnPool(subgraph)
            segments = range(segment, segment + 1)
            self.runs.append(SegmentRun(segments, pools[subgraph.content], subgraph.outside_bytes))
        self.pools = [run.pool for run in self.runs]
        self.distinct_pools = list(pools.values())
        self.dual_prices = [DualPrices(0.0, 0.0, 0.0, None, 0.0)] * len(self.pools)
        self.total_ms = sum(g.ms for pool in self.pools for g in pool.coarse.groups) or 1.0
        self._quick_ms: dict[int, float] = {}  # by budget: the relaxation where quick columns helped no more
        self._short_budgets: set[int] = set()  # where the first columns did not fit: near the least peak
        self.byte_unit = max(max(p for pool in self.distinct_pools for p in pool.plain.peaks) / 1e3, 1.0)

    @property
    def separate_forward(self) -> bool:
        """Whether some pool needs forward rows of its own (``ColumnPool.separate_forward``)."""
        return any(pool.separate_forward for pool in self.distinct_pools)

    def solve(self, budget_bytes: int, slack_ms: float, deadline: float) -> ColumnChoice | None:
        """The fastest choice of columns found; None where none fits, or time is up before one is found.

        Args:
            slack_ms: A choice this near the bound is good enough.
            deadline: When to be done, by ``time.perf_counter()``; what that cuts off differs from run to run.
        """
        generated = self._generate_columns(budget_bytes, deadline)
        choice = None
        for more_columns in (None, self._densify, self._fill_mixtures):
            if more_columns is not None and not more_columns(generated, deadline):
                continue
            choice = self.choose(budget_bytes, self.runs, generated.bound_ms)
            if choice is None or choice.ms <= generated.bound_ms + slack_ms:
                break
        return choice

    def add_first(self, budget_bytes: int) -> None:
        """Add columns for a good choice, in a small part of the time of ``solve``, which goes on from them."""
        self._quick_columns(budget_bytes, math.inf)

    def choose(self, budget_bytes: int, runs: Sequence[SegmentRun], bound_ms: float) -> ColumnChoice | None:
        """The fastest choice of ``runs`` and their columns that covers all segments; None where none fits."""
        separate_forward = self.separate_forward or any(run.pool.separate_forward for run in runs)
        arcs = [run.arcs(separate_forward=separate_forward) for run in runs]
        path = fastest_path(len(self.pools), arcs, budget_bytes)
        if path is None:
            return None
        return self.combine([(runs[n], runs[n].pool.columns[entry]) for n, entry in path], bound_ms)

    def min_peak_choice(self) -> ColumnChoice:
        """The choice of columns with the least peak found; no clock limits it, so it is the same each time.

        Forward has no rows of its own here: local search goes on from this choice, and from one with such rows it came
        no lower (bf16 autocast: 20.6 % of the plain step's activation memory, against 20.5 %).
        """
        nothing, most_pivots = self.graph.start_bytes, self._pivots + tuning.MIN_PEAK_PIVOTS
        for _ in range(tuning.MIN_PEAK_PRICING_ROUNDS):
            master = _MasterProblem(self, nothing, separate_forward=False)
            relaxed = master.program.relax()
            found = self._add_rounded_columns(master, relaxed, most_pivots)
            if not self._lower_peaks(master, relaxed) and not found:
                break
        arcs = [run.arcs(separate_forward=False) for run in self.runs]
        path = fastest_path(len(arcs), arcs, least_budget(len(arcs), arcs))
        assert path is not None
        return self.combine([(self.runs[n], self.pools[n].columns[entry]) for n, entry in path], 0.0)

    def _add_rounded_columns(self, master: _MasterProblem, relaxed: LpResult, most_pivots: float = math.inf) -> bool:
        """Add columns that are quickly found and not the best, so they give no bound; return whether there were any."""
        before = self._num_columns
        for segment, pool in enumerate(self.pools):
            if self._pivots >= most_pivots:
                break
            pool.add_rounded(master.prices(segment, relaxed.duals))
        return self._num_columns > before

    @property
    def _pivots(self) -> int:
        return sum(pool.pivots for pool in self.distinct_pools)

    @property
    def _num_columns(self) -> int:
        return sum(len(pool.columns) for pool in self.distinct_pools)

    def _densify(self, generated: _Generated, _: float) -> bool:
        """Add quickly found columns between the known ones; return whether there were any."""
        points = max(tuning.DENSIFY_POINTS // len(self.distinct_pools), tuning.DENSIFY_MIN_POINTS)
        found = False
        for pool, met in generated.peak_prices.items():
            fewer = points * tuning.DENSIFY_SIZE // max(pool.coarse.size, tuning.DENSIFY_SIZE)
            fewer = max(fewer, tuning.DENSIFY_MIN_POINTS)
            for price, at_forward_end in sorted({min(met), max(met)}):
                found |= pool.densify(price, at_forward_end=at_forward_end, points=fewer)
        return found

    def _fill_mixtures(self, generated: _Generated, deadline: float) -> bool:
        """Add the best columns between those that the relaxation mixes for one segment; return whether there were any.

        Where the relaxation mixes two columns, the choice has to take one of them, or one in between.
        """
        widest = sorted(generated.mixtures, key=lambda mixture: mixture.least_bytes - mixture.most_bytes)
        size = max((mixture.pool.coarse.size for mixture in widest), default=0)
        tries = tuning.MIXTURE_TRIES * tuning.DENSIFY_SIZE // max(size, tuning.DENSIFY_SIZE)
        points, found = max(tries // max(len(widest), 1), 1), False
        for mixture in widest[:tries]:
            found |= mixture.pool.fill(
                mixture.peak_ms, mixture.least_bytes, mixture.most_bytes, at_forward_end=mixture.at_forward_end,
                points=points, deadline=deadline,
            )  # fmt: skip
        return found

    def _mixtures(self, master: _MasterProblem, relaxed: LpResult) -> list[_Mixture]:
        """Where ``relaxed`` takes a share of several columns for one segment; equal segments once."""
        found = []
        for pool, z, duals in zip(self.pools, master.z, self.dual_prices, strict=True):
            # Where time was up the pool has columns that the relaxation has not seen.
            used = [c for c, share in zip(pool.columns, z, strict=False) if _is_used(relaxed.values[share])]
            if len(used) > 1:
                at_forward_end = duals.forward_end_ms > duals.kept_ms
                kept = [c.forward_end_bytes if at_forward_end else c.kept_bytes for c in used]
                found.append(_Mixture(pool, float(f"{duals.peak_ms:.3g}"), at_forward_end, min(kept), max(kept)))
        return list(dict.fromkeys(found))

    def _quick_columns(self, budget_bytes: int, deadline: float) -> tuple[_MasterProblem, LpResult]:
        """Add columns that are quickly found, as long as they help; return the relaxation with them.

        A search that begins where the last one ended finds what one search would have found.
        """
        last_ms = self._quick_ms.get(budget_bytes, math.inf)
        for _ in range(tuning.PRICING_ROUNDS):
            master = _MasterProblem(self, budget_bytes)
            relaxed = master.program.relax()
            while (value_ms := relaxed.objective * master.ms_unit) < (1 - tuning.QUICK_PRICING_GAIN) * last_ms:
                last_ms = value_ms
                if not self._add_rounded_columns(master, relaxed):
                    break
                master = _MasterProblem(self, budget_bytes)
                relaxed = master.program.relax()
            last_ms = self._quick_ms[budget_bytes] = relaxed.objective * master.ms_unit
            if not self._is_short(master, relaxed):
                break
            self._short_budgets.add(budget_bytes)
            found = self._add_rounded_columns(master, relaxed)
            found |= self._lower_peaks(master, relaxed)
            if not found or time.perf_counter() > deadline:
                break
        return master, relaxed

    def _is_short(self, master: _MasterProblem, relaxed: LpResult) -> bool:
        """Whether the budget lacks bytes for every mixture of the columns."""
        return bool(relaxed.values[master.shortage] * self.byte_unit > 0.5)

    def _generate_columns(self, budget_bytes: int, deadline: float) -> _Generated:
        """Add columns until none would help the relaxation: quickly found ones, then the best ones."""
        bound_ms, shortage_rounds = 0.0, tuning.PRICING_SHORTAGE_ROUNDS
        peak_prices: dict[ColumnPool, set[PeakPrice]] = {}
        mixtures: list[_Mixture] = []
        for _ in range(tuning.PRICING_ROUNDS):
            master, relaxed = self._quick_columns(budget_bytes, deadline)
            is_short = self._is_short(master, relaxed)
            shortage_rounds -= is_short
            if shortage_rounds < 0:
                break
            peak_prices = {}
            self.dual_prices = [master.prices(segment, relaxed.duals) for segment in range(len(self.pools))]
            mixtures = self._mixtures(master, relaxed)
            found, open_ms = False, 0.0
            for run, duals in zip(self.runs, self.dual_prices, strict=True):
                pool = run.pool
                peak_prices.setdefault(pool, set()).add((duals.peak_ms, duals.forward_end_ms > duals.kept_ms))
                before = len(pool.columns)
                forward, backward = run.peaks(pool.plain)
                cost_ms = pool.price(duals, deadline)
                if duals.forward_ms is not None:
                    cost_ms += duals.forward_ms * (forward - pool.plain.peaks[0])
                    cost_ms += duals.peak_ms * (backward - pool.plain.peaks[1])
                else:
                    cost_ms += duals.peak_ms * (max(forward, backward) - max(pool.plain.peaks))
                found |= len(pool.columns) > before
                open_ms += min(cost_ms - duals.column_ms, 0.0)
            value_ms = relaxed.objective * master.ms_unit
            bound_ms = bound_ms if is_short else max(bound_ms, value_ms + open_ms)
            enough = value_ms - bound_ms <= tuning.PRICING_GAIN * value_ms
            if (enough or not found) and not self._lower_peaks(master, relaxed):
                break
            # Near the least peak the bound stays far away, whatever the columns.
            if budget_bytes in self._short_budgets or time.perf_counter() > deadline:
                break
        return _Generated(bound_ms, peak_prices, [] if budget_bytes in self._short_budgets else mixtures)

    def _lower_peaks(self, master: _MasterProblem, relaxed: LpResult) -> bool:
        """Add columns with lower peaks than those the relaxation uses, where a byte of peak has a price."""
        price: dict[tuple[ColumnPool, int], float] = {}  # by pool and place in its columns
        for segment, pool in enumerate(self.pools):
            peak_ms = master.prices(segment, relaxed.duals).peak_ms
            for place, z in enumerate(master.z[segment] if peak_ms > 0 else ()):
                if _is_used(relaxed.values[z]):
                    price[pool, place] = max(price.get((pool, place), 0.0), peak_ms)
        return any([pool.add_lower_peaks(pool.columns[place], peak_ms) for (pool, place), peak_ms in price.items()])

    def combine(self, chosen: Iterable[tuple[SegmentRun, Column]], bound_ms: float) -> ColumnChoice:
        """Columns as actions and replays of the whole step."""
        actions: dict[int, str] = {}
        replays: dict[int, int] = {}
        ms, longest = 0.0, 0
        for run, column in chosen:
            # Ids of the run's subgraph -> ids of the step's graph.
            storages = dict(enumerate(s for part in self.source.storages_of(run.segments) for s in part))
            actions |= {storages[s]: action for s, action in column.actions.items() if s in storages}
            replays |= {storages[s]: count for s, count in column.replays.items() if s in storages}
            ms, longest = ms + column.ms, max(longest, len(run.segments))
        actions = complete_actions(self.graph, *choices(self.graph, actions))
        return ColumnChoice(actions, dict(sorted(replays.items())), ms, bound_ms, longest)


class _MasterProblem:
    """The relaxed master problem: a share of each column."""

    def __init__(
        self, generation: ColumnGeneration, budget_bytes: int, *, separate_forward: bool | None = None
    ) -> None:
        self.generation, self.program = generation, LinearProgram()
        self._limit = budget_bytes / generation.byte_unit
        self.ms_unit = generation.total_ms / 1e3
        # A shortage is possible and dear, so that the relaxation always has prices.
        self.shortage = self.program.column(tuning.SHORTAGE_PRICE, upper=float("inf"))
        self.z = [[self.program.column(c.ms / self.ms_unit) for c in pool.columns] for pool in generation.pools]
        self.convexity_rows = [self.program.row(dict.fromkeys(z, 1.0), lower=1.0, upper=1.0) for z in self.z]
        self._forward: tuple[list[int], list[int]] | None = None
        if generation.separate_forward if separate_forward is None else separate_forward:
            self._forward = self._rows(lambda c: c.forward_end_bytes, lambda peaks: peaks[0])
            self._backward = self._rows(lambda c: c.kept_bytes, lambda peaks: peaks[1])
        else:
            self._backward = self._rows(lambda c: c.kept_bytes, max)

    def _rows(
        self, kept_of: Callable[[Column], int], peak_of: Callable[[tuple[int, int]], int]
    ) -> tuple[list[int], list[int]]:
        """By segment: the row of its peak, and the row that adds up what is saved."""
        program, unit = self.program, self.generation.byte_unit
        peaks, sums = [], []
        before: dict[int, float] = {}  # the column of what the segments before have saved
        for run, z in zip(self.generation.runs, self.z, strict=True):
            columns, plain = run.pool.columns, kept_of(run.pool.plain)
            after = program.column(upper=float("inf"))
            terms = {c: peak_of(run.peaks(column)) / unit for c, column in zip(z, columns, strict=True)}
            peaks.append(program.row({**terms, self.shortage: -1.0, **before}, upper=self._limit))
            gains = {c: (kept_of(column) - plain) / unit for c, column in zip(z, columns, strict=True)}
            sums.append(program.row({after: 1.0, **before, **gains}, upper=0.0))
            before = {after: -1.0}
        return peaks, sums

    def prices(self, segment: int, duals: np.ndarray) -> DualPrices:
        """``duals`` of the rows of ``segment``, in milliseconds and bytes."""
        scale, plain = self.ms_unit / self.generation.byte_unit, self.generation.pools[segment].plain

        def price(row: int) -> float:
            return max(-float(duals[row]) * scale, 0.0)

        peaks, sums = self._backward
        kept_ms, peak_ms, forward_end_ms, forward_ms = price(sums[segment]), price(peaks[segment]), 0.0, None
        if self._forward is not None:
            peaks, sums = self._forward
            forward_end_ms, forward_ms = price(sums[segment]), price(peaks[segment])
        column_ms = float(duals[self.convexity_rows[segment]]) * self.ms_unit
        column_ms += kept_ms * plain.kept_bytes + forward_end_ms * plain.forward_end_bytes
        return DualPrices(kept_ms, forward_end_ms, peak_ms, forward_ms, column_ms)


def _is_used(share: float) -> bool:
    """Whether the relaxation takes ``share`` of a column on purpose."""
    return share > tuning.USED_COLUMN_SHARE
