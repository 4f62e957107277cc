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

The duals of the relaxation price kept bytes and peak bytes for each segment; the segment's own MILP (``peak_model.py``)
finds the column that is best at those prices, until none is better; local search makes leaner ones of it, which may
replay an op more than once (``leaner.py``). Equal segments share their columns, so time grows with the number of
different ones. The relaxation's value, corrected by what pricing left open, is a bound on all plans that replay inside
segments, each op once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.simulator import simulate_actions
from lowtide.solvers.classics import classic
from lowtide.solvers.excerpt import Content, Excerpt, Excerpts
from lowtide.solvers.groups import Sketch
from lowtide.solvers.highs import Program, Relaxed, left_s
from lowtide.solvers.leaner import Judged, leaner
from lowtide.solvers.peak_model import PeakModel, Prices
from lowtide.solvers.segments import Windows
from lowtide.solvers.structure import close

_ROUNDS = 15  # of pricing
_HARD_ROUNDS = 3  # likewise, where memory is still short when quick columns have run out
_LEAN_ROUNDS = 5  # likewise, for the least peak: it is where local search begins
_PRICING_NODES = 5
_PRICING_GAP = 1e-2  # finer columns cost twice the time, and no plan of a case was better by more than 0.02 %
_ENOUGH = 5e-3  # of the recompute time: columns that promise less are not looked for
_POINTS = 36  # between the known columns, over all kinds
_FEWEST_POINTS = 4  # of one kind
_POINTS_SIZE = 140  # larger kinds (``Sketch.size``) get fewer: one point takes them longer
_LOCAL_ROUNDS = 4  # of cuts in one pricing
_LEANER_EVENTS = 80_000  # simulated, at most, to make one column leaner
_USED = 1e-6  # of a segment: columns with a smaller share do not count
_LEANER_PRICE = 2.0  # of what a byte of peak is worth: changes up to this are looked at


@dataclass(frozen=True)
class Column:
    """One way to run a segment of one kind.

    Attributes:
        actions: By storage of the kind's excerpt. ``replays``: of those that may run again more than once.
        ms: Replays and their recording.
        kept_bytes: At the turn. ``late_bytes``: late in the forward pass.
        peaks: Absolute bytes in the forward and in the backward window, ballast of the kind's excerpt included.
    """

    actions: dict[int, str]
    ms: float
    kept_bytes: int
    late_bytes: int
    peaks: tuple[int, int]
    replays: dict[int, int] = field(default_factory=dict)


class Kind:
    """Segments that are the same, and the columns known for them."""

    def __init__(self, excerpt: Excerpt) -> None:
        self.excerpt = excerpt
        self.sketch = Sketch(excerpt.graph, excerpt.costs)
        self.mode_ms = excerpt.costs.mode_us / 1e3 * len(excerpt.graph.forward_ops)
        self.columns: list[Column] = []
        self._known: set[tuple] = set()
        self._priced: dict[Prices, float] = {}
        self._densified: set[tuple[float, bool]] = set()
        self._rounded: set[Prices] = set()
        self._leaned: dict[tuple, float] = {}  # at what worth of a byte
        self.plain = self.column(close(excerpt.graph, ()))
        self.add(self.plain)
        self.add(self.column(classic(excerpt.graph, "selective")))
        # Of what is kept, the part that no decision moves.
        model = PeakModel(self.sketch, None, prices=Prices(1.0, 0.0, excerpt.turn))
        self.always_kept_bytes = self.plain.kept_bytes - model.kept_bytes(excerpt.turn)
        self.always_late_bytes = self.plain.late_bytes - model.kept_bytes(excerpt.late)

    def column(self, actions: dict[int, str]) -> Column:
        """Judge ``actions`` on the excerpt."""
        return self._column(Judged(actions, simulate_actions(self.excerpt.graph, self.excerpt.costs, actions)))

    def _column(self, judged: Judged) -> Column:
        late, turn, line = self.excerpt.late, self.excerpt.turn, judged.timeline
        ms = line.recompute_ms - (self.mode_ms if line.recompute_ms else 0.0)
        live, peaks = line.live_bytes, line.event_peak_bytes
        highest = max(peaks[:turn]), max(peaks[turn:])
        return Column(judged.actions, ms, live[turn - 1], live[late - 1], highest, judged.replays)

    def add(self, column: Column) -> bool:
        """Take ``column`` into the pool; return whether it is new."""
        if self._key(column) in self._known:
            return False
        self._known.add(self._key(column))
        self.columns.append(column)
        return True

    @staticmethod
    def _key(column: Column) -> tuple:
        return round(column.ms, 9), column.kept_bytes, column.late_bytes, column.peaks

    def lean(self, column: Column, ms_per_byte: float) -> bool:
        """Add columns with lower peaks than ``column``, as far as a byte is worth it; return whether there were any."""
        if self._leaned.get(self._key(column), 0.0) >= ms_per_byte / _LEANER_PRICE:
            return False
        self._leaned[self._key(column)] = ms_per_byte
        graph, costs = self.excerpt.graph, self.excerpt.costs
        start = Judged(column.actions, simulate_actions(graph, costs, column.actions, column.replays), column.replays)
        path = leaner(graph, costs, start, most_ms_per_byte=_LEANER_PRICE * ms_per_byte, events=_LEANER_EVENTS)
        return any([self.add(self._column(judged)) for judged in path[1:]])

    def price(self, worth: Worth, deadline: float) -> float:
        """Add the best column at these prices; return a lower bound of what any costs at them, in milliseconds."""
        prices = self._prices(worth, digits=6)
        if prices not in self._priced:
            self._priced[prices] = self._solve(prices, deadline)
        return self._priced[prices]

    def _prices(self, worth: Worth, *, digits: int) -> Prices:
        """Rounded, so that what hardly differs is solved once."""
        kept_ms, peak_ms, late_ms = (float(f"{ms:.{digits}g}") for ms in (worth.kept_ms, worth.peak_ms, worth.late_ms))
        forward_ms = None if worth.forward_ms is None else float(f"{worth.forward_ms:.{digits}g}")
        return Prices(kept_ms, peak_ms, self.excerpt.turn, late_ms, self.excerpt.late, forward_ms)

    def densify(self, peak_ms: float, late: bool, points: int, deadline: float) -> bool:
        """Add columns between the known ones: prices alone never name a point inside the hull; return whether it did.

        The fastest ways to keep no more than so much, at a price of the peak; ``late``: late in the forward pass.
        """
        key = float(f"{peak_ms:.3g}"), late
        if key in self._densified:
            return False
        self._densified.add(key)
        before = len(self.columns)
        at = self.excerpt.late if late else self.excerpt.turn
        always = self.always_late_bytes if late else self.always_kept_bytes
        kept = [c.late_bytes if late else c.kept_bytes for c in (self.plain, *self.columns)]
        for part in range(1, points + 1):
            most = min(kept) + (kept[0] - min(kept)) * part // (points + 1) - always
            self._solve(Prices(0.0, key[0], at, most_kept_bytes=most), deadline)
        return len(self.columns) > before

    def round(self, worth: Worth) -> None:
        """Add the column that the relaxation rounds to at these prices: quick, and not the best."""
        prices = self._prices(worth, digits=2)
        if prices in self._rounded:
            return
        self._rounded.add(prices)
        model = PeakModel(self.sketch, None, prices=prices)
        values = model.program.relax().values
        if len(values):
            self.add(self.column(close(self.excerpt.graph, *model.choice(values))))

    def _solve(self, prices: Prices, deadline: float) -> float:
        model = PeakModel(self.sketch, None, prices=prices)
        bound = 0.0
        for round_ in range(_LOCAL_ROUNDS):
            answer = model.program.minimise(
                gap=_PRICING_GAP, slack=0.0, node_limit=_PRICING_NODES, time_limit_s=left_s(deadline), light=True
            )
            if round_ == 0:
                bound = max(answer.bound - model.objective_slack, 0.0) * model.ms_unit
            if not len(answer.values):
                break
            actions = close(self.excerpt.graph, *model.choice(answer.values))
            line = simulate_actions(self.excerpt.graph, self.excerpt.costs, actions)
            self.add(self._column(Judged(actions, line)))
            claimed = model.claimed_peak_bytes(answer.values)
            if prices.peak_ms == 0 or line.peak_bytes <= claimed:
                break
            event = line.peak_event
            during = [r.op for r in line.replays if r.event == event and r.peak_bytes == line.peak_bytes]
            model.forbid(answer.values, event, during[-1] if during else None, line.peak_bytes)
        # The model counts peaks from the resident bytes on, and kept bytes as far as there is a choice.
        bound += (prices.peak_ms + (prices.forward_ms or 0.0)) * self.excerpt.graph.resident_bytes
        return bound + prices.kept_ms * self.always_kept_bytes + prices.late_ms * self.always_late_bytes


@dataclass(frozen=True)
class Choice:
    """One column per segment, as actions and replays of the whole step; ``bound_ms`` of recompute time."""

    actions: dict[int, str]
    replays: dict[int, int]
    bound_ms: float


class Decomposition:
    """The pool of one step; asking for several budgets shares it."""

    def __init__(self, graph: StepGraph, costs: Costs, segment_of: dict[int, int], windows: list[Windows]) -> None:
        self.graph = graph
        source = Excerpts(graph, costs, segment_of, windows)
        self.excerpts = [source.cut(segment) for segment in range(len(windows))]
        self._begin()

    def afresh(self) -> Decomposition:
        """The same segments with a pool that has learnt nothing yet."""
        other = copy(self)
        other._begin()
        return other

    def _begin(self) -> None:
        kinds: dict[Content, Kind] = {}
        self.kinds: list[Kind] = []
        for excerpt in self.excerpts:
            if excerpt.content not in kinds:
                kinds[excerpt.content] = Kind(excerpt)
            self.kinds.append(kinds[excerpt.content])
        self.different = list(kinds.values())
        self.total_ms = sum(g.ms for k in self.kinds for g in k.sketch.groups) or 1.0
        self.byte_unit = max(max(p for k in self.different for p in k.plain.peaks) / 1e3, 1.0)

    def peaks(self, segment: int, column: Column) -> tuple[int, int]:
        """Of ``segment`` under ``column``, forward and backward, while the others save everything."""
        mine, reference = self.excerpts[segment].ballast_bytes, self.kinds[segment].excerpt.ballast_bytes
        forward, backward = (p + a - b for p, a, b in zip(column.peaks, mine, reference, strict=True))
        return forward, backward

    @property
    def split(self) -> bool:
        """Whether some column saves less late in the forward pass than at the turn."""
        return any(
            k.plain.late_bytes - c.late_bytes != k.plain.kept_bytes - c.kept_bytes
            for k in self.different
            for c in k.columns
        )

    def solve(self, budget_bytes: int, gap: float, slack_ms: float, node_limit: int, deadline: float) -> Choice | None:
        """The best choice of columns; None if segments cannot be run in so little, or time is up before one is found.

        Args:
            deadline: When to be done, by ``time.perf_counter()``; what that cuts off differs from run to run.
        """
        bound_ms, prices = self._generate(budget_bytes, deadline)
        choice = None
        for finer in (False, True):
            if finer and not self._densify(prices, deadline):
                break
            master = _Master(self, budget_bytes)
            master.program.upper[master.shortage] = 0.0  # else a few bytes could be bought within the gap
            answer = master.program.minimise(
                gap=gap, slack=slack_ms / master.ms_unit, node_limit=node_limit, time_limit_s=left_s(deadline)
            )
            if not len(answer.values):
                break
            choice = self._choice(master.chosen(answer.values), bound_ms)
            if answer.objective * master.ms_unit <= bound_ms + slack_ms:
                break
        return choice

    def leanest(self, node_limit: int) -> Choice:
        """The choice of columns with the least peak that is found: the same each time, so no time limits it.

        What Python holds until forward ends is left out: local search goes on from here, and from a start that minds it
        came no lower (bf16 autocast: 20.6 % of the plain step's activation memory, and 20.5 %).
        """
        nothing = self.graph.resident_bytes
        for _ in range(_LEAN_ROUNDS):
            master = _Master(self, nothing, split=False)
            if not self._shorten(master, master.program.relax()):
                break
        master = _Master(self, nothing, split=False)
        answer = master.program.minimise(gap=1e-4, slack=0.0, node_limit=node_limit, time_limit_s=math.inf)
        return self._choice(master.chosen(answer.values), 0.0)

    def _shorten(self, master: _Master, relaxed: Relaxed) -> bool:
        """Where memory is short whatever is chosen: add columns that are quickly found; return whether there were any.

        No bound comes of it, so no column has to be the best.
        """
        before = sum(len(kind.columns) for kind in self.different)
        for segment, kind in enumerate(self.kinds):
            kind.round(master.prices(segment, relaxed.duals))
        self._lean(master, relaxed)
        return sum(len(kind.columns) for kind in self.different) > before

    def _densify(self, prices: dict[Kind, set[tuple[float, bool]]], deadline: float) -> bool:
        points = max(_POINTS // len(self.different), _FEWEST_POINTS)
        found = False
        for kind, met in prices.items():
            few = max(points * _POINTS_SIZE // max(kind.sketch.size, _POINTS_SIZE), _FEWEST_POINTS)
            for price, late in sorted({min(met), max(met)}):
                found |= kind.densify(price, late, few, deadline)
        return found

    def _generate(self, budget_bytes: int, deadline: float) -> tuple[float, dict[Kind, set[tuple[float, bool]]]]:
        """Add columns until none would help the relaxation; return its bound and the peak prices each kind met.

        With each price whether what is kept matters most late in the forward pass.
        """
        best_ms, hard_rounds = 0.0, _HARD_ROUNDS
        peak_prices: dict[Kind, set[tuple[float, bool]]] = {}
        for _ in range(_ROUNDS):
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
            found, open_ms = False, 0.0
            for segment, kind in enumerate(self.kinds):
                worth = master.prices(segment, relaxed.duals)
                peak_prices.setdefault(kind, set()).add((worth.peak_ms, worth.late_ms > worth.kept_ms))
                before = len(kind.columns)
                forward, backward = self.peaks(segment, kind.plain)
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
            enough = -open_ms <= _ENOUGH * value_ms
            if (enough or not found) and not self._lean(master, relaxed):
                break
            if time.perf_counter() > deadline:
                break
        return best_ms, peak_prices

    def _lean(self, master: _Master, relaxed: Relaxed) -> bool:
        """Make leaner what the relaxation uses where a byte of peak is worth something."""
        worth: dict[tuple[Kind, int], float] = {}  # by kind and place in its columns
        for segment, kind in enumerate(self.kinds):
            peak_ms = master.prices(segment, relaxed.duals).peak_ms
            for place, z in enumerate(master.z[segment] if peak_ms > 0 else ()):
                if relaxed.values[z] > _USED:
                    worth[kind, place] = max(worth.get((kind, place), 0.0), peak_ms)
        return any([kind.lean(kind.columns[place], peak_ms) for (kind, place), peak_ms in worth.items()])

    def _choice(self, columns: list[Column], bound_ms: float) -> Choice:
        return Choice(self.actions(columns), self.replays(columns), bound_ms)

    def actions(self, columns: Iterable[Column]) -> dict[int, str]:
        """Actions of the whole step."""
        recomputed, kept = [], []
        for excerpt, column in zip(self.excerpts, columns, strict=True):
            for storage, action in column.actions.items():
                if storage >= len(excerpt.storages):
                    continue
                whole = excerpt.storages[storage]
                if action == RECOMPUTE and whole in self.graph.stored:
                    recomputed.append(whole)
                elif action == SAVE and whole not in self.graph.stored:
                    kept.append(whole)
        return close(self.graph, recomputed, kept)

    def replays(self, columns: Iterable[Column]) -> dict[int, int]:
        """Of the whole step, where more than once."""
        found: dict[int, int] = {}
        for excerpt, column in zip(self.excerpts, columns, strict=True):
            found.update(_whole(excerpt.storages, column.replays))
        return dict(sorted(found.items()))


def _whole(storages: tuple[int, ...], replays: Mapping[int, int]) -> dict[int, int]:
    return {storages[s]: count for s, count in replays.items() if s < len(storages)}


@dataclass(frozen=True)
class Worth:
    """What the relaxation pays, milliseconds per byte.

    Attributes:
        kept_ms: Of what a segment keeps at the turn. ``late_ms``: late in the forward pass.
        peak_ms: Of its peak. ``forward_ms``: of the peak in its forward window; None where both have one row.
        column_ms: What a column may cost at these prices without being worth it; not per byte.
    """

    kept_ms: float
    late_ms: float
    peak_ms: float
    forward_ms: float | None
    column_ms: float


class _Master:
    """The choice of columns as a program."""

    def __init__(self, pool: Decomposition, budget_bytes: int, *, split: bool | None = None) -> None:
        self.pool, self.program = pool, Program()
        self._limit = budget_bytes / pool.byte_unit
        self.ms_unit = pool.total_ms / 1e3
        # Running short is possible and dear, so that the relaxation always has prices.
        self.shortage = self.program.column(1e4, upper=float("inf"))
        self.z = [[self.program.column(c.ms / self.ms_unit, integer=True) for c in kind.columns] for kind in pool.kinds]
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
        for segment, (kind, z) in enumerate(zip(pool.kinds, self.z, strict=True)):
            after = program.column(upper=float("inf"))
            terms = {c: peak_of(pool.peaks(segment, col)) / unit for c, col in zip(z, kind.columns, strict=True)}
            less = {self.shortage: -1.0} if before is None else {self.shortage: -1.0, before: -1.0}
            peaks.append(program.row({**terms, **less}, upper=self._limit))
            known: dict[int, float] = {} if before is None else {before: -1.0}
            plain = kept_of(kind.plain)
            gains = {c: (kept_of(col) - plain) / unit for c, col in zip(z, kind.columns, strict=True)}
            sums.append(program.row({after: 1.0, **known, **gains}, upper=0.0))
            before = after
        return peaks, sums

    def prices(self, segment: int, duals: np.ndarray) -> Worth:
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
        return Worth(kept_ms, late_ms, peak_ms, forward_ms, column_ms)

    def short(self, values: np.ndarray) -> bool:
        return bool(values[self.shortage] * self.pool.byte_unit > 0.5)

    def chosen(self, values: np.ndarray) -> list[Column]:
        """The column of each segment."""
        return [k.columns[int(np.argmax(values[z]))] for k, z in zip(self.pool.kinds, self.z, strict=True)]
