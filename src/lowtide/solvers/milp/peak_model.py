"""The MILP of the exact method: least recomputation such that memory stays within a budget at every moment.

After Checkmate (Jain et al. 2020, https://arxiv.org/abs/1910.02653), which cuts the step into stages and asks for each
stage what is computed and what is kept. Differs: a tensor is replayed at most once and stays until its last use, so one
step function per group replaces a triangular matrix; memory is counted as the tape counts it, Python's own references,
recipes' references and transients included.

Symbols (``coarsening.py`` says what a group, a piece, a keep decision, a trigger and a memory interval is):

    s_x         1: decision x is kept, 0: recomputed                     binary
    A_{g,t}     1: group g has been replayed by trigger t                rises with t; r_g = A_{g,last}
    A_{x,t}     1: decision x is there because g was replayed by t       = A_{g,t} where g has one decision
    y           1: a piece that autograd needs no more still waits for a replay that reads it

    minimise    sum_g ms_g r_g
    such that   A_{g,first(x)} + s_x >= 1                     what is dropped is back when backward first asks for it
                A_{g,t} <= s_p + A_{p,t}                      a replay finds what it reads
                base(q) + sum_x m_x live_{x,q} <= budget      at every memory interval q
        live_{x,q} = s_x + A_{x,q}                            while autograd stores x
        live_{x,q} >= s_x + A_{x,q} + r_j - A_{j,q} - 1       for each consumer j afterwards (y)

Burst rows say the same of the moment when group k runs inside the burst of trigger t: groups before k in program order
stand at t, the others at t-1, and k's own bytes count if it runs then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from lowtide.solvers import tuning
from lowtide.solvers.milp.coarsening import CoarseGraph, KeepDecision, OpGroup, Piece
from lowtide.solvers.milp.highs import INFINITY, LinearProgram

Terms = dict[int, float]
StateOf = Callable[["OpGroup | None"], int]  # the trigger at which a group stands
Moment = tuple[int | None, tuple[tuple[int, float], ...]]  # of a row: the column of its peak, and its terms


@dataclass(frozen=True)
class Prices:
    """What memory costs while one segment is planned and the others need memory too: milliseconds per byte."""

    kept_ms: float  # of what is kept at event ``backward_start``
    peak_ms: float  # of the peak; where ``forward_ms`` is given, of the peak from ``backward_start`` on
    backward_start: int
    forward_end_ms: float = 0.0  # of what is kept at event ``forward_end``, which comes before ``backward_start``
    forward_end: int = 0
    forward_ms: float | None = None  # of the peak before ``backward_start``; None: the step has one peak
    max_kept_bytes: int | None = None  # keep no more at ``backward_start``, of what has a decision

    @property
    def structure(self) -> tuple[int, int, bool]:
        """Equal for prices that one model can have one after the other."""
        return self.backward_start, self.forward_end, self.forward_ms is None


class PeakModel:
    """Rows and columns for one ``CoarseGraph``.

    Args:
        budget_bytes: The peak to stay within; None makes the peak itself what is minimised.
        max_ms: Recompute time to stay within.
        prices: Minimise time and the price of memory together instead; no budget then.
    """

    def __init__(
        self,
        coarse: CoarseGraph,
        budget_bytes: int | None,
        *,
        max_ms: float | None = None,
        prices: Prices | None = None,
    ) -> None:
        self.coarse, self.budget_bytes, self.prices = coarse, budget_bytes, prices
        self._start = coarse.graph.start_bytes
        self.program = LinearProgram()
        self._memo: dict[tuple, int] = {}
        self._rows: dict[tuple, int] = {}  # moment -> row
        self._columns()
        self._replay_rows()
        if max_ms is not None:
            times = {steps[-1]: g.ms / self.ms_unit for g, steps in self.A.items() if steps}
            self.program.row(times, upper=max_ms / self.ms_unit + 1e-6)
        self._kept_row: int | None = None
        if prices is not None:
            kept = {s: d.kept_at(prices.backward_start) / self.byte_unit for d, s in self.s.items()}
            self._kept_row = self.program.row(kept)
            self.reprice(prices)
        self._lazy_rows()
        self._interval_rows()
        if coarse.size <= tuning.ALL_BURSTS_SIZE:
            for group in coarse.groups:
                for trigger in group.triggers:
                    self.add_burst(group, trigger)

    def reprice(self, prices: Prices) -> None:
        """Set other prices, of the same moments."""
        assert self.prices is not None and self.peak is not None and self.forward_peak is not None
        if prices.structure != self.prices.structure:
            raise ValueError(f"{prices} are of other moments than {self.prices}. Make a model of their own.")
        self.prices, cost = prices, self.program.cost
        for decision, s in self.s.items():
            cost[s] = self._kept_price(decision)
        scale = self.byte_unit / self.ms_unit
        cost[self.peak] = prices.peak_ms * scale
        if prices.forward_ms is not None:
            cost[self.forward_peak] = prices.forward_ms * scale
        if self._kept_row is not None:
            most = prices.max_kept_bytes
            self.program.row_upper[self._kept_row] = INFINITY if most is None else most / self.byte_unit

    def copy(self) -> PeakModel:
        """The same model, to which rows can be added apart."""
        other = copy(self)
        other.program, other._memo, other._rows = self.program.copy(), dict(self._memo), dict(self._rows)
        return other

    # Columns

    def _columns(self) -> None:
        coarse, program = self.coarse, self.program
        total = sum(g.ms for g in coarse.groups) or 1.0
        # Scaled so that HiGHS's absolute tolerances mean the same for a toy and for a giant.
        self.ms_unit = total / 1e3
        self.byte_unit = max(float(coarse.base_peak.max() - self._start) / 1e3, 1.0)
        segments = max(coarse.segment_of.values(), default=0) + 1
        minimise_time = self.budget_bytes is not None or self.prices is not None
        self.s: dict[KeepDecision, int] = {
            d: program.column(self._kept_price(d), integer=True)
            for d in coarse.decisions
            if d.group is not None or not d.stored
        }
        self.A: dict[OpGroup, list[int]] = {}
        self.A_of: dict[KeepDecision, list[int]] = {}
        self.objective_slack = 0.0  # what the tie-breaks may add to the objective at most
        for group in coarse.groups:
            # Never more than the true time, so that the solver's bound stays one.
            ms = group.ms / self.ms_unit * (1 - tuning.TIE_BREAK * group.segment / segments)
            lazy = 1e-6
            steps = [program.column(lazy) for _ in group.triggers[:-1]]
            if group.triggers:
                steps.append(program.column(ms if minimise_time else 1e-6 * ms, integer=True))
            self.objective_slack += lazy * len(steps[:-1])
            self.A[group] = steps
            for decision in group.decisions:
                several = len(group.decisions) > 1
                self.A_of[decision] = [program.column() for _ in steps] if several else steps
        self.peak = self.forward_peak = None
        if self.budget_bytes is None:
            scale = self.byte_unit / self.ms_unit
            price = 1.0 if self.prices is None else self.prices.peak_ms * scale
            self.peak = self.forward_peak = program.column(price, upper=float("inf"))
            if self.prices is not None and self.prices.forward_ms is not None:
                self.forward_peak = program.column(self.prices.forward_ms * scale, upper=float("inf"))

    def _kept_price(self, decision: KeepDecision) -> float:
        if self.prices is None:
            return 0.0
        prices, kept = self.prices, decision.kept_at(self.prices.backward_start)
        return (prices.kept_ms * kept + prices.forward_end_ms * decision.kept_at(prices.forward_end)) / self.ms_unit

    # Rows without bytes

    def _replay_rows(self) -> None:
        row = self.program.row
        for decision, s in self.s.items():
            group = decision.group
            if group is None:
                continue
            steps, first = self.A_of[decision], decision.first
            if first is not None:
                row({self.A[group][group.step_of(first)]: 1, s: 1}, lower=1)
            if steps is not self.A[group]:
                for mine, all_of_it in zip(steps, self.A[group], strict=True):
                    row({mine: 1, all_of_it: -1}, upper=0)
                    row({all_of_it: 1, mine: -1, s: -1}, upper=0)
                    row({mine: 1, s: 1}, upper=1)
            elif steps:
                row({steps[-1]: 1, s: 1}, upper=1)
        for group, steps in self.A.items():
            for before, after in pairwise(steps):
                row({before: 1, after: -1}, upper=0)
            for trigger, step in zip(group.triggers, steps, strict=True):
                for piece in group.reads:
                    source = piece.decision
                    if source in self.s:
                        row({step: 1, self.s[source]: -1, **self._back(source, trigger, -1)}, upper=0)

    def _lazy_rows(self) -> None:
        """A replay happens only when something asks for it: the tape would not replay early to free what it reads."""
        row, column = self.program.row, self.program.column
        for group, steps in self.A.items():
            for trigger, step in zip(group.triggers, steps, strict=True):
                causes: Terms = {}
                for decision in group.decisions:
                    asked: Terms = {}
                    for piece in decision.pieces:
                        for consumer in piece.consumers:
                            asked.update(self._ran(consumer, trigger, -1))
                    due = decision.first is not None and decision.first <= trigger
                    if len(group.decisions) == 1 and not due:
                        causes.update(asked)
                        continue
                    cause = column()
                    causes[cause] = -1
                    row({cause: 1, self.s[decision]: 1}, upper=1)
                    if not due:
                        row({cause: 1, **asked}, upper=0)
                row({step: 1, **causes}, upper=0)

    def _ran(self, group: OpGroup, trigger: int, factor: float) -> Terms:
        at = group.step_of(trigger)
        return {self.A[group][at]: factor} if at >= 0 else {}

    def _back(self, decision: KeepDecision, trigger: int, factor: float) -> Terms:
        at = decision.group.step_of(trigger) if decision.group is not None else -1
        return {self.A_of[decision][at]: factor} if at >= 0 else {}

    # Rows with bytes

    def _interval_rows(self) -> None:
        coarse = self.coarse
        starts = np.array([interval.start for interval in coarse.intervals])
        terms: list[Terms] = [{} for _ in coarse.intervals]
        for piece, (begin, end) in self._lifetimes().items():
            for number in range(*np.searchsorted(starts, (begin, end))):
                interval = coarse.intervals[number]
                self._add_piece(terms[number], piece, interval.start, partial(_everyone_at, interval.trigger))
        for group in coarse.groups:
            if group.rng_bytes and group.triggers:
                end = coarse.trigger_events[group.triggers[-1]]
                for number in range(*np.searchsorted(starts, (coarse.run_event[group.head], end))):
                    self._add_rng(terms[number], group, coarse.intervals[number].trigger)
        moments: list[Moment] = []
        highest: dict[Moment, int] = {}
        for interval, found in zip(coarse.intervals, terms, strict=True):
            forward = self.prices is not None and interval.start < self.prices.backward_start
            moments.append((self.forward_peak if forward else self.peak, tuple(found.items())))
            highest[moments[-1]] = max(highest.get(moments[-1], 0), interval.base_bytes)
        # Intervals that differ in their base alone share the highest one's row.
        rows = {moment: self._memory_row(dict(moment[1]), most, moment[0]) for moment, most in highest.items()}
        for interval, moment in zip(coarse.intervals, moments, strict=True):
            self._rows["interval", interval.start] = rows[moment]

    def _lifetimes(self) -> dict[Piece, tuple[int, int]]:
        """From the first to one past the last event at which each piece may count beyond the base."""
        coarse, spans = self.coarse, {}
        for piece in coarse.pieces:
            last = piece.direct_end
            for consumer in piece.consumers:
                if consumer.triggers:
                    last = max(last, coarse.trigger_events[consumer.triggers[-1]])
            first = piece.dead
            if piece.group is not None and piece.group.triggers:
                first = min(first, coarse.trigger_events[piece.group.triggers[0]])
            if first <= last:
                spans[piece] = (first, last + 1)
        return spans

    def _add_piece(self, terms: Terms, piece: Piece, event: int, at: StateOf) -> None:
        """Add ``piece``'s bytes at ``event`` to ``terms``."""
        decision = piece.decision
        assert decision is not None
        dead, direct = event > piece.dead, event <= piece.direct_end
        kept = self.s.get(decision) if dead else None
        back = self._back(decision, at(piece.group), 1.0) if piece.group is not None else {}
        if piece.group is None and direct:
            return  # in the base
        if kept is None and not back and piece.group is not None:
            return  # Python still holds the original and no replay has made another
        if direct:
            _add(terms, back, piece.bytes)
            _add(terms, {kept: 1.0} if kept is not None else {}, piece.bytes)
            return
        waiting = []
        for consumer in piece.consumers:
            done = self._ran(consumer, at(consumer), -1.0)
            will = {self.A[consumer][-1]: 1.0} if consumer.triggers else {}
            if will and not done.keys() & will.keys():
                waiting.append({**will, **done})
        if not waiting or (piece.group is None and not dead):
            return
        if piece.group is None and len(waiting) == 1:
            _add(terms, waiting[0], piece.bytes)
        elif not back and not decision.stored and kept is not None and all(len(w) == 1 for w in waiting):
            # Nothing has been replayed yet: it is there exactly if some replay will want it.
            _add(terms, {kept: 1.0}, piece.bytes)
        else:
            key = (piece.storage, kept, *back, None, *(c for w in waiting for c in w))
            if key not in self._memo:
                self._memo[key] = y = self.program.column()
                for wait in waiting:
                    there = {} if piece.group is None else {**back, **({kept: 1.0} if kept is not None else {})}
                    self.program.row({y: -1.0, **there, **wait}, upper=1.0 if there else 0.0)
            _add(terms, {self._memo[key]: 1.0}, piece.bytes)

    def _add_rng(self, terms: Terms, group: OpGroup, trigger: int) -> None:
        done = self._ran(group, trigger, -1.0)
        will = {self.A[group][-1]: 1.0}
        if not done.keys() & will.keys():
            _add(terms, {**will, **done}, group.rng_bytes)

    def _memory_row(self, terms: Terms, constant: int, peak: int | None) -> int:
        scaled = {c: v / self.byte_unit for c, v in terms.items()}
        if peak is not None:
            scaled[peak] = -1.0
        limit = self.budget_bytes if peak is None else self._start
        assert limit is not None
        return self.program.row(scaled, upper=(limit - constant) / self.byte_unit)

    def add_burst(self, group: OpGroup, trigger: int) -> None:
        """The row for ``group`` running in the burst of ``trigger``."""
        coarse = self.coarse
        event = coarse.trigger_events[trigger]
        terms: Terms = {}
        _add(terms, self._ran(group, trigger, 1.0), group.burst_bytes)
        _add(terms, self._ran(group, trigger - 1, -1.0), group.burst_bytes)

        def at(other: OpGroup | None) -> int:
            return trigger if other is not None and other.head < group.head else trigger - 1

        for piece, (begin, end) in self._lifetimes().items():
            if begin <= event < end:
                self._add_piece(terms, piece, event, at)
        for other in coarse.groups:
            if other.rng_bytes and other.triggers and coarse.run_event[other.head] < event:
                self._add_rng(terms, other, at(other))
        self._rows["burst", trigger, group.head] = self._memory_row(terms, int(coarse.base_live[event]), self.peak)

    # Cuts

    def forbid(self, values: np.ndarray, event: int, replayed_op: int | None, peak_bytes: int) -> None:
        """Make the row of ``event``, while ``replayed_op`` runs again, say ``peak_bytes`` of ``values``.

        Where that row is missing it is added instead.
        """
        coarse = self.coarse
        trigger = bisect_right(coarse.trigger_events, event) - 1
        group = coarse.group_of.get(-1 if replayed_op is None else replayed_op)
        if group is not None and trigger in group.triggers:
            moment: tuple = ("burst", trigger, group.head)
            if moment not in self._rows:
                self.add_burst(group, trigger)
                return
        else:
            starts = [interval.start for interval in coarse.intervals]
            moment = ("interval", starts[max(int(np.searchsorted(starts, event, side="right")) - 1, 0)])
        row = self._rows[moment]
        missing = (peak_bytes - self.claimed_peak_bytes(values)) / self.byte_unit
        self.program.row_upper[row] = min(self.program.row_upper[row], self.program.activity(row, values) - missing)

    # Reading a solution

    def claimed_peak_bytes(self, values: np.ndarray) -> int:
        """The peak as the model sees it; only where the peak is what was minimised."""
        assert self.peak is not None and self.forward_peak is not None
        highest = max(values[self.peak], values[self.forward_peak])
        return round(highest * self.byte_unit) + self._start

    def choice(self, values: np.ndarray, share: float = 0.5) -> tuple[list[int], list[int]]:
        """Storages to recompute, and storages to keep although autograd does not store them.

        Args:
            share: What is kept by less than this is recomputed.
        """
        droppable = self.coarse.droppable
        recomputed, kept = [], []
        for decision, s in self.s.items():
            for piece in decision.pieces:
                if values[s] < share and piece.storage in droppable:
                    recomputed.append(piece.storage)
                elif values[s] >= share and piece.direct_end < 0:
                    kept.append(piece.storage)
        return recomputed, kept


def _everyone_at(trigger: int, _: OpGroup | None) -> int:
    return trigger


def _add(terms: Terms, more: Terms, factor: float) -> None:
    for column, value in more.items():
        terms[column] = terms.get(column, 0.0) + value * factor
