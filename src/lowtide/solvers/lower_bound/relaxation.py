"""The linear program behind ``bound.py``, whose docstring gives rows and symbols. Every row holds for every plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.lower_bound.columns import Columns
from lowtide.solvers.lower_bound.memory_rows import MemoryRows


class Relaxation(Columns):
    """The columns of one graph, and all rows.

    Attributes:
        moments: The event of each memory row, by row.
    """

    def __init__(
        self,
        graph: StepGraph,
        costs: Costs,
        budget_bytes: int | None,
        capacities: Mapping[str, int | None] | None = None,
        *,
        slots: Iterable[int] = (),
    ) -> None:
        super().__init__(graph, costs, budget_bytes, capacities, slots=slots)
        self._lazy_row = partial(self.program.row, lazy=True)
        self._keep_or_replay()
        self._reads()
        self._same_burst()
        self._pinned()
        self._held()
        if budget_bytes is not None:
            self.offload.add_link_rows({column: self.program.cost[column] for op in self.N.values() for column in op})
        memory = MemoryRows(self)
        memory.add_moments()
        memory.add_replays()
        self.moments = memory.moments

    def _keep_or_replay(self) -> None:
        """What backward asks for is saved, offloaded, or replayed by the first time; what is saved is not replayed."""
        unavoidable, row, offloaded = self.unavoidable, self.program.row, self.offload.terms
        for x in sorted(unavoidable.droppable):
            first = unavoidable.ask_stages[x][0]
            row({self.s[x]: 1, **self.replayed_by(x, first, 1), **offloaded(x, 1)}, lower=1)
        for x in sorted(unavoidable.movable - unavoidable.droppable):
            row({self.s[x]: 1, **offloaded(x, 1)}, lower=1)
        for op in unavoidable.useful:
            outputs = [self.s[x] for x in self.graph.ops[op].makes if x in unavoidable.replayable and x in self.s]
            row({self.A[op][-1]: 1, **dict.fromkeys(outputs, 1.0)}, upper=len(outputs))
            for i, (before, after) in enumerate(pairwise(self.A[op])):
                row({before: 1, after: -1}, upper=0)
                row({self.N[op][i + 1]: 1, before: 1, after: -1}, lower=0)

    def _reads(self) -> None:
        """By the time an op is replayed, what it reads is saved, offloaded or replayed."""
        for op in self.unavoidable.useful:
            for x in self.decided_reads(op):
                for replayed, stage in zip(self.A[op], self.grid[op], strict=True):
                    there = {self.s[x]: -1, **self.replayed_by(x, stage, -1), **self.offload.terms(x, -1)}
                    self._lazy_row({replayed: 1, **there}, upper=0)

    def _same_burst(self) -> None:
        """An op is replayed only together with its post-dominator."""
        unavoidable = self.unavoidable
        last = len(unavoidable.stages)
        ops_at: dict[int, list[int]] = {last: list(unavoidable.useful)} if unavoidable.useful else {}
        for op in unavoidable.useful:
            for stage in self.grid[op][:-1]:
                ops_at.setdefault(stage, []).append(op)
        for stage, ops in ops_at.items():
            dominator = self._post_dominators(stage, min(ops))
            for op in ops:
                above = dominator[op]
                if above is not None:
                    here, there = self.slot_of(op, stage), self.slot_of(above, stage)
                    self._lazy_row({self.A[op][here]: 1, self.A[above][there]: -1}, upper=0)

    def _post_dominators(self, stage: int, first: int) -> dict[int, int | None]:
        """By op from ``first`` on: the next op on every path to what backward has asked for by ``stage``."""
        unavoidable = self.unavoidable
        found: dict[int, int | None] = {}
        for op in reversed(unavoidable.useful):
            if op < first:
                break
            if unavoidable.first_stage[op] > stage:
                continue
            outputs = [x for x in self.graph.ops[op].makes if x in unavoidable.replayable]
            if any(unavoidable.ask_stages[x][0] <= stage for x in outputs if x in unavoidable.droppable):
                found[op] = None
                continue
            readers = [
                r for x in outputs for r in unavoidable.read_by.get(x, ()) if unavoidable.first_stage[r] <= stage
            ]
            meet: int | None = readers[0]
            for other in readers[1:]:
                meet = _meet(found, meet, other)
            found[op] = meet
        return found

    def _pinned(self) -> None:
        """An unstored storage that is kept for a replay is pinned until then."""
        for x, pins in self.K.items():
            for (_, before), (_, after) in pairwise([(0, self.s[x]), *pins]):
                self._lazy_row({before: 1, after: -1}, lower=0)
            for stage, pinned in pins:
                for op in self.unavoidable.read_by[x]:
                    i = self.slot_of(op, stage)
                    if i < len(self.grid[op]) - 1:
                        back = {self.A[self.maker(x)][-1]: 1.0} if x in self.unavoidable.replayable else {}
                        self._lazy_row({pinned: 1, self.A[op][-1]: -1, self.A[op][i]: 1, **back}, lower=0)

    def _held(self) -> None:
        """What is brought back is there when it is asked for or read: replayed just then, or held since."""
        unavoidable = self.unavoidable
        for x in sorted(unavoidable.replayable & self.s.keys()):
            op = self.maker(x)
            for i in range(len(self.grid[op]) - 1):
                self._lazy_row({self.V[x, i]: 1, self.N[op][i]: -1, **self.held_into(x, i, -1)}, upper=0)
            for stage in unavoidable.ask_stages.get(x, ()):
                i = self.slot_of(op, stage)
                if i:  # the first slot is in the rows of ``_keep_or_replay``
                    there = {self.s[x]: 1.0, self.N[op][i]: 1.0, **self.held_into(x, i, 1), **self.offload.terms(x, 1)}
                    self._lazy_row(there, lower=1)
        for op in unavoidable.useful:
            for x in self.decided_reads(op):
                for i, stage in enumerate(self.grid[op]):
                    maker = self.maker(x) if x in unavoidable.replayable else None
                    low = self.slot_of(maker, self.slot_begin(op, i)) if maker is not None else 0
                    if not (i or low):
                        continue  # the rows of ``_reads`` say so
                    kept = dict(self.K[x])[self.grid[op][i - 1]] if i and x in self.K else self.s[x]
                    terms = {self.N[op][i]: 1.0, kept: -1.0, **self.offload.terms(x, -1)}
                    if maker is not None:
                        terms.update(self.held_into(x, low, -1))
                        terms.update(dict.fromkeys(self.N[maker][low : self.slot_of(maker, stage) + 1], -1.0))
                    self._lazy_row(terms, upper=0)


def _meet(dominator: Mapping[int, int | None], one: int | None, other: int | None) -> int | None:
    """The first op that post-dominates both; None where they meet only after the last."""
    while one != other:
        if one is None or other is None:
            return None
        if one < other:
            one = dominator[one]
        else:
            other = dominator[other]
    return one
