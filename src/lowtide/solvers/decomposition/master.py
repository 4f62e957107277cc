"""Deep models: a plan for each segment out of a pool, chosen together; the pool grows by what would help most.

Dantzig-Wolfe decomposition (1960, https://doi.org/10.1287/opre.8.1.101) over segments. A *column* is one way to run one
segment: its time, the bytes it takes off what is kept between forward and backward, and the peak it makes in its own
windows while all other segments save everything. Segments add up: with ``saved`` of the columns before it, segment l
peaks at peak_l - sum_{j<l} saved_j, because backward comes to it when only the segments before it still hold anything.

    minimise    sum ms_c z_{l,c}
    such that   sum_c z_{l,c} = 1                                        each segment runs in one way
                sum_c peak_{l,c} z_{l,c} - H_l <= budget                 at its own forward and backward
                H_{l+1} = H_l + sum_c saved_c z_{l,c}                    what the segments up to l have saved

Where Python holds something until the forward pass ends (autocast's copies of weights), a column saves less by the end
of the forward pass than at the turn, and there are two rows of each kind: one for forward, one for backward.

The duals of the relaxation price kept bytes and peak bytes for each segment; a column that is best at those prices is
added until none is better (``kinds.py``). Equal segments share their columns, so time grows with the number of
different ones. The relaxation's value, corrected by what pricing left open, is a bound on all plans that replay inside
segments, each op once. What is chosen in the end is the fastest way through all segments (``shortest_path.py``), which
may as well run several of them as one (``multi_segment.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.solvers import tuning
from lowtide.solvers.decomposition.pricing import Column, ColumnPool, DualPrices
from lowtide.solvers.decomposition.segments import Windows
from lowtide.solvers.decomposition.shortest_path import Arcs, fastest, least_bytes
from lowtide.solvers.decomposition.subgraph import Content, Subgraphs
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.milp.highs import Program, Relaxed

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """A column for each stretch, as actions and replays of the whole step.

    Attributes:
        ms: Of recompute time. ``bound_ms``: no choice of the pool has less.
        longest: Segments of the longest stretch.
    """

    actions: dict[int, str]
    replays: dict[int, int]
    ms: float
    bound_ms: float
    longest: int


@dataclass(frozen=True)
class Stretch:
    """Segments in a row that are run as one, in a way of ``kind``; mostly there is one."""

    run: range
    kind: ColumnPool
    ballast_bytes: tuple[int, int]

    def peaks(self, column: Column) -> tuple[int, int]:
        """Under ``column``, forward and backward, while the others save everything."""
        reference = self.kind.subgraph.ballast_bytes
        forward, backward = (p + a - b for p, a, b in zip(column.peaks, self.ballast_bytes, reference, strict=True))
        return forward, backward

    def ways(self, split: bool) -> Arcs:
        """All its columns; not ``split``: what is saved late in forward is what is saved at the turn."""
        columns, plain = self.kind.columns, self.kind.plain
        forward, backward = np.array([self.peaks(c) for c in columns]).T
        saved = np.array([plain.kept_bytes - c.kept_bytes for c in columns])
        late = np.array([plain.late_bytes - c.late_bytes for c in columns]) if split else 0 * saved
        if not split:
            forward, backward = 0 * forward, np.maximum(forward, backward)
        ms = np.array([c.ms for c in columns])
        return Arcs(self.run.start, self.run.stop, ms, saved, late, backward, forward)


class ColumnGeneration:
    """The pool of one step; asking for several budgets shares it.

    Attributes:
        kinds: By segment. ``different``: each of them once. ``stretches``: the segments one by one.
        worths: What the last relaxation paid, by segment.
    """

    def __init__(self, graph: StepGraph, costs: Costs, segment_of: dict[int, int], windows: list[Windows]) -> None:
        self.graph = graph
        self.source = Subgraphs(graph, costs, segment_of, windows)
        self._excerpts = [self.source.cut(segment) for segment in range(len(windows))]
        self._begin()

    def afresh(self) -> ColumnGeneration:
        """The same segments with a pool that has learnt nothing yet."""
        other = copy(self)
        other._begin()
        return other

    def _begin(self) -> None:
        kinds: dict[Content, ColumnPool] = {}
        self.stretches: list[Stretch] = []
        for segment, subgraph in enumerate(self._excerpts):
            if subgraph.content not in kinds:
                kinds[subgraph.content] = ColumnPool(subgraph)
            one = range(segment, segment + 1)
            self.stretches.append(Stretch(one, kinds[subgraph.content], subgraph.ballast_bytes))
        self.kinds = [stretch.kind for stretch in self.stretches]
        self.different = list(kinds.values())
        self.worths = [DualPrices(0.0, 0.0, 0.0, None, 0.0)] * len(self.kinds)
        self.total_ms = sum(g.ms for k in self.kinds for g in k.coarse.groups) or 1.0
        self.byte_unit = max(max(p for k in self.different for p in k.plain.peaks) / 1e3, 1.0)

    @property
    def split(self) -> bool:
        """Whether some column saves less late in the forward pass than at the turn."""
        return any(k.split for k in self.different)

    def solve(self, budget_bytes: int, slack_ms: float, deadline: float) -> Choice | None:
        """The best choice of columns; None if segments cannot be run in so little, or time is up before one is found.

        Args:
            slack_ms: A choice so near the bound is good enough.
            deadline: When to be done, by ``time.perf_counter()``; what that cuts off differs from run to run.
        """
        bound_ms, prices = self._generate(budget_bytes, deadline)
        choice = None
        for finer in (False, True):
            if finer and not self._densify(prices, deadline):
                break
            choice = self.choose(budget_bytes, self.stretches, bound_ms)
            if choice is None or choice.ms <= bound_ms + slack_ms:
                break
        return choice

    def choose(self, budget_bytes: int, stretches: Sequence[Stretch], bound_ms: float) -> Choice | None:
        """The fastest way through all segments in ways that ``stretches`` know; None where none fits."""
        split = self.split or any(s.kind.split for s in stretches)
        picks = fastest(len(self.kinds), [s.ways(split) for s in stretches], budget_bytes)
        if picks is None:
            return None
        return self._choice([(stretches[n], stretches[n].kind.columns[pick]) for n, pick in picks], bound_ms)

    def leanest(self) -> Choice:
        """The choice of columns with the least peak that is found: the same each time, so no time limits it.

        What Python holds until forward ends is left out: local search goes on from here, and from a start that minds it
        came no lower (bf16 autocast: 20.6 % of the plain step's activation memory, and 20.5 %).
        """
        nothing = self.graph.resident_bytes
        for _ in range(tuning.MIN_PEAK_PRICING_ROUNDS):
            master = _Master(self, nothing, split=False)
            if not self._shorten(master, master.program.relax()):
                break
        ways = [s.ways(split=False) for s in self.stretches]
        picks = fastest(len(ways), ways, least_bytes(len(ways), ways))
        assert picks is not None
        return self._choice([(self.stretches[n], self.kinds[n].columns[pick]) for n, pick in picks], 0.0)

    def _shorten(self, master: _Master, relaxed: Relaxed) -> bool:
        """Where memory is short whatever is chosen: add columns that are quickly found; return whether there were any.

        No bound comes of it, so no column has to be the best.
        """
        before = sum(len(kind.columns) for kind in self.different)
        for segment, kind in enumerate(self.kinds):
            kind.round(master.prices(segment, relaxed.duals))
        self._lean(master, relaxed)
        return sum(len(kind.columns) for kind in self.different) > before

    def _densify(self, prices: dict[ColumnPool, set[tuple[float, bool]]], deadline: float) -> bool:
        points = max(tuning.DENSIFY_POINTS // len(self.different), tuning.DENSIFY_MIN_POINTS)
        found = False
        for kind, met in prices.items():
            few = max(
                points * tuning.DENSIFY_SIZE // max(kind.coarse.size, tuning.DENSIFY_SIZE), tuning.DENSIFY_MIN_POINTS
            )
            for price, late in sorted({min(met), max(met)}):
                found |= kind.densify(price, late, few, deadline)
        return found

    def _generate(self, budget_bytes: int, deadline: float) -> tuple[float, dict[ColumnPool, set[tuple[float, bool]]]]:
        """Add columns until none would help the relaxation; return its bound and the peak prices each kind met.

        With each price whether what is kept matters most late in the forward pass.
        """
        best_ms, hard_rounds = 0.0, tuning.PRICING_SHORTAGE_ROUNDS
        peak_prices: dict[ColumnPool, set[tuple[float, bool]]] = {}
        for _ in range(tuning.PRICING_ROUNDS):
            master = _Master(self, budget_bytes)
            relaxed = master.program.relax()
            short = master.short(relaxed.values)
            if short:
                if self._shorten(master, relaxed) and time.perf_counter() < deadline:
                    continue
                hard_rounds -= 1
                if hard_rounds < 0:
                    break
            peak_prices = {}
            self.worths = [master.prices(segment, relaxed.duals) for segment in range(len(self.kinds))]
            found, open_ms = False, 0.0
            for stretch, worth in zip(self.stretches, self.worths, strict=True):
                kind = stretch.kind
                peak_prices.setdefault(kind, set()).add((worth.peak_ms, worth.late_ms > worth.kept_ms))
                before = len(kind.columns)
                forward, backward = stretch.peaks(kind.plain)
                cost_ms = kind.price(worth, deadline)
                if worth.forward_ms is not None:
                    cost_ms += worth.forward_ms * (forward - kind.plain.peaks[0])
                    cost_ms += worth.peak_ms * (backward - kind.plain.peaks[1])
                else:
                    cost_ms += worth.peak_ms * (max(forward, backward) - max(kind.plain.peaks))
                found |= len(kind.columns) > before
                open_ms += min(cost_ms - worth.column_ms, 0.0)
            value_ms = relaxed.objective * master.ms_unit
            best_ms = best_ms if short else max(best_ms, value_ms + open_ms)
            enough = -open_ms <= tuning.PRICING_GAIN * value_ms
            if (enough or not found) and not self._lean(master, relaxed):
                break
            if time.perf_counter() > deadline:
                break
        return best_ms, peak_prices

    def _lean(self, master: _Master, relaxed: Relaxed) -> bool:
        """Make leaner what the relaxation uses where a byte of peak is worth something."""
        worth: dict[tuple[ColumnPool, int], float] = {}  # by kind and place in its columns
        for segment, kind in enumerate(self.kinds):
            peak_ms = master.prices(segment, relaxed.duals).peak_ms
            for place, z in enumerate(master.z[segment] if peak_ms > 0 else ()):
                if relaxed.values[z] > tuning.USED_COLUMN_SHARE:
                    worth[kind, place] = max(worth.get((kind, place), 0.0), peak_ms)
        return any([kind.lean(kind.columns[place], peak_ms) for (kind, place), peak_ms in worth.items()])

    def _choice(self, chosen: list[tuple[Stretch, Column]], bound_ms: float) -> Choice:
        actions, replays = self.actions(chosen), self.replays(chosen)
        longest = max(len(stretch.run) for stretch, _ in chosen)
        return Choice(actions, replays, sum(c.ms for _, c in chosen), bound_ms, longest)

    def actions(self, chosen: Iterable[tuple[Stretch, Column]]) -> dict[int, str]:
        """Actions of the whole step."""
        recomputed, kept = [], []
        for stretch, column in chosen:
            for storage, action in self._whole(stretch, column.actions):
                if action == RECOMPUTE and storage in self.graph.stored:
                    recomputed.append(storage)
                elif action == SAVE and storage not in self.graph.stored:
                    kept.append(storage)
        return complete_actions(self.graph, recomputed, kept)

    def replays(self, chosen: Iterable[tuple[Stretch, Column]]) -> dict[int, int]:
        """Of the whole step, where more than once."""
        return dict(sorted(pair for stretch, column in chosen for pair in self._whole(stretch, column.replays)))

    def _whole(self, stretch: Stretch, of_storages: Mapping[int, T]) -> Iterable[tuple[int, T]]:
        """What is said of an excerpt's storages, said of the step's."""
        storages = [s for part in self.source.storages_of(stretch.run) for s in part]
        return ((storages[s], said) for s, said in of_storages.items() if s < len(storages))


class _Master:
    """The relaxed choice of columns: some of each."""

    def __init__(self, pool: ColumnGeneration, budget_bytes: int, *, split: bool | None = None) -> None:
        self.pool, self.program = pool, Program()
        self._limit = budget_bytes / pool.byte_unit
        self.ms_unit = pool.total_ms / 1e3
        # Running short is possible and dear, so that the relaxation always has prices.
        self.shortage = self.program.column(tuning.SHORTAGE_PRICE, upper=float("inf"))
        self.z = [[self.program.column(c.ms / self.ms_unit) for c in kind.columns] for kind in pool.kinds]
        self.ways = [self.program.row(dict.fromkeys(z, 1.0), lower=1.0, upper=1.0) for z in self.z]
        self._forward: tuple[list[int], list[int]] | None = None
        if pool.split if split is None else split:
            self._forward = self._rows(lambda c: c.late_bytes, lambda peaks: peaks[0])
            self._backward = self._rows(lambda c: c.kept_bytes, lambda peaks: peaks[1])
        else:
            self._backward = self._rows(lambda c: c.kept_bytes, max)

    def _rows(
        self, kept_of: Callable[[Column], int], peak_of: Callable[[tuple[int, int]], int]
    ) -> tuple[list[int], list[int]]:
        """By segment: the row of its peak, and the row that adds up what is saved."""
        pool, program, unit = self.pool, self.program, self.pool.byte_unit
        peaks, sums = [], []
        before = None
        for stretch, z in zip(pool.stretches, self.z, strict=True):
            kind = stretch.kind
            after = program.column(upper=float("inf"))
            terms = {c: peak_of(stretch.peaks(col)) / unit for c, col in zip(z, kind.columns, strict=True)}
            less = {self.shortage: -1.0} if before is None else {self.shortage: -1.0, before: -1.0}
            peaks.append(program.row({**terms, **less}, upper=self._limit))
            known: dict[int, float] = {} if before is None else {before: -1.0}
            plain = kept_of(kind.plain)
            gains = {c: (kept_of(col) - plain) / unit for c, col in zip(z, kind.columns, strict=True)}
            sums.append(program.row({after: 1.0, **known, **gains}, upper=0.0))
            before = after
        return peaks, sums

    def prices(self, segment: int, duals: np.ndarray) -> DualPrices:
        scale, plain = self.ms_unit / self.pool.byte_unit, self.pool.kinds[segment].plain

        def worth(row: int) -> float:
            return max(-float(duals[row]) * scale, 0.0)

        peaks, sums = self._backward
        kept_ms, peak_ms, late_ms, forward_ms = worth(sums[segment]), worth(peaks[segment]), 0.0, None
        if self._forward is not None:
            peaks, sums = self._forward
            late_ms, forward_ms = worth(sums[segment]), worth(peaks[segment])
        column_ms = float(duals[self.ways[segment]]) * self.ms_unit
        column_ms += kept_ms * plain.kept_bytes + late_ms * plain.late_bytes
        return DualPrices(kept_ms, late_ms, peak_ms, forward_ms, column_ms)

    def short(self, values: np.ndarray) -> bool:
        return bool(values[self.shortage] * self.pool.byte_unit > 0.5)
