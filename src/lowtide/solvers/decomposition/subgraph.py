"""One segment of a step as a step graph of its own, so that everything that plans a step can plan a segment.

The excerpt has the segment's forward ops, the backward ops of its window, and the events of both. What other segments
hold meanwhile is there as ballast: storages that a pretended op makes where a window begins and that die when the real
ones do. So, as long as every other segment saves everything, memory inside the windows is the whole step's, to the
byte (``tests/test_master.py``), and how a segment's actions change it can be added up over segments. Several segments
in a row can be cut out as one.

What ties a segment to others is fixed: a storage that another segment's backward asks for, or that outlives its own
segment's backward, is saved. An activation made elsewhere that autograd does not store may be kept for replays, which
is then paid for here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import FREE, RUN, Frame, Op, StepGraph, Storage
from lowtide.solvers.decomposition.segments import Windows

_NEVER = 1 << 60
_BALLAST = "ballast"
_IMPORTED = "made by another segment"


class Content(NamedTuple):
    """A segment in plain numbers: equal for segments that are the same but for ballast; those have the same plans.

    Attributes:
        storages: Bytes (0 for the rest of the ballast), kind, and why it is fixed.
        ops: As in ``Op``: name, backward, reads, makes, workspace bytes, generator bytes, finishes.
        op_ms, saved, events: As in a step graph and its costs.
        late: Event of the end of the forward pass at which there still is what Python holds longer than for a segment,
            autocast's copies of weights for one.
        turn: Event at which the other segments' forward and backward would run.
        backward: Event at which the segment's own backward begins.
    """

    storages: tuple[tuple[int, str, str], ...]
    ops: tuple[tuple, ...]
    op_ms: tuple[float, ...]
    saved: tuple[int, ...]
    events: tuple[tuple[int, int], ...]
    late: int
    backward_start: int
    backward: int


@dataclass(frozen=True)
class Subgraph:
    """A segment.

    Attributes:
        content: The excerpt; its first storages are the segment's own.
        storages: Id in the whole graph of each of the segment's storages, by id in the excerpt; imports included.
        own: How many of them, the first ones, the segment makes.
        ballast_bytes: What is left of others all through the forward window, and all through the backward window.
    """

    content: Content
    storages: tuple[int, ...]
    own: int
    ballast_bytes: tuple[int, int]
    whole: StepGraph
    whole_costs: Costs

    @property
    def late(self) -> int:
        return self.content.late

    @property
    def backward_start(self) -> int:
        return self.content.backward_start

    @property
    def backward(self) -> int:
        return self.content.backward

    @cached_property
    def graph(self) -> StepGraph:
        """The excerpt as a step graph."""
        ops = [
            Op(
                i,
                name,
                0,
                backward,
                reads,
                makes,
                workspace_bytes=workspace,
                rng_bytes=rng,
                completes_inplace=completes_inplace,
            )
            for i, (name, backward, reads, makes, workspace, rng, completes_inplace) in enumerate(self.content.ops)
        ]
        made: dict[int, tuple[int | None, int]] = {s: (o.id, output) for o in ops for output, s in enumerate(o.makes)}
        rests = dict(zip((o.makes[-1] for o in ops if o.name == _BALLAST), self.ballast_bytes, strict=True))
        storages = []
        for i, (size, kind, fixed) in enumerate(self.content.storages):
            op, output = made.get(i, (None, 0))
            storages.append(Storage(i, rests.get(i, size), kind, op, output, fixed))
        return StepGraph(
            device=self.whole.device, device_name=self.whole.device_name, resident=self.whole.resident, signatures=(),
            frames=(Frame(-1, "", 0),), storages=tuple(storages), ops=tuple(ops), saved=self.content.saved,
            events=self.content.events,
        )  # fmt: skip

    @cached_property
    def costs(self) -> Costs:
        return replace(self.whole_costs, op_ms=self.content.op_ms)


class Subgraphs:
    """Cuts segments out of one step."""

    def __init__(self, graph: StepGraph, costs: Costs, segment_of: dict[int, int], windows: list[Windows]) -> None:
        self.graph, self.costs = graph, costs
        self.segment_of, self.windows = segment_of, windows
        self.ops_of: list[list[int]] = [[] for _ in windows]
        for op, segment in segment_of.items():
            self.ops_of[segment].append(op)
        self.facts = facts = step_facts(graph)
        self.born, self.events_of = facts.birth, facts.references
        self.dies = {s: facts.references[s][-1] if s in facts.death else _NEVER for s in facts.birth}

    def window(self, run: range) -> Windows:
        """Of the segments of ``run`` as one."""
        first, last = self.windows[run.start], self.windows[run.stop - 1]
        return Windows((first.forward[0], last.forward[1]), (last.backward[0], first.backward[1]))

    def storages_of(self, run: range) -> tuple[list[int], list[int]]:
        """What ops of ``run`` make; what they read that others make, autograd does not store, and a replay would keep.

        Both in the order in which an excerpt has them.
        """
        own = [s for segment in run for op in self.ops_of[segment] for s in self.graph.ops[op].makes]
        read = (s for segment in run for s in self._imports[segment])
        return own, list(dict.fromkeys(s for s in read if self._maker_segment(s) not in run))

    @cached_property
    def _imports(self) -> list[list[int]]:
        """By segment."""
        graph, found = self.graph, []
        for segment, ops in enumerate(self.ops_of):
            read = dict.fromkeys(s for op in ops for s in graph.ops[op].reads)
            found.append(
                [
                    s
                    for s in read
                    if self._maker_segment(s) not in (None, segment)
                    and graph.storages[s].kind == "activation"
                    and s not in graph.stored
                ]
            )
        return found

    def _maker_segment(self, storage: int) -> int | None:
        op = self.graph.storages[storage].op
        return None if op is None else self.segment_of.get(op, -1)

    def tied(self, storage: int, run: range) -> str:
        """Why ``storage`` has to be saved for the sake of segments beside ``run``; "" if it has not."""
        window = self.window(run)
        if any(self.segment_of.get(op) not in run for op in self.facts.readers.get(storage, ())):
            return "read by another segment" if storage in self.graph.stored else ""
        asked = self.facts.first_use.get(storage, window.backward[0])
        if not window.backward[0] <= asked < window.backward[1]:
            return "asked for by another segment"
        # Python may hold it a little into later segments' forward: seldom a moment that binds, and the judge sees it.
        if any(at >= window.backward[1] for at in self.events_of.get(storage, ())):
            return "outlives its segment"
        return ""

    def ballast_bytes(self, run: range) -> tuple[int, int]:
        """What others hold all through the forward window of ``run``, and all through its backward window."""
        own, imports = self.storages_of(run)
        window = self.window(run)
        return self.staying_bytes(window.forward, own, imports), self.staying_bytes(window.backward, own, imports)

    def staying_bytes(self, window: tuple[int, int], own: Iterable[int], imports: Iterable[int]) -> int:
        """What lives all through ``window`` and is neither ``own`` nor among ``imports``."""
        storages = self.graph.storages
        mine = [s for s in (*own, *imports) if self.born[s] < window[0] <= self.dies[s]]
        return self.alive_bytes[window[0]] - sum(storages[s].bytes for s in {*self.passing(window), *mine})

    @cached_property
    def backward_start(self) -> int:
        return self.windows[-1].forward[1]

    @cached_property
    def late(self) -> int:
        """In the last segment's forward window: where Python lets go of what is older than the segment before."""
        begin, end = self.windows[-1].forward
        older = {s for ops in self.ops_of[:-2] for op in ops for s in self.graph.ops[op].makes}
        events = self.graph.events[begin:end]
        return begin + next((i for i, (kind, s) in enumerate(events) if kind == FREE and s in older), len(events))

    @cached_property
    def _starts(self) -> list[int]:
        """Where each window begins: together they have all events."""
        return sorted({w.forward[0] for w in self.windows} | {w.backward[0] for w in self.windows})

    @cached_property
    def alive_bytes(self) -> dict[int, int]:
        """Made in the step and alive where each window begins, by that event."""
        change = np.zeros(len(self.graph.events) + 1, dtype=np.int64)
        for storage, at in self.born.items():
            change[at + 1] += self.graph.storages[storage].bytes
            if self.dies[storage] < _NEVER:
                change[self.dies[storage] + 1] -= self.graph.storages[storage].bytes
        live = np.cumsum(change)
        return {start: int(live[start]) for start in self._starts}

    @cached_property
    def _passing(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {start: [] for start in self._starts}
        for storage in sorted(self.born, key=self.born.__getitem__):
            if self.dies[storage] < _NEVER:
                start = self._starts[bisect_right(self._starts, self.dies[storage]) - 1]
                if self.born[storage] < start:
                    found[start].append(storage)
        return found

    def passing(self, window: tuple[int, int]) -> list[int]:
        """Storages that are alive where ``window`` begins and not where it ends, by birth."""
        begins = self._starts[bisect_left(self._starts, window[0]) : bisect_left(self._starts, window[1])]
        found = [s for begin in begins for s in self._passing[begin] if self.born[s] < window[0]]
        return sorted(found, key=self.born.__getitem__) if len(begins) > 1 else found

    def cut(self, first: int, count: int = 1) -> Subgraph:
        """The excerpt of ``count`` segments as one."""
        return _Cut(self, range(first, first + count)).subgraph()


class _Cut:
    """Builds one excerpt."""

    def __init__(self, source: Subgraphs, run: range) -> None:
        self.source, self.run = source, run
        self.graph, self.window = source.graph, source.window(run)
        self.storages: list[tuple[int, str, str]] = []
        self.names: dict[int, int] = {}  # storage in the whole graph -> in the excerpt
        self.ops: list[tuple] = []
        self.op_ms: list[float] = []
        self.events: list[tuple[int, int]] = []
        self.saved: list[int] = []
        self.saved_names: dict[int, int] = {}
        self.op_names: dict[int, int] = {}
        self.proxies: dict[str, int] = {}  # one storage for all that may be read and costs nothing, one for the rest
        self.whole_ids: list[int] = []  # of the first storages: the segment's own, then imports

    def subgraph(self) -> Subgraph:
        graph, source = self.graph, self.source
        ops = [op for segment in self.run for op in source.ops_of[segment]]
        own, imports = source.storages_of(self.run)
        brought = set(imports)
        for s in (*own, *imports):
            storage = graph.storages[s]
            fixed = storage.fixed or (_IMPORTED if s in brought else source.tied(s, self.run))
            self._add(s, storage.bytes, storage.kind, fixed)
            self.whole_ids.append(s)
        forward_bytes = self._ballast(self.window.forward, own, imports)
        self._play(self.window.forward, ops)
        self._end_ballast(self.window.forward, skip={*own, *imports})
        late = max(source.late, self.window.forward[1])
        self._play((self.window.forward[1], late), ())
        self._late = len(self.events)
        self._play((late, source.backward_start), ())
        backward_start = len(self.events)
        self._play((source.backward_start, self.window.backward[0]), ())
        backward = len(self.events)
        backward_bytes = self._ballast(self.window.backward, [*own, *imports], [])
        self._play(self.window.backward, self._backward_ops())
        self._end_ballast(self.window.backward, skip={*own, *imports})
        self._play((self.window.backward[1], len(graph.events)), ())
        return self._finish(backward_start, backward, len(own), (forward_bytes, backward_bytes))

    def _backward_ops(self) -> list[int]:
        return [
            number
            for kind, number in self.graph.events[slice(*self.window.backward)]
            if kind == RUN and self.graph.ops[number].backward
        ]

    def _add(self, whole: int | None, size: int, kind: str, fixed: str = "") -> int:
        number = len(self.storages)
        self.storages.append((size, kind, fixed))
        if whole is not None:
            self.names[whole] = number
        return number

    def _ballast(self, window: tuple[int, int], own: list[int], imports: list[int]) -> int:
        """A pretended op that makes what others hold where ``window`` begins; return the bytes that stay throughout."""
        source, storages = self.source, self.graph.storages
        mine = {*own, *imports}
        makes = []
        others = [s for s in source.passing(window) if s not in mine and storages[s].bytes]
        alive = [s for s in imports if source.born[s] < window[0] <= source.dies[s]]
        for s in sorted([*others, *alive], key=source.born.__getitem__):
            makes.append(self.names[s] if s in mine else self._add(s, storages[s].bytes, "backward"))
        self.rest = self._add(None, 0, "backward")
        makes.append(self.rest)
        self._run((_BALLAST, window[0] >= source.backward_start, (), tuple(makes), 0, 0, None), 0.0)
        return source.staying_bytes(window, own, imports)

    def _end_ballast(self, window: tuple[int, int], skip: set[int]) -> None:
        self.events.append((FREE, self.rest))
        for s in [s for s in self.names if s not in skip]:
            if self.source.dies[s] >= window[1]:
                self.events.append((FREE, self.names[s]))
            del self.names[s]

    def _run(self, op: tuple, ms: float) -> None:
        self.events.append((RUN, len(self.ops)))
        self.ops.append(op)
        self.op_ms.append(ms)

    def _play(self, stretch: tuple[int, int], ops: Iterable[int]) -> None:
        """Copy the events of ``stretch`` that concern what the excerpt knows; ``ops`` run."""
        graph, dies = self.graph, self.source.dies
        runs, mine = set(ops), len(self.whole_ids)
        for at in self._events_in(stretch, bool(runs)):
            kind, number = graph.events[at]
            if kind == RUN:
                if number in runs:
                    self._copy(graph.ops[number])
                continue
            storage = number if kind == FREE else graph.saved[number]
            name = self.names.get(storage)
            if name is None:
                continue
            if name >= mine:  # ballast, and what backward makes: one free when the last reference goes
                if dies[storage] == at:
                    self.events.append((FREE, name))
            elif kind == FREE:
                self.events.append((FREE, name))
            elif self.storages[name][2] != _IMPORTED:
                if number not in self.saved_names:
                    self.saved_names[number] = len(self.saved)
                    self.saved.append(name)
                self.events.append((kind, self.saved_names[number]))

    def _events_in(self, stretch: tuple[int, int], whole: bool) -> Iterable[int]:
        if whole:
            return range(*stretch)
        of = self.source.events_of
        return sorted(at for s in self.whole_ids for at in of.get(s, ()) if stretch[0] <= at < stretch[1])

    def _copy(self, op: Op) -> None:
        storages = self.graph.storages
        reads: tuple[int, ...] = ()
        if op.backward:
            makes = [self._add(s, storages[s].bytes, "backward") for s in op.makes]
        else:
            reads = tuple(dict.fromkeys([self._read(s) for s in op.reads]))
            self.op_names[op.id] = len(self.ops)
            makes = [self.names[s] for s in op.makes]
        completes_inplace = None if op.completes_inplace is None else self.op_names.get(op.completes_inplace)
        copy = (op.name, op.backward, reads, tuple(makes), op.workspace_bytes, op.rng_bytes, completes_inplace)
        self._run(copy, self.source.costs.op_ms[op.id])

    def _read(self, storage: int) -> int:
        """The excerpt's storage for one that a forward op reads: what others keep anyway costs nothing here."""
        if storage in self.names and self.names[storage] < len(self.whole_ids):
            return self.names[storage]
        source = self.graph.storages[storage]
        stays = source.kind == "activation" or (source.op is None and not source.fixed)
        kind = "input" if stays else "written"
        if kind not in self.proxies:
            self.proxies[kind] = self._add(None, 0, "input", "" if stays else "written during the step")
        return self.proxies[kind]

    def _sort_frees(self) -> None:
        """What dies together dies in one order: Python empties some containers (autocast's cache) in any."""
        at = 0
        # Not across ``late``, which tells them apart.
        for (kind, _), run in groupby(enumerate(list(self.events)), key=lambda it: (it[1][0], it[0] < self._late)):
            length = len(list(run))
            if kind == FREE:
                self.events[at : at + length] = sorted(self.events[at : at + length])
            at += length

    def _finish(self, backward_start: int, backward: int, own: int, ballast: tuple[int, int]) -> Subgraph:
        self._sort_frees()
        content = Content(
            tuple(self.storages), tuple(self.ops), tuple(self.op_ms), tuple(self.saved), tuple(self.events),
            self._late, backward_start, backward,
        )  # fmt: skip
        return Subgraph(content, tuple(self.whole_ids), own, ballast, self.graph, self.source.costs)
