"""Columns: candidates for one segment, and the pool of them that equal segments share.

The pricing problem is the segment's own MILP (``peak_model.py``): it finds the best column where a byte kept and a byte
of peak cost what the duals say. Local search derives columns with lower peaks, which may replay an op more than once
(``local_search.py``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lowtide.solvers import tuning
from lowtide.solvers.decomposition.shortest_path import Arcs
from lowtide.solvers.decomposition.subgraph import Subgraph
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.local_search import descent
from lowtide.solvers.milp.coarsening import CoarseGraph
from lowtide.solvers.milp.highs import RepeatedRelaxation, seconds_left
from lowtide.solvers.milp.peak_model import PeakModel, Prices
from lowtide.solvers.search_context import Evaluated


@dataclass(frozen=True)
class Column:
    """One candidate for the segments of one pool; ``actions`` and ``replays`` by storage of the pool's subgraph."""

    actions: dict[int, str]
    ms: float  # replays and their recording
    kept_bytes: int  # live at ``backward_start``
    forward_end_bytes: int  # live at ``forward_end`` (``SubgraphContent``)
    peaks: tuple[int, int]  # absolute bytes in the forward and in the backward window
    replays: dict[int, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple:
        """Equal for columns of which one is enough."""
        return round(self.ms, 9), self.kept_bytes, self.forward_end_bytes, self.peaks


@dataclass(frozen=True)
class DualPrices:
    """The duals of the relaxed master problem for one segment, milliseconds per byte."""

    kept_ms: float  # of what the segment keeps at ``backward_start``
    forward_end_ms: float  # of what it keeps at ``forward_end``
    peak_ms: float
    forward_ms: float | None  # of the peak in its forward window; None where both windows have one row
    column_ms: float  # cost at these prices from which a column does not help; milliseconds, not per byte


class ColumnPool:
    """The columns known for segments that are equal."""

    def __init__(self, subgraph: Subgraph) -> None:
        self.subgraph, self.context = subgraph, subgraph.context
        self.dispatch_ms = self.context.costs.dispatch_us / 1e3 * len(self.context.graph.forward_ops)
        self.columns: list[Column] = []
        self._known: set[tuple] = set()
        self._priced: dict[Prices, float] = {}
        self._rounded: set[tuple[Prices, tuple[float, ...]]] = set()
        self._models: dict[tuple, tuple[PeakModel, RepeatedRelaxation]] = {}
        self._densified: set[tuple[float, bool]] = set()
        self._lowered_at: dict[tuple, float] = {}  # column -> price of a byte at which lower peaks were looked for
        self.plain = self.column(complete_actions(self.context.graph, ()))
        self.add(self.plain)

    @cached_property
    def coarse(self) -> CoarseGraph:
        return CoarseGraph(self.context)

    @cached_property
    def fixed_bytes(self) -> tuple[int, int]:
        """Of what is kept, the part that has no decision: at ``backward_start``, and at ``forward_end``."""
        free = [d for d in self.coarse.decisions if d.group is not None and d.stored]
        kept_bytes = sum(d.kept_at(self.subgraph.backward_start) for d in free)
        forward_end_bytes = sum(d.kept_at(self.subgraph.forward_end) for d in free)
        return self.plain.kept_bytes - kept_bytes, self.plain.forward_end_bytes - forward_end_bytes

    def column(self, actions: dict[int, str], replays: Mapping[int, int] | None = None) -> Column:
        """The column of ``actions``, evaluated on the subgraph."""
        return self._column(self.context.evaluate(actions, replays))

    @property
    def separate_forward(self) -> bool:
        """Whether some column saves less at ``forward_end`` than at ``backward_start``."""
        plain = self.plain
        return any(
            plain.forward_end_bytes - c.forward_end_bytes != plain.kept_bytes - c.kept_bytes for c in self.columns
        )

    def _column(self, evaluated: Evaluated) -> Column:
        backward_start, timeline = self.subgraph.backward_start, evaluated.timeline
        ms = timeline.recompute_ms - (self.dispatch_ms if timeline.recompute_ms else 0.0)
        kept_bytes = timeline.live_bytes[backward_start - 1]
        forward_end_bytes = timeline.live_bytes[self.subgraph.forward_end - 1]
        peaks = timeline.event_peak_bytes
        highest = max(peaks[:backward_start]), max(peaks[backward_start:])
        return Column(evaluated.actions, ms, kept_bytes, forward_end_bytes, highest, evaluated.replays)

    def add(self, column: Column) -> bool:
        """Add ``column`` to the pool; return whether it is new."""
        if column.key in self._known:
            return False
        self._known.add(column.key)
        self.columns.append(column)
        return True

    def add_lower_peaks(self, column: Column, ms_per_byte: float) -> bool:
        """Add columns with lower peaks than ``column`` that ``ms_per_byte`` pays for; return whether there were any."""
        if self._lowered_at.get(column.key, 0.0) >= ms_per_byte / tuning.COLUMN_SEARCH_PRICE:
            return False
        self._lowered_at[column.key] = ms_per_byte
        start = self.context.evaluate(column.actions, column.replays)
        max_price = tuning.COLUMN_SEARCH_PRICE * ms_per_byte
        _, *lower = descent(self.context, start, max_ms_per_byte=max_price, events=tuning.COLUMN_SEARCH_EVENTS)
        return any([self.add(self._column(evaluated)) for evaluated in lower])

    def price(self, duals: DualPrices, deadline: float) -> float:
        """Add the best column at these prices; return a lower bound of any column's cost at them, in milliseconds."""
        prices = self._prices(duals, digits=6)
        if prices not in self._priced:
            self._priced[prices] = self._solve(prices, deadline)
        return self._priced[prices]

    def add_rounded(self, duals: DualPrices, thresholds: tuple[float, ...] = (0.5,)) -> None:
        """Add the columns that the relaxed pricing problem rounds to: quick, and not the best."""
        prices = self._prices(duals, digits=2)
        if (prices, thresholds) in self._rounded:
            return
        self._rounded.add((prices, thresholds))
        self._add_rounded(prices, thresholds)

    @property
    def pivots(self) -> int:
        """Of all its relaxed pricing problems so far."""
        return sum(relaxation.pivots for _, relaxation in self._models.values())

    def _add_rounded(self, prices: Prices, thresholds: Iterable[float] = (0.5,)) -> None:
        model, relaxation = self._model(prices)
        values = relaxation.values(model.program)
        choices = [model.choice(values, share) for share in thresholds] if len(values) else []
        for number, choice in enumerate(choices):
            if choice not in choices[:number]:
                self.add(self.column(complete_actions(self.context.graph, *choice)))

    def _model(self, prices: Prices) -> tuple[PeakModel, RepeatedRelaxation]:
        """The pricing problem at ``prices``, and its relaxation; built once, as only costs differ."""
        if prices.structure not in self._models:
            model = PeakModel(self.coarse, None, prices=prices)
            self._models[prices.structure] = model, RepeatedRelaxation(model.program)
        model, relaxation = self._models[prices.structure]
        model.reprice(prices)
        return model, relaxation

    def _prices(self, duals: DualPrices, *, digits: int) -> Prices:
        """``duals`` as prices, rounded so that nearly equal ones are solved once."""

        def rounded(ms: float) -> float:
            return float(f"{ms:.{digits}g}")

        graph, forward_ms = self.subgraph, duals.forward_ms
        return Prices(
            rounded(duals.kept_ms), rounded(duals.peak_ms), graph.backward_start, rounded(duals.forward_end_ms),
            graph.forward_end, None if forward_ms is None else rounded(forward_ms),
        )  # fmt: skip

    def densify(self, peak_ms: float, *, at_forward_end: bool, points: int) -> bool:
        """Add columns between the known ones, which prices alone never find: they are inside the convex hull.

        Each is rounded from the relaxation of the fastest column that keeps at most so many bytes, at a price of the
        peak.

        Args:
            at_forward_end: Whether the bytes are counted at ``forward_end`` instead of ``backward_start``.

        Returns:
            Whether a column was new.
        """
        key = float(f"{peak_ms:.3g}"), at_forward_end
        if key in self._densified:
            return False
        self._densified.add(key)
        before = len(self.columns)
        at = self.subgraph.forward_end if at_forward_end else self.subgraph.backward_start
        fixed = self.fixed_bytes[at_forward_end]
        kept = [c.forward_end_bytes if at_forward_end else c.kept_bytes for c in (self.plain, *self.columns)]
        for part in range(1, points + 1):
            most = min(kept) + (kept[0] - min(kept)) * part // (points + 1) - fixed
            self._add_rounded(Prices(0.0, key[0], at, max_kept_bytes=most), tuning.DENSIFY_THRESHOLDS)
        return len(self.columns) > before

    def fill(
        self,
        peak_ms: float,
        least_bytes: int,
        most_bytes: int,
        *,
        at_forward_end: bool,
        points: int,
        deadline: float,
    ) -> bool:
        """Add the fastest columns that keep between ``least_bytes`` and ``most_bytes``, at a price of the peak.

        Args:
            at_forward_end: As for ``densify``.
            points: How many.

        Returns:
            Whether a column was new.
        """
        before = len(self.columns)
        at = self.subgraph.forward_end if at_forward_end else self.subgraph.backward_start
        for part in range(1, points + 1):
            kept = least_bytes + (most_bytes - least_bytes) * part // (points + 1) - self.fixed_bytes[at_forward_end]
            self._solve(Prices(0.0, peak_ms, at, max_kept_bytes=kept), deadline)
        return len(self.columns) > before

    def _solve(self, prices: Prices, deadline: float) -> float:
        model = self._model(prices)[0].copy()
        bound = 0.0
        for round_ in range(tuning.PRICING_CUT_ROUNDS):
            answer = model.program.minimise(
                gap=tuning.PRICING_GAP, slack=0.0, node_limit=tuning.PRICING_NODES,
                time_limit_s=seconds_left(deadline), light=True,
            )  # fmt: skip
            if round_ == 0:
                bound = max(answer.bound - model.objective_slack, 0.0) * model.ms_unit
            if not len(answer.values):
                break
            actions = complete_actions(self.context.graph, *model.choice(answer.values))
            found = self.context.evaluate(actions)
            self.add(self._column(found))
            line = found.timeline
            claimed = model.claimed_peak_bytes(answer.values)
            if prices.peak_ms == 0 or line.peak_bytes <= claimed:
                break
            event = line.peak_event
            during = [r.op for r in line.replays if r.event == event and r.peak_bytes == line.peak_bytes]
            model.forbid(answer.values, event, during[-1] if during else None, line.peak_bytes)
        # The model counts peaks from the resident bytes on, and kept bytes as far as there is a choice.
        bound += (prices.peak_ms + (prices.forward_ms or 0.0)) * self.context.graph.start_bytes
        return bound + prices.kept_ms * self.fixed_bytes[0] + prices.forward_end_ms * self.fixed_bytes[1]


@dataclass(frozen=True)
class SegmentRun:
    """Consecutive segments, mostly one, that run by one column of ``pool``."""

    segments: range
    pool: ColumnPool
    outside_bytes: tuple[int, int]  # as in ``Subgraph``, for these segments

    def peaks(self, column: Column) -> tuple[int, int]:
        """Forward and backward peak under ``column`` while all other segments save everything."""
        reference = self.pool.subgraph.outside_bytes
        forward, backward = (p + a - b for p, a, b in zip(column.peaks, self.outside_bytes, reference, strict=True))
        return forward, backward

    def arcs(self, *, separate_forward: bool) -> Arcs:
        """All columns of the pool; not ``separate_forward``: forward and backward are counted together."""
        columns, plain = self.pool.columns, self.pool.plain
        forward, backward = np.array([self.peaks(c) for c in columns]).T
        saved = np.array([plain.kept_bytes - c.kept_bytes for c in columns])
        if separate_forward:
            forward_saved = np.array([plain.forward_end_bytes - c.forward_end_bytes for c in columns])
        else:
            forward_saved = 0 * saved
            forward, backward = 0 * forward, np.maximum(forward, backward)
        ms = np.array([c.ms for c in columns])
        return Arcs(self.segments.start, self.segments.stop, ms, saved, forward_saved, backward, forward)
