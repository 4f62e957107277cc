"""The linear program behind ``bound.py``, whose docstring gives its rows and symbols. Every row holds for every plan.

An op's *grid* is a rising list of stages, ``(t_0, ..., t_last)``; its slot i ends with stage t_i. There are two slots,
until the stage in which the plain step peaks and after it: that stage is where kept storages meet the transients of the
loss head or of the last layer, and more slots did not bring the bound nearer (``benchmarks/LOG.md``). Only tiny graphs
get one for each stage. Where two ops' slots do not match, "by stage t" becomes "by the end of the slot that has t",
which only loosens a row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.solvers import tuning
from lowtide.solvers.lower_bound.offload_columns import OffloadColumns, Terms
from lowtide.solvers.lower_bound.unavoidable import Span, Unavoidable
from lowtide.solvers.milp.highs import INFINITY, LinearProgram


class Relaxation:
    """Columns and rows for one graph.

    Args:
        budget_bytes: The peak to stay within; None makes the peak itself what is minimised.
        capacities: Most bytes that plans may move, by tier; None: any number. ``certain`` has to know of it too.
        slots: Further stages that end a slot.

    Attributes:
        program: The objective is recompute time in ``ms_unit``, or the peak beyond what is resident in ``byte_unit``.
        moments: The event of each memory row, by row.
    """

    def __init__(
        self,
        unavoidable: Unavoidable,
        costs: Costs,
        budget_bytes: int | None,
        capacities: Mapping[str, int | None] | None = None,
        *,
        slots: Iterable[int] = (),
    ) -> None:
        self.unavoidable, self.costs, self.budget_bytes, self._slots = (
            unavoidable,
            costs,
            budget_bytes,
            frozenset(slots),
        )
        self.graph, self.program = unavoidable.graph, LinearProgram()
        self._later = partial(self.program.row, lazy=True)
        self.ms_unit = max(sum(costs.op_ms), 1e-9) / 1e3
        self.byte_unit = max(float(unavoidable.floor_bytes.max() - self.graph.resident_bytes) / 1e3, 1.0)
        self.moments: dict[int, int] = {}
        self._grids()
        self._columns()
        self.away = OffloadColumns(
            self.program, self.graph, costs, capacities or {}, unavoidable.movable if capacities else (), self.ms_unit,
            timed=budget_bytes is not None,
        )  # fmt: skip
        self._keep_or_replay()
        self._reads()
        self._same_burst()
        self._pinned()
        self._held()
        if budget_bytes is not None:
            self.away.carried({column: self.program.cost[column] for mine in self.N.values() for column in mine})
        self._memory()
        self._replayed()

    # Columns

    def _grids(self) -> None:
        unavoidable = self.unavoidable
        stages: tuple[int, ...] = ()
        if len(unavoidable.useful) * len(unavoidable.stages) <= tuning.SLOT_PER_STAGE_SIZE:
            stages = tuple(range(len(unavoidable.stages)))
        elif unavoidable.stages:
            backward_start = unavoidable.stages[0]
            peak = unavoidable.stage_of(backward_start + int(unavoidable.plain_bytes[backward_start:].argmax()))
            stages = tuple(sorted({peak, *self._slots}))
        self.grid: dict[int, tuple[int, ...]] = {}
        for op in unavoidable.useful:
            since, until = unavoidable.since[op], unavoidable.until[op]
            self.grid[op] = (*(t for t in stages if since <= t < until), until)

    def _slot(self, op: int, stage: int) -> int:
        """The slot of ``op`` that has ``stage``; the last one for later stages."""
        return min(bisect_left(self.grid[op], stage), len(self.grid[op]) - 1)

    def _columns(self) -> None:
        unavoidable, costs, column = self.unavoidable, self.costs, self.program.column
        timed = self.budget_bytes is not None
        self.A: dict[int, list[int]] = {}
        self.N: dict[int, list[int]] = {}
        for op in unavoidable.useful:
            ms = (costs.op_ms[op] + costs.replay_us / 1e3) / self.ms_unit * timed
            slots = len(self.grid[op])
            steps = [column() for _ in range(slots - 1)]
            self.A[op] = [*steps, column(costs.record_us / 1e3 / self.ms_unit * timed)]
            self.N[op] = [self.A[op][0], *(column(ms) for _ in range(slots - 1))]  # in the first slot they are one
            self.program.cost[self.A[op][0]] += ms
        read = (
            s for op in unavoidable.useful for s in self.graph.ops[op].reads if self.graph.storages[s].op is not None
        )
        choices = sorted(unavoidable.droppable.union(read, unavoidable.movable) - unavoidable.always_kept)
        self.s = {x: column() for x in choices}
        self.peak = None if timed else column(1.0, upper=INFINITY)

    def _by(self, storage: int, stage: int, factor: float) -> Terms:
        """``storage`` has been brought back by ``stage``; nothing where it cannot be."""
        op = self.graph.storages[storage].op
        if storage not in self.unavoidable.returns or op is None or stage < self.unavoidable.since[op]:
            return {}
        return {self.A[op][self._slot(op, stage)]: factor}

    # Rows without bytes

    def _keep_or_replay(self) -> None:
        unavoidable, row = self.unavoidable, self.program.row
        for x in sorted(unavoidable.droppable):
            row({self.s[x]: 1, **self._by(x, unavoidable.asked[x][0], 1), **self.away.terms(x, 1)}, lower=1)
        for x in sorted(unavoidable.movable - unavoidable.droppable):
            row({self.s[x]: 1, **self.away.terms(x, 1)}, lower=1)
        for op in unavoidable.useful:
            outputs = [self.s[x] for x in self.graph.ops[op].makes if x in unavoidable.returns and x in self.s]
            row({self.A[op][-1]: 1, **dict.fromkeys(outputs, 1.0)}, upper=len(outputs))
            for i, (before, after) in enumerate(pairwise(self.A[op])):
                row({before: 1, after: -1}, upper=0)
                row({self.N[op][i + 1]: 1, before: 1, after: -1}, lower=0)

    def _sources(self, op: int) -> Iterable[int]:
        """What ``op`` reads that a plan decides over."""
        return (x for x in dict.fromkeys(self.graph.ops[op].reads) if x in self.s)

    def _reads(self) -> None:
        for op in self.unavoidable.useful:
            for x in self._sources(op):
                for step, stage in zip(self.A[op], self.grid[op], strict=True):
                    elsewhere = self.away.terms(x, -1)
                    self._later({step: 1, self.s[x]: -1, **self._by(x, stage, -1), **elsewhere}, upper=0)

    def _same_burst(self) -> None:
        """An op is replayed only together with its post-dominator."""
        unavoidable = self.unavoidable
        last = len(unavoidable.stages)
        wanted: dict[int, list[int]] = {last: list(unavoidable.useful)} if unavoidable.useful else {}
        for op in unavoidable.useful:
            for stage in self.grid[op][:-1]:
                wanted.setdefault(stage, []).append(op)
        for stage, ops in wanted.items():
            dominator = self._post_dominators(stage, min(ops))
            for op in ops:
                above = dominator[op]
                at = self._slot(op, stage)
                if above is not None:
                    self._later({self.A[op][at]: 1, self.A[above][self._slot(above, stage)]: -1}, upper=0)

    def _post_dominators(self, stage: int, first: int) -> dict[int, int | None]:
        """By op from ``first`` on: the next op on every path to what backward has asked for by ``stage``."""
        unavoidable = self.unavoidable
        found: dict[int, int | None] = {}
        for op in reversed(unavoidable.useful):
            if op < first:
                break
            if unavoidable.since[op] > stage:
                continue
            outputs = [x for x in self.graph.ops[op].makes if x in unavoidable.returns]
            if any(unavoidable.asked[x][0] <= stage for x in outputs if x in unavoidable.droppable):
                found[op] = None
                continue
            nexts = [r for x in outputs for r in unavoidable.read_by.get(x, ()) if unavoidable.since[r] <= stage]
            meet: int | None = nexts[0]
            for other in nexts[1:]:
                meet = _meet(found, meet, other)
            found[op] = meet
        return found

    def _held(self) -> None:
        """What is brought back is there when it is asked for or read: just then, or held since."""
        unavoidable = self.unavoidable
        self.V: dict[tuple[int, int], int] = {}  # storage, slot of its maker
        for x in sorted(unavoidable.returns & self.s.keys()):
            op = unavoidable.maker(x)
            for i in range(len(self.grid[op]) - 1):
                self.V[x, i] = held = self.program.column()
                self._later({held: 1, self.N[op][i]: -1, **self._since(x, i, -1)}, upper=0)
            for stage in unavoidable.asked.get(x, ()):
                i = self._slot(op, stage)
                if i:  # the first slot is in the rows above
                    there = {self.s[x]: 1.0, self.N[op][i]: 1.0, **self._since(x, i, 1), **self.away.terms(x, 1)}
                    self._later(there, lower=1)
        for op in unavoidable.useful:
            for x in self._sources(op):
                for i, stage in enumerate(self.grid[op]):
                    begin = self.grid[op][i - 1] + 1 if i else unavoidable.since[op]
                    maker = unavoidable.maker(x) if x in unavoidable.returns else None
                    low = self._slot(maker, begin) if maker is not None else 0
                    if not (i or low):
                        continue  # the rows above say so
                    kept = dict(self.K[x])[self.grid[op][i - 1]] if i and x in self.K else self.s[x]
                    terms = {self.N[op][i]: 1.0, kept: -1.0, **self.away.terms(x, -1)}
                    if maker is not None:
                        terms.update(self._since(x, low, -1))
                        terms.update(dict.fromkeys(self.N[maker][low : self._slot(maker, stage) + 1], -1.0))
                    self._later(terms, upper=0)

    def _since(self, storage: int, slot: int, factor: float) -> Terms:
        return {self.V[storage, slot - 1]: factor} if slot else {}

    def _pinned(self) -> None:
        """K: by storage, the column for each stretch of stages up to the one given."""
        unavoidable = self.unavoidable
        self.K: dict[int, list[tuple[int, int]]] = {}
        for x in self.s:
            if x in self.graph.stored:
                continue
            ends = sorted({stage for op in unavoidable.read_by[x] for stage in self.grid[op]})[:-1]
            self.K[x] = [(stage, self.program.column()) for stage in ends]
            for (_, before), (_, after) in pairwise([(0, self.s[x]), *self.K[x]]):
                self._later({before: 1, after: -1}, lower=0)
            for stage, pinned in self.K[x]:
                for op in unavoidable.read_by[x]:
                    i = self._slot(op, stage)
                    if i < len(self.grid[op]) - 1:
                        back = {self.A[unavoidable.maker(x)][-1]: 1.0} if x in unavoidable.returns else {}
                        self._later({pinned: 1, self.A[op][-1]: -1, self.A[op][i]: 1, **back}, lower=0)

    # Rows with bytes

    def _memory(self) -> None:
        charges = list(self._charges())
        end = len(self.graph.events)
        change = np.zeros(end + 1, dtype=np.int64)
        starts: dict[int, list[tuple[int, int]]] = {}
        for column, size, spans in charges:
            for start, stop in spans:
                change[start] += size
                change[stop] -= size
                starts.setdefault(start, []).append((column, size))
                starts.setdefault(stop, []).append((column, -size))
        most = self.unavoidable.floor_bytes + np.cumsum(change[:-1])
        chosen = self._moments(most, np.array(sorted({0, end, *starts})))
        live: dict[int, int] = {}
        done = iter(sorted(starts))
        due = next(done, end)
        for event in chosen:
            while due <= event:
                for column, size in starts[due]:
                    live[column] = live.get(column, 0) + size
                    if not live[column]:
                        del live[column]
                due = next(done, end + 1)
            self._memory_row(event, live)

    def _charges(self) -> Iterable[tuple[int, int, Iterable[Span]]]:
        """Column, bytes and when it costs them."""
        unavoidable, storages = self.unavoidable, self.graph.storages
        stages, ends = unavoidable.stages, unavoidable.ends
        for x, column in self.s.items():
            size, made = storages[x].bytes, unavoidable.ran[unavoidable.maker(x)]
            if x in unavoidable.kept_spans:
                yield column, size, unavoidable.kept_spans[x]
                continue
            begin = min(unavoidable.since[op] for op in unavoidable.read_by[x])
            yield column, size, unavoidable.extra_spans(x, [(made, stages[begin])])
            for stage, pinned in self.K[x]:
                yield pinned, size, unavoidable.extra_spans(x, [(stages[begin], ends[stage])])
                begin = stage + 1
        for (x, i), column in self.V.items():
            stage = self.grid[unavoidable.maker(x)][i]
            yield column, storages[x].bytes, unavoidable.extra_spans(x, [(unavoidable.settled[stage], ends[stage])])

    def _moments(self, most: np.ndarray, cuts: np.ndarray) -> list[int]:
        """The events that get a row: in forward all that can bind, in backward the highest of each of some parts."""
        floor = self.unavoidable.floor_bytes
        backward_start = self.unavoidable.stages[0] if self.unavoidable.stages else len(floor)
        peaks = [int(floor[a:b].argmax()) + a for a, b in pairwise(cuts.tolist())]
        chosen = []
        highest = -1
        for event in reversed([e for e in peaks if e < backward_start]):
            if floor[event] > highest:  # what is kept only adds up in forward
                highest = int(floor[event])
                chosen.append(event)
        backward = [e for e in peaks if e >= backward_start]
        parts = (
            len(backward)
            if len(self.graph.ops) <= tuning.ALL_MOMENTS_OPS
            else min(tuning.BACKWARD_MOMENTS, len(backward))
        )
        for part in np.array_split(np.array(backward, dtype=int), max(parts, 1)):
            if len(part):
                chosen.append(int(part[most[part].argmax()]))
        limit = self.budget_bytes if self.budget_bytes is not None else int(floor.max())
        return sorted(e for e in chosen if most[e] > limit)

    def _replayed(self) -> None:
        """While an op runs again there are what it reads, what it makes and its workspace, beside all that is kept."""
        unavoidable = self.unavoidable
        if not unavoidable.stages:
            return
        limit = self.budget_bytes if self.budget_bytes is not None else int(unavoidable.floor_bytes.max())
        rows = []
        for op in unavoidable.useful:
            for i, stage in enumerate(self.grid[op]):
                begin = self.grid[op][i - 1] + 1 if i else unavoidable.since[op]
                kept_bytes = self._kept_through(stage)
                if self._most_beside(op, begin, stage) + kept_bytes <= limit:
                    continue
                floor, own = self._least_beside(op, begin, stage)
                if floor + own + kept_bytes > limit:
                    rows.append((op, i, stage, floor, own))
        kept = self._kept_columns(sorted({stage for _, _, stage, _, _ in rows}, reverse=True))
        for op, i, stage, floor, own in rows:
            terms = {self.N[op][i]: own / self.byte_unit, kept[stage]: 1.0}
            for x in self._sources(op):
                if self._kept_until.get(x, -1) >= unavoidable.settled[stage]:  # counted with the op already
                    terms[self.s[x]] = -self.graph.storages[x].bytes / self.byte_unit
            if self.peak is not None:
                terms[self.peak] = -1.0
                upper = self.graph.resident_bytes - floor
            else:
                assert self.budget_bytes is not None
                upper = self.budget_bytes - floor
            self.moments[self._later(terms, upper=upper / self.byte_unit)] = unavoidable.settled[stage]

    def _most_beside(self, op: int, begin: int, end: int) -> int:
        """At least the sum of what ``_least_beside`` returns, and quickly told."""
        graph = self.graph
        own = sum(graph.storages[s].bytes for s in graph.ops[op].makes)
        own += sum(
            graph.storages[s].bytes for s in dict.fromkeys(graph.ops[op].reads) if graph.storages[s].op is not None
        )
        own += graph.ops[op].workspace_bytes + graph.ops[op].rng_bytes
        low, high = self._asks_in(begin, end)
        return own + int(self.unavoidable.idle_bytes[self.unavoidable.asks[low:high] - 1].min())

    def _asks_in(self, begin: int, end: int) -> tuple[int, int]:
        """Of the stages from ``begin`` to ``end``, places in ``certain.asks``."""
        unavoidable = self.unavoidable
        low, high = np.searchsorted(unavoidable.asks, (unavoidable.stages[begin], unavoidable.settled[end] + 1))
        return int(low), int(high)

    def _least_beside(self, op: int, begin: int, end: int) -> tuple[int, int]:
        """The least floor just before the bursts of some stages, and what a replay of ``op`` adds to that at least."""
        unavoidable, graph = self.unavoidable, self.graph
        low, high = self._asks_in(begin, end)
        before = unavoidable.asks[low:high] - 1
        floor = unavoidable.idle_bytes[before]
        beside = floor.copy()
        for x in dict.fromkeys(graph.ops[op].reads):
            if graph.storages[x].op is not None:
                beside += graph.storages[x].bytes * ~self._in_floor(x)[low:high]
        own = sum(graph.storages[s].bytes for s in graph.ops[op].makes)
        own += graph.ops[op].workspace_bytes + graph.ops[op].rng_bytes
        return int(floor.min()), own + int(beside.min()) - int(floor.min())

    def _in_floor(self, storage: int) -> np.ndarray:
        """Just before which of ``certain.asks`` the floor counts ``storage``, as a mask."""
        if storage not in self._floor_masks:
            self._floor_masks[storage] = self.unavoidable.in_floor(storage, self.unavoidable.asks - 1)
        return self._floor_masks[storage]

    @cached_property
    def _floor_masks(self) -> dict[int, np.ndarray]:
        return {}

    @cached_property
    def _kept_until(self) -> dict[int, int]:
        """Of storages that cost their bytes from before the first burst on, if they are kept: until which event."""
        first = int(self.unavoidable.asks[0]) - 1
        spans = ((x, begin, end) for x in self.s for begin, end in self.unavoidable.kept_spans.get(x, ()))
        return {x: end for x, begin, end in spans if begin <= first < end}

    def _kept_through(self, stage: int) -> int:
        """Bytes that can be kept through all bursts up to those of ``stage``."""
        ends, sums = self._kept_sums
        return int(sums[-1] - sums[np.searchsorted(ends, self.unavoidable.settled[stage])])

    @cached_property
    def _kept_sums(self) -> tuple[np.ndarray, np.ndarray]:
        by_end = sorted((end, self.graph.storages[x].bytes) for x, end in self._kept_until.items())
        return np.array([end for end, _ in by_end]), np.cumsum([0, *(size for _, size in by_end)])

    def _kept_columns(self, stages: list[int]) -> dict[int, int]:
        """For each of the falling ``stages`` a column with the bytes that are kept through it."""
        waiting = sorted(self._kept_until, key=lambda x: (self._kept_until[x], x))
        found: dict[int, int] = {}
        later: Terms = {}
        for stage in stages:
            terms = dict(later)
            while waiting and self._kept_until[waiting[-1]] >= self.unavoidable.settled[stage]:
                x = waiting.pop()
                terms[self.s[x]] = -self.graph.storages[x].bytes / self.byte_unit
            found[stage] = self.program.column(upper=INFINITY)
            self.program.row({found[stage]: 1.0, **terms}, lower=0.0)
            later = {found[stage]: -1.0}
        return found

    def _memory_row(self, event: int, live: Mapping[int, int]) -> None:
        terms = {column: size / self.byte_unit for column, size in live.items()}
        floor = int(self.unavoidable.floor_bytes[event]) - self.graph.resident_bytes
        if self.peak is not None:
            row = self.program.row({**terms, self.peak: -1.0}, upper=-floor / self.byte_unit)
        else:
            assert self.budget_bytes is not None
            left = self.budget_bytes - self.graph.resident_bytes - floor
            row = self.program.row(terms, upper=left / self.byte_unit)
        self.moments[row] = event


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
