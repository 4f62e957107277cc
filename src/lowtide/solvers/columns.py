"""Deep models: a plan for each segment out of a pool, chosen together; the pool grows by what would help most.

Dantzig-Wolfe decomposition (1960, https://doi.org/10.1287/opre.8.1.101) over segments. A *column* is one way to run one
segment: its time, the bytes it takes off what is kept between forward and backward, and the peak it makes in its own
windows while all other segments save everything. Segments add up: with ``saved`` of the columns before it, segment l
peaks at peak_l - sum_{j<l} saved_j, because backward comes to it when only the segments before it still hold anything.

    minimise    sum ms_c z_{l,c}
    such that   sum_c z_{l,c} = 1                                        each segment runs in one way
                sum_c peak_{l,c} z_{l,c} - H_l <= budget                 at its own forward and backward
                H_{l+1} = H_l + sum_c saved_c z_{l,c}                    what the segments up to l have saved

The duals of the relaxation price kept bytes and peak bytes for each segment; the segment's own MILP (``peak_model.py``)
finds the column that is best at those prices, until none is better; local search makes leaner ones of it, which may
replay an op more than once (``leaner.py``). Equal segments share their columns, so time grows with the number of
different ones. The relaxation's value, corrected by what pricing left open, is a bound on all plans that replay inside
segments, each op once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
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
        kept_bytes: At the turn.
        peaks: Absolute bytes in the forward and in the backward window, ballast of the kind's excerpt included.
    """

    actions: dict[int, str]
    ms: float
    kept_bytes: int
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
        self._priced: dict[tuple[float, float], float] = {}
        self._densified: set[float] = set()
        self._rounded: set[tuple[float, float]] = set()
        self._leaned: dict[tuple, float] = {}  # at what worth of a byte
        self.plain = self.column(close(excerpt.graph, ()))
        self.add(self.plain)
        self.add(self.column(classic(excerpt.graph, "selective")))
        # Of what is kept at the turn, the part that no decision moves.
        decided = PeakModel(self.sketch, None, prices=Prices(1.0, 0.0, excerpt.turn)).kept_bytes
        self.always_kept_bytes = self.plain.kept_bytes - decided

    def column(self, actions: dict[int, str]) -> Column:
        """Judge ``actions`` on the excerpt."""
        return self._column(Judged(actions, simulate_actions(self.excerpt.graph, self.excerpt.costs, actions)))

    def _column(self, judged: Judged) -> Column:
        turn, line = self.excerpt.turn, judged.timeline
        ms = line.recompute_ms - (self.mode_ms if line.recompute_ms else 0.0)
        peaks = line.event_peak_bytes
        return Column(
            judged.actions, ms, line.live_bytes[turn - 1], (max(peaks[:turn]), max(peaks[turn:])), judged.replays
        )

    def add(self, column: Column) -> bool:
        """Take ``column`` into the pool; return whether it is new."""
        if self._key(column) in self._known:
            return False
        self._known.add(self._key(column))
        self.columns.append(column)
        return True

    @staticmethod
    def _key(column: Column) -> tuple:
        return round(column.ms, 9), column.kept_bytes, column.peaks

    def lean(self, column: Column, ms_per_byte: float) -> bool:
        """Add columns with lower peaks than ``column``, as far as a byte is worth it; return whether there were any."""
        if self._leaned.get(self._key(column), 0.0) >= ms_per_byte / _LEANER_PRICE:
            return False
        self._leaned[self._key(column)] = ms_per_byte
        graph, costs = self.excerpt.graph, self.excerpt.costs
        start = Judged(column.actions, simulate_actions(graph, costs, column.actions, column.replays), column.replays)
        path = leaner(graph, costs, start, most_ms_per_byte=_LEANER_PRICE * ms_per_byte, events=_LEANER_EVENTS)
        return any([self.add(self._column(judged)) for judged in path[1:]])

    def price(self, kept_ms: float, peak_ms: float, deadline: float) -> float:
        """Add the best column at these prices; return a lower bound of what any costs at them, in milliseconds."""
        key = (float(f"{kept_ms:.6g}"), float(f"{peak_ms:.6g}"))
        if key not in self._priced:
            self._priced[key] = self._solve(Prices(*key, self.excerpt.turn), deadline)
        return self._priced[key]

    def densify(self, peak_ms: float, points: int, deadline: float) -> bool:
        """Add columns between the known ones: prices alone never name a point inside the hull; return whether it did.

        The fastest ways to keep no more than so much, at a price of the peak.
        """
        key = float(f"{peak_ms:.3g}")
        if key in self._densified:
            return False
        self._densified.add(key)
        before = len(self.columns)
        least = min(c.kept_bytes for c in self.columns)
        for part in range(1, points + 1):
            most = least + (self.plain.kept_bytes - least) * part // (points + 1) - self.always_kept_bytes
            self._solve(Prices(0.0, key, self.excerpt.turn, most_kept_bytes=most), deadline)
        return len(self.columns) > before

    def round(self, kept_ms: float, peak_ms: float) -> None:
        """Add the column that the relaxation rounds to at these prices: quick, and not the best."""
        key = (float(f"{kept_ms:.2g}"), float(f"{peak_ms:.2g}"))
        if key in self._rounded:
            return
        self._rounded.add(key)
        model = PeakModel(self.sketch, None, prices=Prices(*key, self.excerpt.turn))
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
        return bound + prices.peak_ms * self.excerpt.graph.resident_bytes + prices.kept_ms * self.always_kept_bytes


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

    def peak(self, segment: int, column: Column) -> int:
        """Of ``segment`` under ``column`` while the others save everything."""
        mine, reference = self.excerpts[segment].ballast_bytes, self.kinds[segment].excerpt.ballast_bytes
        return max(p + a - b for p, a, b in zip(column.peaks, mine, reference, strict=True))

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
        """The choice of columns with the least peak that is found: the same each time, so no time limits it."""
        nothing = self.graph.resident_bytes
        for _ in range(_LEAN_ROUNDS):
            master = _Master(self, nothing)
            if not self._shorten(master, master.program.relax()):
                break
        master = _Master(self, nothing)
        answer = master.program.minimise(gap=1e-4, slack=0.0, node_limit=node_limit, time_limit_s=math.inf)
        return self._choice(master.chosen(answer.values), 0.0)

    def _shorten(self, master: _Master, relaxed: Relaxed) -> bool:
        """Where memory is short whatever is chosen: add columns that are quickly found; return whether there were any.

        No bound comes of it, so no column has to be the best.
        """
        before = sum(len(kind.columns) for kind in self.different)
        for segment, kind in enumerate(self.kinds):
            kept_ms, peak_ms, _ = master.prices(segment, relaxed.duals)
            kind.round(kept_ms, peak_ms)
        self._lean(master, relaxed)
        return sum(len(kind.columns) for kind in self.different) > before

    def _densify(self, prices: dict[Kind, set[float]], deadline: float) -> bool:
        points = max(_POINTS // len(self.different), _FEWEST_POINTS)
        found = False
        for kind, met in prices.items():
            few = max(points * _POINTS_SIZE // max(kind.sketch.size, _POINTS_SIZE), _FEWEST_POINTS)
            for price in sorted({min(met), max(met)}):
                found |= kind.densify(price, few, deadline)
        return found

    def _generate(self, budget_bytes: int, deadline: float) -> tuple[float, dict[Kind, set[float]]]:
        """Add columns until none would help the relaxation; return its bound and the peak prices each kind met."""
        best_ms, hard_rounds = 0.0, _HARD_ROUNDS
        peak_prices: dict[Kind, set[float]] = {}
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
                kept_ms, peak_ms, worth_ms = master.prices(segment, relaxed.duals)
                peak_prices.setdefault(kind, set()).add(peak_ms)
                before = len(kind.columns)
                shift = self.peak(segment, kind.plain) - max(kind.plain.peaks)
                cost_ms = kind.price(kept_ms, peak_ms, deadline) + peak_ms * shift
                found |= len(kind.columns) > before
                open_ms += min(cost_ms - worth_ms, 0.0)
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
            _, peak_ms, _ = master.prices(segment, relaxed.duals)
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


class _Master:
    """The choice of columns as a program."""

    def __init__(self, pool: Decomposition, budget_bytes: int) -> None:
        self.pool, self.program = pool, Program()
        program, unit = self.program, pool.byte_unit
        self.ms_unit = pool.total_ms / 1e3
        # Running short is possible and dear, so that the relaxation always has prices.
        self.shortage = program.column(1e4, upper=float("inf"))
        self.z: list[list[int]] = []
        self.ways: list[int] = []
        self.peaks: list[int] = []
        self.sums: list[int] = []
        before = None
        for segment, kind in enumerate(pool.kinds):
            z = [program.column(c.ms / self.ms_unit, integer=True) for c in kind.columns]
            saved = [(kind.plain.kept_bytes - c.kept_bytes) / unit for c in kind.columns]
            after = program.column(upper=float("inf"))
            self.z.append(z)
            self.ways.append(program.row(dict.fromkeys(z, 1.0), lower=1.0, upper=1.0))
            terms = {c: pool.peak(segment, column) / unit for c, column in zip(z, kind.columns, strict=True)}
            less = {self.shortage: -1.0} if before is None else {self.shortage: -1.0, before: -1.0}
            self.peaks.append(program.row({**terms, **less}, upper=budget_bytes / unit))
            known: dict[int, float] = {} if before is None else {before: -1.0}
            gains = {c: -s for c, s in zip(z, saved, strict=True)}
            self.sums.append(program.row({after: 1.0, **known, **gains}, upper=0.0))
            before = after

    def prices(self, segment: int, duals: np.ndarray) -> tuple[float, float, float]:
        """Milliseconds per kept byte, per peak byte, and what a column may cost at them without being worth it."""
        scale = self.ms_unit / self.pool.byte_unit
        peak_ms = -float(duals[self.peaks[segment]]) * scale
        kept_ms = -float(duals[self.sums[segment]]) * scale
        kept_bytes = self.pool.kinds[segment].plain.kept_bytes
        worth_ms = float(duals[self.ways[segment]]) * self.ms_unit + kept_ms * kept_bytes
        return max(kept_ms, 0.0), max(peak_ms, 0.0), worth_ms

    def short(self, values: np.ndarray) -> bool:
        return bool(values[self.shortage] * self.pool.byte_unit > 0.5)

    def chosen(self, values: np.ndarray) -> list[Column]:
        """The column of each segment."""
        return [k.columns[int(np.argmax(values[z]))] for k, z in zip(self.pool.kinds, self.z, strict=True)]
