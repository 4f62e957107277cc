"""Equal segments in a row, run as one: a layer's input is then made again out of what the layers before it keep.

Keeping no layer's input but the first saves most of what full checkpointing keeps. It costs one more matmul a layer and
memory in backward: where backward comes to the last layer, all inputs are made again at once, and what that leaves of
each layer is held until backward comes there. The lower in the network, the more has been released by then, so
stretches can be the longer.

Columns come from pairs: what the first layer of a pair does is what every layer but the last can do. The planner prices
pairs as it does single segments (``kinds.py``), at what the bound says that a byte is worth; longer stretches are pairs
drawn out, judged by the simulator like all others.
"""

from __future__ import annotations

from itertools import groupby

from lowtide.plan import RECOMPUTE, SAVE
from lowtide.solvers import tuning
from lowtide.solvers.decomposition.master import Choice, ColumnGeneration, Stretch
from lowtide.solvers.decomposition.pricing import Column, ColumnPool, DualPrices
from lowtide.solvers.graph_queries import complete_actions


class MultiSegmentColumns:
    """The stretches of one pool."""

    def __init__(self, pool: ColumnGeneration) -> None:
        self.pool = pool
        self._series: list[range] = []  # of equal segments
        start = 0
        for _, equal in groupby(pool.kinds, key=id):
            stop = start + len(list(equal))
            if stop - start > 1:
                self._series.append(range(start, stop))
            start = stop
        self._stretches: dict[tuple[range, int], list[Stretch]] = {}  # by series and how many segments they have
        self._kinds: dict[tuple[ColumnPool, int], ColumnPool] = {}  # by the kind of their segments, and how many
        self._drawn: dict[ColumnPool, int] = {}  # how many columns of its pair a kind has looked at

    def choose(self, budget_bytes: int, ms_per_byte: float, deadline: float) -> Choice | None:
        """The fastest way through all segments, one by one or in stretches; None where none fits.

        Args:
            ms_per_byte: What a byte is worth at the budget.
        """
        if not self._series:
            return None
        for series in self._series:
            self._price(series, ms_per_byte, deadline)
        longest, most = min(tuning.FIRST_RUN_SEGMENTS, self._most), self._most
        while True:
            choice = self.pool.choose(budget_bytes, [*self.pool.stretches, *self._up_to(longest)], 0.0)
            if choice is None or choice.longest < longest or longest == most:
                return choice
            longest = min(2 * longest, most)

    @property
    def _most(self) -> int:
        return max(map(len, self._series), default=0)

    def _price(self, series: range, ms_per_byte: float, deadline: float) -> None:
        pair, worth = self._pair(series), self.pool.worths[series[len(series) // 2]]
        late = worth.late_ms / max(worth.kept_ms + worth.late_ms, 1e-12)
        peak_ms = tuning.PAIR_PEAK_SHARE * ms_per_byte
        for share in tuning.PAIR_PRICE_SHARES:
            kept_ms = share * ms_per_byte
            pair.price(DualPrices(kept_ms * (1 - late), kept_ms * late, peak_ms, None, 0.0), deadline)
        for column in list(pair.columns):
            pair.lean(column, 2 * peak_ms)

    def _pair(self, series: range) -> ColumnPool:
        return self._of_length(series, 2)[0].kind

    def _up_to(self, longest: int) -> list[Stretch]:
        found = []
        for series in self._series:
            for length in range(2, min(longest, len(series)) + 1):
                stretches = self._of_length(series, length)
                self._draw_out(self._pair(series), stretches[0].kind, length)
                found += stretches
        return found

    def _of_length(self, series: range, length: int) -> list[Stretch]:
        if (series, length) not in self._stretches:
            source, of = self.pool.source, self.pool.kinds[series.start]
            if (of, length) not in self._kinds:
                self._kinds[of, length] = ColumnPool(source.cut(series.start + (len(series) - length) // 2, length))
            kind = self._kinds[of, length]
            runs = [range(start, start + length) for start in range(series.start, series.stop - length + 1)]
            self._stretches[series, length] = [Stretch(run, kind, source.ballast_bytes(run)) for run in runs]
        return self._stretches[series, length]

    def _draw_out(self, pair: ColumnPool, kind: ColumnPool, length: int) -> None:
        """Add to ``kind`` the columns of ``pair``: all segments but the last do what the first one does."""
        if kind is not pair:
            for column in pair.columns[self._drawn.get(kind, 0) :]:
                kind.add(_drawn_out(column, kind, length))
            self._drawn[kind] = len(pair.columns)


def _drawn_out(column: Column, kind: ColumnPool, length: int) -> Column:
    graph, size = kind.subgraph.graph, kind.subgraph.own // length  # storages of one segment
    actions: dict[int, str] = {}
    replays: dict[int, int] = {}
    for place in range(size * length):
        segment, storage = divmod(place, size)
        source = storage + size * (segment == length - 1)
        if source in column.actions:
            actions[place] = column.actions[source]
        if source in column.replays:
            replays[place] = column.replays[source]
    recomputed = [s for s, action in actions.items() if action == RECOMPUTE and s in graph.stored]
    kept = [s for s, action in actions.items() if action == SAVE and s not in graph.stored]
    return kind.column(complete_actions(graph, recomputed, kept), replays)
