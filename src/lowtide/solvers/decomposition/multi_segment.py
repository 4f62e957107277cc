"""Columns for several equal segments in a row, whose inputs are recomputed from what the segments before them keep.

Keeping no layer's input but the first saves most of what full checkpointing keeps. It costs one more matmul a layer and
memory in backward: where backward comes to the last layer, all inputs are recomputed at once, and what that leaves of
each layer is held until backward comes there. The earlier the layers, the more backward has released by then, so runs
of early segments can be longer.

Columns come from pairs: what the first layer of a pair does is what every layer but the last can do. Pairs are priced
as single segments are (``pricing.py``), at the bound's price of a byte; longer runs repeat the pair's first layer and
are evaluated by the simulator like all others.
"""

from collections.abc import Sequence
from itertools import groupby

from lowtide.solvers import tuning
from lowtide.solvers.decomposition.pricing import Column, ColumnPool, DualPrices, SegmentRun
from lowtide.solvers.decomposition.subgraph import SubgraphSource
from lowtide.solvers.decomposition.subgraph_builder import build_subgraph
from lowtide.solvers.graph_queries import choices, complete_actions


class MultiSegmentColumns:
    """Runs of two and more equal segments of one step.

    Args:
        runs: The segments one by one.

    Attributes:
        longest: Segments of the longest possible run; 0 where no equal segments are neighbours.
    """

    def __init__(self, source: SubgraphSource, runs: Sequence[SegmentRun]) -> None:
        self.source = source
        self._series: list[tuple[range, ColumnPool]] = []  # neighbours that are equal, and their pool
        start = 0
        for _, equal in groupby(runs, key=lambda run: id(run.pool)):
            stop = start + len(list(equal))
            if stop - start > 1:
                self._series.append((range(start, stop), runs[start].pool))
            start = stop
        self.longest = max((len(series) for series, _ in self._series), default=0)
        self._runs: dict[tuple[range, int], list[SegmentRun]] = {}  # by series and number of segments
        self._pools: dict[tuple[ColumnPool, int], ColumnPool] = {}  # by pool of one segment and number of segments
        self._num_extended: dict[ColumnPool, int] = {}  # columns of its pair that a pool has been offered

    def price_pairs(self, ms_per_byte: float, dual_prices: Sequence[DualPrices], deadline: float) -> None:
        """Add columns for pairs of segments.

        Args:
            ms_per_byte: Step time that one byte of budget saves.
            dual_prices: By segment: they say how much of that is due at forward's end.
        """
        for series, single in self._series:
            pair, duals = self._pair(series, single), dual_prices[series[len(series) // 2]]
            forward_share = duals.forward_end_ms / max(duals.kept_ms + duals.forward_end_ms, 1e-12)
            peak_ms = tuning.PAIR_PEAK_SHARE * ms_per_byte
            for share in tuning.PAIR_PRICE_SHARES:
                kept_ms = share * ms_per_byte
                prices = DualPrices(kept_ms * (1 - forward_share), kept_ms * forward_share, peak_ms, None, 0.0)
                small = pair.coarse.size <= tuning.PAIR_EXACT_SIZE
                if not small:
                    pair.add_rounded(prices, tuning.DENSIFY_THRESHOLDS)
                if small or share in tuning.PAIR_EXACT_SHARES:
                    pair.price(prices, deadline)
            for column in list(pair.columns):
                pair.add_lower_peaks(column, 2 * peak_ms)

    def up_to(self, longest: int) -> list[SegmentRun]:
        """All runs of 2 to ``longest`` segments, with the columns that the pairs' columns give them."""
        found = []
        for series, single in self._series:
            for length in range(2, min(longest, len(series)) + 1):
                runs = self._of_length(series, single, length)
                pair, pool = self._pair(series, single), runs[0].pool
                if pool is not pair:
                    for column in pair.columns[self._num_extended.get(pool, 0) :]:
                        pool.add(_extended(column, pool, length))
                    self._num_extended[pool] = len(pair.columns)
                found += runs
        return found

    def _pair(self, series: range, single: ColumnPool) -> ColumnPool:
        return self._of_length(series, single, 2)[0].pool

    def _of_length(self, series: range, single: ColumnPool, length: int) -> list[SegmentRun]:
        if (series, length) not in self._runs:
            if (single, length) not in self._pools:
                middle = series.start + (len(series) - length) // 2
                self._pools[single, length] = ColumnPool(build_subgraph(self.source, range(middle, middle + length)))
            pool = self._pools[single, length]
            places = [range(start, start + length) for start in range(series.start, series.stop - length + 1)]
            self._runs[series, length] = [SegmentRun(p, pool, self.source.outside_bytes(p)) for p in places]
        return self._runs[series, length]


def _extended(column: Column, pool: ColumnPool, length: int) -> Column:
    graph, size = pool.context.graph, pool.subgraph.num_own // length  # storages of one segment
    # All segments but the last do what the first of the pair does.
    sources = {place: place % size + size * (place // size == length - 1) for place in range(size * length)}
    actions = {place: column.actions[s] for place, s in sources.items() if s in column.actions}
    replays = {place: column.replays[s] for place, s in sources.items() if s in column.replays}
    return pool.column(complete_actions(graph, *choices(graph, actions)), replays)
