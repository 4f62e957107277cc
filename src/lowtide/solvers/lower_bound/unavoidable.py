"""What is live for certain at each moment of a step, whatever the plan: the ground that the bound stands on.

Read off the events alone, by the rules of the tape:

- Python's hold on what forward made (RUN to FREE) and backward's on what it unpacked (UNPACK to DROP) cost their bytes
  under every plan, and so do storages that may not be recomputed. ``floor_bytes`` counts just these.
- A storage that autograd stores and that is kept costs its bytes beyond that from PACK to RELEASE (``kept_spans``).
- Replays run only in bursts, and bursts only start when something that may be dropped is unpacked. A *stage* begins
  with such unpacks and lasts until the next ones that follow an op; from ``settled`` on nothing is replayed in it.

Shares no code with the models of ``exact.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from lowtide.graph.step_graph import DROP, FREE, PACK, RELEASE, RUN, UNPACK, StepGraph, once_per_graph
from lowtide.solvers.graph_queries import readers, recomputable, replayable_ops

Span = tuple[int, int]  # of events, the second not included


class Unavoidable:
    """Moments and lifetimes of ``graph``.

    Args:
        may_move: Plans may keep what autograd stores elsewhere meanwhile: then that is no more certain than what they
            may recompute.

    Attributes:
        movable: What such plans may move; none where they may not.
        useful: Replayable ops that lead to something droppable, in program order.
        droppable: Storages that autograd stores, backward asks for, and a plan may recompute.
        returns: Storages that a replay can bring back (all that useful ops make and that may be recomputed).
        read_by: Useful ops that read each storage made in forward.
        floor_bytes: Per event, most bytes that are live under every plan. ``idle_bytes``: without the workspace of what
            runs. ``plain_bytes``: with all stored kept.
        stages: Event at which each stage begins. ``settled[t]``, ``ends[t]``: after its last unpack; its end.
        asked: Stages in which backward asks for each droppable storage. ``asks``: all events at which it does.
        since, until: First and last stage in which each useful op can be replayed.
        kept_spans: When a storage that autograd stores costs its bytes only because it is kept.
    """

    def __init__(self, graph: StepGraph, *, may_move: bool = False) -> None:
        self.graph = graph
        free, allowed, consumers = recomputable(graph), replayable_ops(graph), readers(graph)
        self._read_events()
        asked_for = {graph.saved[handle] for handle in self._unpacked}
        made = (graph.storages[s] for s in graph.stored & asked_for if may_move)
        self.movable = frozenset(s.id for s in made if s.kind == "activation" and not s.fixed)
        useful: set[int] = set()
        for op in reversed(graph.forward_ops):
            mine = [s for s in op.makes if s in free]
            if op.id in allowed and any(s in asked_for or not useful.isdisjoint(consumers.get(s, ())) for s in mine):
                useful.add(op.id)
        self.useful = sorted(useful)
        self.returns = frozenset(s for op in useful for s in graph.ops[op].makes if s in free)
        self.droppable = frozenset(graph.stored & asked_for & self.returns)
        self.read_by = {s: [op for op in ops if op in useful] for s, ops in consumers.items()}
        self.always_kept = graph.stored - free - self.movable
        self._floor(free | self.movable)
        self._stages()
        self._reach()

    def maker(self, storage: int) -> int:
        op = self.graph.storages[storage].op
        assert op is not None
        return op

    def stage_of(self, event: int) -> int:
        return bisect_right(self.stages, event) - 1

    def extra_spans(self, storage: int, spans: Iterable[Span]) -> list[Span]:
        """The parts of ``spans`` in which ``storage`` is not in the floor already."""
        found = []
        for start, end in spans:
            for low, high in self._floor_spans[storage]:
                if low > start:
                    found.append((start, min(low, end)))
                start = max(start, high)
            found.append((start, end))
        return [(start, end) for start, end in found if start < end]

    def in_floor(self, storage: int, events: np.ndarray) -> np.ndarray:
        """At which of ``events`` the floor counts ``storage``, as a mask."""
        found = np.zeros(len(events), dtype=bool)
        for start, end in self._floor_spans[storage]:
            found |= (start <= events) & (events < end)
        return found

    def _read_events(self) -> None:
        graph = self.graph
        self.ran: dict[int, int] = {}
        self.freed: dict[int, int] = {}
        self._packed: dict[int, int] = {}
        self._released: dict[int, int] = {}
        self._unpacked: dict[int, list[Span]] = defaultdict(list)
        open_since: dict[int, int] = {}
        for at, (kind, number) in enumerate(graph.events):
            if kind == RUN:
                self.ran[number] = at
            elif kind == FREE:
                self.freed.setdefault(number, at)
            elif kind == PACK:
                self._packed[number] = at
            elif kind == RELEASE:
                self._released[number] = at
            elif kind == UNPACK:
                open_since.setdefault(number, at)
            elif kind == DROP:
                self._unpacked[number].append((open_since.pop(number, at), at))
        for handle, at in open_since.items():
            self._unpacked[handle].append((at, len(graph.events)))

    def _floor(self, free: frozenset[int]) -> None:
        graph, end = self.graph, len(self.graph.events)
        held: dict[int, list[Span]] = defaultdict(list)
        kept: dict[int, list[Span]] = defaultdict(list)
        for handle, spans in self._unpacked.items():
            held[graph.saved[handle]] += spans
        for handle, at in self._packed.items():
            kept[graph.saved[handle]].append((at, self._released.get(handle, end)))
        change, extra = np.zeros(end + 1, dtype=np.int64), np.zeros(end, dtype=np.int64)
        self._floor_spans: dict[int, list[Span]] = {}
        for op in graph.ops:
            extra[self.ran[op.id]] = op.workspace_bytes
            for s in op.makes:
                spans = [(self.ran[op.id], self.freed.get(s, end)), *held[s], *([] if s in free else kept[s])]
                self._floor_spans[s] = _union(spans)
                for start, stop in self._floor_spans[s]:
                    change[start] += graph.storages[s].bytes
                    change[stop] -= graph.storages[s].bytes
        self.idle_bytes = np.cumsum(change[:-1]) + graph.resident_bytes
        self.floor_bytes = self.idle_bytes + extra
        self.kept_spans = {s: self.extra_spans(s, _union(kept[s])) for s in sorted(graph.stored & free)}
        more = np.zeros(end + 1, dtype=np.int64)
        for s, spans in self.kept_spans.items():
            for start, stop in spans:
                more[start] += graph.storages[s].bytes
                more[stop] -= graph.storages[s].bytes
        self.plain_bytes = self.floor_bytes + np.cumsum(more[:-1])

    def _stages(self) -> None:
        graph, end = self.graph, len(self.graph.events)
        asks = {
            at for handle, spans in self._unpacked.items() for at, _ in spans if graph.saved[handle] in self.droppable
        }
        self.asks = np.array(sorted(asks), dtype=np.int64)
        self.stages: list[int] = []
        self.settled: list[int] = []
        ran = True
        for at, (kind, _) in enumerate(graph.events):
            ran |= kind == RUN
            if at in asks:
                if ran:
                    self.stages.append(at)
                    self.settled.append(at)
                self.settled[-1] = at
                ran = False
        self.ends = [*self.stages[1:], end]
        self.asked: dict[int, list[int]] = defaultdict(list)
        for handle, spans in self._unpacked.items():
            if graph.saved[handle] in self.droppable:
                self.asked[graph.saved[handle]] += [self.stage_of(at) for at, _ in spans]
        self.asked = {s: sorted(set(stages)) for s, stages in self.asked.items()}

    def _reach(self) -> None:
        self.since: dict[int, int] = {}
        self.until: dict[int, int] = {}
        for op in reversed(self.useful):
            outputs = [s for s in self.graph.ops[op].makes if s in self.returns]
            readers_ = [r for s in outputs for r in self.read_by.get(s, ())]
            stages = [t for s in outputs for t in self.asked.get(s, ())]
            self.since[op] = min([*stages, *(self.since[r] for r in readers_)])
            self.until[op] = max([*stages, *(self.until[r] for r in readers_)])


@once_per_graph
def unavoidable(graph: StepGraph) -> Unavoidable:
    """``Certain(graph)``, made once."""
    return Unavoidable(graph)


@once_per_graph
def unavoidable_with_offload(graph: StepGraph) -> Unavoidable:
    """``Certain(graph, may_move=True)``, made once."""
    return Unavoidable(graph, may_move=True)


def _union(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
