"""The linear program behind ``bound.py``, whose docstring gives rows and symbols. Every row holds for every plan.

Where plans may offload, there are rows for the least that offloading costs:

    o_{x,l}   1: x is offloaded by way of link l
    S_f, S_b  how long the step waits for transfers before and after backward first asks for something

What is offloaded is there whenever it is asked for, and costs no bytes meanwhile. All stores are over when backward
first asks for anything, and no fetch begins before. What computation cannot hide of them is waited for, whatever the
schedule:

    S_f >= sum store_ms o - forward_ms                     for each link; from when the first such storage is made
    S_b >= sum fetch_ms o - backward_ms - replays          for each link, and for what is needed by a moment
    sum m o <= capacity                                    for each link

Known weaknesses: no memory is charged for bytes in flight, a transfer may run at any time within its half of the step,
and all replays may hide fetches, later ones too.
"""

from collections.abc import Iterable, Mapping
from functools import cache, cached_property, partial, reduce
from itertools import pairwise

import numpy as np

from lowtide.graph.facts import step_facts
from lowtide.solvers import tuning
from lowtide.solvers.lower_bound.columns import Columns, Terms
from lowtide.solvers.lower_bound.unavoidable import Span
from lowtide.solvers.milp.highs import INFINITY
from lowtide.solvers.search_context import SearchContext


class Relaxation(Columns):
    """The columns of one graph, and all rows.

    Attributes:
        moments: The event of each memory row, by row.
    """

    def __init__(
        self,
        context: SearchContext,
        budget_bytes: int | None,
        capacities: Mapping[str, int | None] | None = None,
        *,
        slots: Iterable[int] = (),
    ) -> None:
        super().__init__(context, budget_bytes, capacities, slots=slots)
        self._lazy_row = partial(self.program.row, lazy=True)
        # Just before which asks the floor counts a storage, as a mask.
        self._in_floor = cache(partial(self.unavoidable.in_floor, events=self.unavoidable.ask_events - 1))
        self._keep_or_replay()
        self._reads()
        self._same_burst()
        self._pinned()
        self._held()
        if self.o and budget_bytes is not None:
            self._waits_for_links(capacities or {})
        # Rows that hold at this peak whatever a plan decides are left out.
        self.limit_bytes = int(self.unavoidable.floor_bytes.max()) if budget_bytes is None else budget_bytes
        self.moments: dict[int, int] = {}
        self._memory_at_moments()
        self._memory_of_replays()

    def _keep_or_replay(self) -> None:
        """What backward asks for is saved, offloaded, or replayed by the first time; what is saved is not replayed."""
        unavoidable, row, offloaded = self.unavoidable, self.program.row, self.offloaded
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
                    there = {self.s[x]: -1, **self.replayed_by(x, stage, -1), **self.offloaded(x, -1)}
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
            readers: list[int | None] = [r for x in outputs for r in unavoidable.read_by.get(x, ()) if r in found]
            found[op] = reduce(partial(_meet, found), readers)
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
                    there = {self.s[x]: 1.0, self.N[op][i]: 1.0, **self.held_into(x, i, 1), **self.offloaded(x, 1)}
                    self._lazy_row(there, lower=1)
        for op in unavoidable.useful:
            for x in self.decided_reads(op):
                for i, stage in enumerate(self.grid[op]):
                    maker = self.maker(x) if x in unavoidable.replayable else None
                    low = self.slot_of(maker, self.slot_begin(op, i)) if maker is not None else 0
                    if not (i or low):
                        continue  # the rows of ``_reads`` say so
                    kept = dict(self.K[x])[self.grid[op][i - 1]] if i and x in self.K else self.s[x]
                    terms = {self.N[op][i]: 1.0, kept: -1.0, **self.offloaded(x, -1)}
                    if maker is not None:
                        terms.update(self.held_into(x, low, -1))
                        terms.update(dict.fromkeys(self.N[maker][low : self.slot_of(maker, stage) + 1], -1.0))
                    self._lazy_row(terms, upper=0)

    def _waits_for_links(self, capacities: Mapping[str, int | None]) -> None:
        """What computation cannot hide of transfers is waited for, and no tier holds more than it may."""
        graph, costs, program, facts = self.graph, self.costs, self.program, step_facts(self.graph)
        at_ms = self.context.event_times()
        first_ask_ms = at_ms[facts.unpack_events[0]]
        wait_forward, wait_backward = program.column(1.0, upper=INFINITY), program.column(1.0, upper=INFINITY)
        replays = {column: program.cost[column] for columns in self.N.values() for column in columns}
        sizes = {x: graph.storages[x].bytes for x in self.o}
        by_need = sorted(self.o, key=lambda x: facts.first_use[x])
        parts = tuning.FETCH_MOMENTS
        for tier, capacity in capacities.items():
            link = costs.links[tier]
            columns = {x: of_tier[tier] for x, of_tier in self.o.items()}
            if capacity is not None:
                most = max(capacity, 1)
                program.row({columns[x]: size / most for x, size in sizes.items()}, upper=capacity / most)
            stores = {columns[x]: -link.store_ms(sizes[x]) / self.ms_unit for x in columns}
            record_ms = costs.record_us / 1e3 * (len(graph.forward_ops) + len(columns))
            # An op's outputs are complete when the next event begins; an op that finishes them comes later still.
            hidden_ms = first_ask_ms - min(at_ms[facts.birth[x] + 1] for x in columns) + record_ms
            program.row({wait_forward: 1.0, **stores}, lower=-hidden_ms / self.ms_unit)
            for number in {len(by_need) * (i + 1) // parts for i in range(parts)} - {0}:
                needed = by_need[:number]
                fetches = {columns[x]: -link.fetch_ms(sizes[x]) / self.ms_unit for x in needed}
                # To the last of them; a fetch that has come is noted, which takes a moment too.
                last_ms = at_ms[facts.first_use[needed[-1]]] - first_ask_ms + costs.replay_us / 1e3 * len(graph.saved)
                program.row({wait_backward: 1.0, **replays, **fetches}, lower=-last_ms / self.ms_unit)

    def _memory_at_moments(self) -> None:
        """At each moment that may bind, the floor and what is saved, pinned or held stay within the budget."""
        end = len(self.graph.events)
        change = np.zeros(end + 1, dtype=np.int64)
        changes: dict[int, list[tuple[int, int]]] = {}
        for column, size, spans in self._charges():
            for start, stop in spans:
                change[start] += size
                change[stop] -= size
                changes.setdefault(start, []).append((column, size))
                changes.setdefault(stop, []).append((column, -size))
        most = self.unavoidable.floor_bytes + np.cumsum(change[:-1])
        live: dict[int, int] = {}
        upcoming = iter(sorted(changes))
        due = next(upcoming, end)
        for event in self._binding_events(most, np.array(sorted({0, end, *changes}))):
            while due <= event:
                for column, size in changes[due]:
                    live[column] = live.get(column, 0) + size
                    if not live[column]:
                        del live[column]
                due = next(upcoming, end + 1)
            terms = {column: size / self.byte_unit for column, size in live.items()}
            self._memory_row(terms, int(self.unavoidable.floor_bytes[event]), event)

    def _memory_of_replays(self) -> None:
        """While an op runs again there are what it reads, what it makes and its workspace, beside all that is saved."""
        unavoidable, byte_unit = self.unavoidable, self.byte_unit
        if not unavoidable.stages:
            return
        rows = []
        for op in unavoidable.useful:
            for i, stage in enumerate(self.grid[op]):
                floor, own = self._least_beside(op, self.slot_begin(op, i), stage)
                if floor + own + self._saved_through(stage) > self.limit_bytes:
                    rows.append((op, i, stage, floor, own))
        saved = self._saved_columns(sorted({stage for _, _, stage, _, _ in rows}, reverse=True))
        for op, i, stage, floor, own in rows:
            terms = {self.N[op][i]: own / byte_unit, saved[stage]: 1.0}
            for x in self.decided_reads(op):
                if self._saved_until.get(x, -1) >= unavoidable.last_asks[stage]:  # counted with the op already
                    terms[self.s[x]] = -self.graph.storages[x].bytes / byte_unit
            self._memory_row(terms, floor, unavoidable.last_asks[stage], lazy=True)

    def _memory_row(self, terms: Terms, floor_bytes: int, event: int, *, lazy: bool = False) -> None:
        if self.peak is not None:
            terms[self.peak] = -1.0
        most_bytes = self.graph.start_bytes if self.budget_bytes is None else self.budget_bytes
        row = self.program.row(terms, upper=(most_bytes - floor_bytes) / self.byte_unit, lazy=lazy)
        self.moments[row] = event

    def _charges(self) -> Iterable[tuple[int, int, Iterable[Span]]]:
        """Column, bytes and when it costs them."""
        unavoidable, storages, birth = self.unavoidable, self.graph.storages, step_facts(self.graph).birth
        stages, ends = unavoidable.stages, unavoidable.stage_ends
        for x, column in self.s.items():
            size = storages[x].bytes
            if x in unavoidable.kept_spans:
                yield column, size, unavoidable.kept_spans[x]
                continue
            begin = min(unavoidable.first_stage[op] for op in unavoidable.read_by[x])
            yield column, size, unavoidable.extra_spans(x, [(birth[x], stages[begin])])
            for stage, pinned in self.K[x]:
                yield pinned, size, unavoidable.extra_spans(x, [(stages[begin], ends[stage])])
                begin = stage + 1
        for (x, i), column in self.V.items():
            stage = self.grid[self.maker(x)][i]
            yield column, storages[x].bytes, unavoidable.extra_spans(x, [(unavoidable.last_asks[stage], ends[stage])])

    def _binding_events(self, most: np.ndarray, cuts: np.ndarray) -> list[int]:
        """The events that get a row: in forward all that can bind, in backward the highest of each of some parts."""
        floor = self.unavoidable.floor_bytes
        first_stage = self.unavoidable.stages[0] if self.unavoidable.stages else len(floor)
        peaks = [int(floor[a:b].argmax()) + a for a, b in pairwise(cuts.tolist())]
        chosen = []
        highest = -1
        for event in reversed([e for e in peaks if e < first_stage]):
            if floor[event] > highest:  # what is saved only adds up in forward
                highest = int(floor[event])
                chosen.append(event)
        backward = [e for e in peaks if e >= first_stage]
        parts = len(backward)
        if len(self.graph.ops) > tuning.ALL_MOMENTS_OPS:
            parts = min(tuning.BACKWARD_MOMENTS, parts)
        for part in np.array_split(np.array(backward, dtype=int), max(parts, 1)):
            if len(part):
                chosen.append(int(part[most[part].argmax()]))
        return sorted(e for e in chosen if most[e] > self.limit_bytes)

    def _least_beside(self, op: int, begin: int, end: int) -> tuple[int, int]:
        """The least floor just before the bursts of some stages, and what a replay of ``op`` adds to that at least."""
        unavoidable, node, storages = self.unavoidable, self.graph.ops[op], self.graph.storages
        events = (unavoidable.stages[begin], unavoidable.last_asks[end] + 1)
        asks = slice(*np.searchsorted(unavoidable.ask_events, events))
        floor = unavoidable.idle_bytes[unavoidable.ask_events[asks] - 1]
        beside = floor.copy()
        for x in dict.fromkeys(node.reads):
            if storages[x].op is not None:  # made in the step
                beside += storages[x].bytes * ~self._in_floor(x)[asks]
        own_bytes = sum(storages[s].bytes for s in node.makes) + node.workspace_bytes + node.rng_bytes
        return int(floor.min()), own_bytes + int(beside.min()) - int(floor.min())

    @cached_property
    def _saved_until(self) -> dict[int, int]:
        """Of storages that, if saved, cost their bytes from before the first burst on: until which event."""
        first = int(self.unavoidable.ask_events[0]) - 1
        spans = ((x, begin, end) for x in self.s for begin, end in self.unavoidable.kept_spans.get(x, ()))
        return {x: end for x, begin, end in spans if begin <= first < end}

    def _saved_through(self, stage: int) -> int:
        """Bytes that can be saved through all bursts up to those of ``stage``."""
        ends, sums = self._saved_sums
        return int(sums[-1] - sums[np.searchsorted(ends, self.unavoidable.last_asks[stage])])

    @cached_property
    def _saved_sums(self) -> tuple[np.ndarray, np.ndarray]:
        by_end = sorted((end, self.graph.storages[x].bytes) for x, end in self._saved_until.items())
        return np.array([end for end, _ in by_end]), np.cumsum([0, *(size for _, size in by_end)])

    def _saved_columns(self, stages: list[int]) -> Mapping[int, int]:
        """For each of the falling ``stages`` a column with the bytes that are saved through it."""
        waiting = sorted(self._saved_until, key=lambda x: (self._saved_until[x], x))
        found: dict[int, int] = {}
        later: Terms = {}
        for stage in stages:
            terms = dict(later)
            while waiting and self._saved_until[waiting[-1]] >= self.unavoidable.last_asks[stage]:
                x = waiting.pop()
                terms[self.s[x]] = -self.graph.storages[x].bytes / self.byte_unit
            found[stage] = self.program.column(upper=INFINITY)
            self.program.row({found[stage]: 1.0, **terms}, lower=0.0)
            later = {found[stage]: -1.0}
        return found


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
