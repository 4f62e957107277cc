"""The columns of the linear program behind ``bound.py``, whose docstring gives its symbols.

An op's *grid* is a rising list of stages, ``(t_0, ..., t_last)``; its slot i ends with stage t_i. There are two slots,
until the stage in which the plain step peaks and after it: that stage is where saved storages meet the transients of
the loss head or of the last layer, and more slots did not bring the bound nearer (``benchmarks/LOG.md``). Only tiny
graphs get one for each stage. Where two ops' slots do not match, "by stage t" becomes "by the end of the slot that has
t", which only loosens a row.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from lowtide.solvers import tuning
from lowtide.solvers.lower_bound.unavoidable import unavoidable, unavoidable_with_offload
from lowtide.solvers.milp.highs import INFINITY, LinearProgram
from lowtide.solvers.search_context import SearchContext

Terms = dict[int, float]  # a row's coefficients, by column


class Columns:
    """One program with its columns and no rows yet.

    Args:
        budget_bytes: The peak to stay within; None makes the peak itself what is minimised.
        capacities: Most bytes that plans may offload, by tier; None: any number.
        slots: Further stages that end a slot.

    Attributes:
        program: The objective is recompute time in ``ms_unit``, or the peak beyond what is resident in ``byte_unit``.
        grid: By useful op.
        A, N: By useful op, one column per slot.
        s: By storage that a plan decides over or a replay may read.
        K: By unstored storage of ``s``: the stages up to which it may be pinned, and the column for each.
        V: By storage and slot of its maker.
        o: By storage that may be offloaded and tier (``relaxation.py``).
        peak: None where time is minimised.
    """

    def __init__(
        self,
        context: SearchContext,
        budget_bytes: int | None,
        capacities: Mapping[str, int | None] | None = None,
        *,
        slots: Iterable[int] = (),
    ) -> None:
        self.context, self.graph, self.costs, self.budget_bytes = context, context.graph, context.costs, budget_bytes
        graph, costs = self.graph, self.costs
        self.unavoidable = unavoidable_with_offload(graph) if capacities else unavoidable(graph)
        self.program = LinearProgram()
        self.ms_unit = max(sum(costs.op_ms), 1e-9) / 1e3
        self.byte_unit = max(float(self.unavoidable.floor_bytes.max() - graph.start_bytes) / 1e3, 1.0)
        timed = budget_bytes is not None
        self.grid = self._grids(frozenset(slots))
        self.A, self.N = self._replay_columns(timed=timed)
        self.s = {x: self.program.column() for x in self._choices()}
        self.peak = None if timed else self.program.column(1.0, upper=INFINITY)
        noted_ms = (costs.record_us + costs.replay_us) / 1e3  # when it leaves, and when it comes back
        self.o = {
            x: {tier: self.program.column(noted_ms / self.ms_unit * timed) for tier in capacities or ()}
            for x in sorted(self.unavoidable.movable)
        }
        self.K = {x: self._pin_columns(x) for x in self.s if x not in graph.stored}
        self.V = {
            (x, i): self.program.column()
            for x in sorted(self.unavoidable.replayable & self.s.keys())
            for i in range(len(self.grid[self.maker(x)]) - 1)
        }

    def maker(self, storage: int) -> int:
        op = self.graph.storages[storage].op
        assert op is not None
        return op

    def slot_of(self, op: int, stage: int) -> int:
        """The slot of ``op`` that has ``stage``; the last one for later stages."""
        return min(bisect_left(self.grid[op], stage), len(self.grid[op]) - 1)

    def slot_begin(self, op: int, slot: int) -> int:
        """The first stage of ``slot``."""
        return self.grid[op][slot - 1] + 1 if slot else self.unavoidable.first_stage[op]

    def decided_reads(self, op: int) -> list[int]:
        """What ``op`` reads that a plan decides over."""
        return [x for x in dict.fromkeys(self.graph.ops[op].reads) if x in self.s]

    def replayed_by(self, storage: int, stage: int, factor: float) -> Terms:
        """``factor`` times "``storage`` has been brought back by ``stage``"; nothing where it cannot be."""
        if storage not in self.unavoidable.replayable or stage < self.unavoidable.first_stage[self.maker(storage)]:
            return {}
        op = self.maker(storage)
        return {self.A[op][self.slot_of(op, stage)]: factor}

    def offloaded(self, storage: int, factor: float) -> Terms:
        """``factor`` times "``storage`` is offloaded"."""
        return dict.fromkeys(self.o.get(storage, {}).values(), factor)

    def held_into(self, storage: int, slot: int, factor: float) -> Terms:
        """``factor`` times "``storage``, brought back earlier, is held into ``slot`` of its maker"."""
        return {self.V[storage, slot - 1]: factor} if slot else {}

    def _grids(self, more_slots: frozenset[int]) -> dict[int, tuple[int, ...]]:
        unavoidable = self.unavoidable
        stages: tuple[int, ...] = ()
        if len(unavoidable.useful) * len(unavoidable.stages) <= tuning.SLOT_PER_STAGE_SIZE:
            stages = tuple(range(len(unavoidable.stages)))
        elif unavoidable.stages:
            begin = unavoidable.stages[0]
            peak = unavoidable.stage_of(begin + int(unavoidable.plain_bytes[begin:].argmax()))
            stages = tuple(sorted({peak, *more_slots}))
        reach = {op: (unavoidable.first_stage[op], unavoidable.last_stage[op]) for op in unavoidable.useful}
        return {op: (*(t for t in stages if first <= t < last), last) for op, (first, last) in reach.items()}

    def _replay_columns(self, *, timed: bool) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        costs, column = self.costs, self.program.column
        A: dict[int, list[int]] = {}
        N: dict[int, list[int]] = {}
        for op, grid in self.grid.items():
            ms = (costs.op_ms[op] + costs.replay_us / 1e3) / self.ms_unit * timed
            earlier = [column() for _ in grid[:-1]]
            A[op] = [*earlier, column(costs.record_us / 1e3 / self.ms_unit * timed)]
            N[op] = [A[op][0], *(column(ms) for _ in grid[1:])]  # in the first slot they are one
            self.program.cost[A[op][0]] += ms
        return A, N

    def _choices(self) -> list[int]:
        unavoidable, storages = self.unavoidable, self.graph.storages
        read = (s for op in unavoidable.useful for s in self.graph.ops[op].reads if storages[s].op is not None)
        return sorted(unavoidable.droppable.union(read, unavoidable.movable) - unavoidable.always_kept)

    def _pin_columns(self, storage: int) -> list[tuple[int, int]]:
        ends = sorted({stage for op in self.unavoidable.read_by[storage] for stage in self.grid[op]})[:-1]
        return [(stage, self.program.column()) for stage in ends]
