"""One way to run a segment, and all the ways known for segments that are the same.

Columns are found at prices: the segment's own MILP (``peak_model.py``) says which is best where a byte kept and a byte
of peak cost so much. Local search makes leaner ones of them, which may replay an op more than once
(``local_search.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers import tuning
from lowtide.solvers.decomposition.subgraph import Subgraph
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.local_search import Evaluated, judge, reduce_peak
from lowtide.solvers.milp.coarsening import CoarseGraph
from lowtide.solvers.milp.highs import left_s
from lowtide.solvers.milp.peak_model import PeakModel, Prices
from lowtide.solvers.published.methods import classic


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


@dataclass(frozen=True)
class DualPrices:
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


class ColumnPool:
    """Segments that are the same, and the columns known for them."""

    def __init__(self, subgraph: Subgraph) -> None:
        self.subgraph = subgraph
        self.mode_ms = subgraph.costs.dispatch_us / 1e3 * len(subgraph.graph.forward_ops)
        self.columns: list[Column] = []
        self._known: set[tuple] = set()
        self._priced: dict[Prices, float] = {}
        self._densified: set[tuple[float, bool]] = set()
        self._rounded: set[Prices] = set()
        self._leaned: dict[tuple, float] = {}  # at what worth of a byte
        self.plain = self.column(complete_actions(subgraph.graph, ()))
        self.add(self.plain)
        self.add(self.column(classic(subgraph.graph, "selective")))

    @cached_property
    def coarse(self) -> CoarseGraph:
        return CoarseGraph(self.subgraph.graph, self.subgraph.costs)

    @cached_property
    def always_bytes(self) -> tuple[int, int]:
        """Of what is kept, the part that no decision moves: at the turn, and late in the forward pass."""
        model = PeakModel(self.coarse, None, prices=Prices(1.0, 0.0, self.subgraph.backward_start))
        kept, late = model.kept_bytes(self.subgraph.backward_start), model.kept_bytes(self.subgraph.late)
        return self.plain.kept_bytes - kept, self.plain.late_bytes - late

    def column(self, actions: dict[int, str], replays: Mapping[int, int] | None = None) -> Column:
        """Judge ``actions`` on the excerpt."""
        return self._column(judge(self.subgraph.graph, self.subgraph.costs, actions, replays))

    @property
    def split(self) -> bool:
        """Whether some column saves less late in the forward pass than at the turn."""
        plain = self.plain
        return any(plain.late_bytes - c.late_bytes != plain.kept_bytes - c.kept_bytes for c in self.columns)

    def _column(self, judged: Evaluated) -> Column:
        late, backward_start, line = self.subgraph.late, self.subgraph.backward_start, judged.timeline
        ms = line.recompute_ms - (self.mode_ms if line.recompute_ms else 0.0)
        live, peaks = line.live_bytes, line.event_peak_bytes
        highest = max(peaks[:backward_start]), max(peaks[backward_start:])
        return Column(judged.actions, ms, live[backward_start - 1], live[late - 1], highest, judged.replays)

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
        if self._leaned.get(self._key(column), 0.0) >= ms_per_byte / tuning.COLUMN_SEARCH_PRICE:
            return False
        self._leaned[self._key(column)] = ms_per_byte
        graph, costs = self.subgraph.graph, self.subgraph.costs
        start = Evaluated(
            column.actions, simulate_actions(graph, costs, column.actions, column.replays), column.replays
        )
        path = reduce_peak(
            graph,
            costs,
            start,
            most_ms_per_byte=tuning.COLUMN_SEARCH_PRICE * ms_per_byte,
            events=tuning.COLUMN_SEARCH_EVENTS,
        )
        return any([self.add(self._column(judged)) for judged in path[1:]])

    def price(self, worth: DualPrices, deadline: float) -> float:
        """Add the best column at these prices; return a lower bound of what any costs at them, in milliseconds."""
        prices = self._prices(worth, digits=6)
        if prices not in self._priced:
            self._priced[prices] = self._solve(prices, deadline)
        return self._priced[prices]

    def _prices(self, worth: DualPrices, *, digits: int) -> Prices:
        """Rounded, so that what hardly differs is solved once."""
        kept_ms, peak_ms, late_ms = (float(f"{ms:.{digits}g}") for ms in (worth.kept_ms, worth.peak_ms, worth.late_ms))
        forward_ms = None if worth.forward_ms is None else float(f"{worth.forward_ms:.{digits}g}")
        return Prices(kept_ms, peak_ms, self.subgraph.backward_start, late_ms, self.subgraph.late, forward_ms)

    def densify(self, peak_ms: float, late: bool, points: int, deadline: float) -> bool:
        """Add columns between the known ones: prices alone never name a point inside the hull; return whether it did.

        The fastest ways to keep no more than so much, at a price of the peak; ``late``: late in the forward pass.
        """
        key = float(f"{peak_ms:.3g}"), late
        if key in self._densified:
            return False
        self._densified.add(key)
        before = len(self.columns)
        at = self.subgraph.late if late else self.subgraph.backward_start
        always = self.always_bytes[late]
        kept = [c.late_bytes if late else c.kept_bytes for c in (self.plain, *self.columns)]
        for part in range(1, points + 1):
            most = min(kept) + (kept[0] - min(kept)) * part // (points + 1) - always
            self._solve(Prices(0.0, key[0], at, most_kept_bytes=most), deadline)
        return len(self.columns) > before

    def round(self, worth: DualPrices) -> None:
        """Add the column that the relaxation rounds to at these prices: quick, and not the best."""
        prices = self._prices(worth, digits=2)
        if prices in self._rounded:
            return
        self._rounded.add(prices)
        model = PeakModel(self.coarse, None, prices=prices)
        values = model.program.relax().values
        if len(values):
            self.add(self.column(complete_actions(self.subgraph.graph, *model.choice(values))))

    def _solve(self, prices: Prices, deadline: float) -> float:
        model = PeakModel(self.coarse, None, prices=prices)
        bound = 0.0
        for round_ in range(tuning.PRICING_CUT_ROUNDS):
            answer = model.program.minimise(
                gap=tuning.PRICING_GAP,
                slack=0.0,
                node_limit=tuning.PRICING_NODES,
                time_limit_s=left_s(deadline),
                light=True,
            )
            if round_ == 0:
                bound = max(answer.bound - model.objective_slack, 0.0) * model.ms_unit
            if not len(answer.values):
                break
            actions = complete_actions(self.subgraph.graph, *model.choice(answer.values))
            line = simulate_actions(self.subgraph.graph, self.subgraph.costs, actions)
            self.add(self._column(Evaluated(actions, line)))
            claimed = model.claimed_peak_bytes(answer.values)
            if prices.peak_ms == 0 or line.peak_bytes <= claimed:
                break
            event = line.peak_event
            during = [r.op for r in line.replays if r.event == event and r.peak_bytes == line.peak_bytes]
            model.forbid(answer.values, event, during[-1] if during else None, line.peak_bytes)
        # The model counts peaks from the resident bytes on, and kept bytes as far as there is a choice.
        bound += (prices.peak_ms + (prices.forward_ms or 0.0)) * self.subgraph.graph.resident_bytes
        return bound + prices.kept_ms * self.always_bytes[0] + prices.late_ms * self.always_bytes[1]
