"""What is live at each moment of a step under every plan: the ground on which the lower bound stands.

It follows from the events alone, by the rules of the tape:

- Python's hold on what forward made (RUN to FREE) and backward's on what it unpacked (UNPACK to DROP) cost their bytes
  under every plan, and so do storages that may not be recomputed. ``floor_bytes`` counts just these.
- A storage that autograd stores and that is saved costs its bytes beyond that from PACK to RELEASE (``kept_spans``).
- Replays run only in bursts, and bursts only start when something that may be dropped is unpacked. A *stage* begins
  with such unpacks and lasts until the next ones that follow an op; after ``last_asks`` nothing is replayed in it.

Shares no code with the models of ``exact.py``.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from lowtide.graph.facts import StepFacts, step_facts
from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import RUN, StepGraph
from lowtide.solvers.graph_queries import droppable, movable, ops_worth_replaying, recomputable

Span = tuple[int, int]  # of events, the second not included


class Unavoidable:
    """Lifetimes and stages of ``graph``, which is not referred to afterwards.

    Args:
        may_offload: Plans may offload. Offloadable tensors then do not count as unavoidable.

    Attributes:
        movable: Storages that such plans may offload; none without ``may_offload``.
        useful: Replayable ops that lead to something droppable, in program order.
        droppable: Storages that autograd stores, backward asks for, and a plan may recompute.
        replayable: Storages that a replay can bring back: all that useful ops make and that may be recomputed.
        always_kept: Stored storages that every plan saves.
        read_by: Useful ops that read each storage made in forward.
        idle_bytes: Per event, bytes that are live under every plan, without the workspace of the op that runs.
        floor_bytes: ``idle_bytes`` and that workspace.
        plain_bytes: ``floor_bytes`` and everything that the plain step stores.
        kept_spans: When a stored storage costs its bytes only because it is saved, by storage.
        stages: Event at which each stage begins.
        last_asks: Last unpack of something droppable in each stage.
        stage_ends: Event at which each stage ends.
        ask_stages: Stages in which backward asks for each droppable storage.
        ask_events: All events at which backward asks for something droppable.
        first_stage, last_stage: First and last stage in which each useful op can be replayed.
    """

    def __init__(self, graph: StepGraph, *, may_offload: bool = False) -> None:
        facts, free = step_facts(graph), recomputable(graph)
        self.movable = movable(graph) if may_offload else frozenset[int]()
        self.useful = ops_worth_replaying(graph)
        self.droppable = droppable(graph)
        useful = set(self.useful)
        self.replayable = frozenset(s for op in self.useful for s in graph.ops[op].makes if s in free)
        self.read_by = {s: [op for op in ops if op in useful] for s, ops in facts.readers.items()}
        self.always_kept = graph.stored - free - self.movable
        self._read_lifetimes(graph, facts, free | self.movable)
        self._read_stages(graph, facts)
        self._read_reach(graph)

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

    def _read_lifetimes(self, graph: StepGraph, facts: StepFacts, optional: frozenset[int]) -> None:
        """Spans and bytes. ``optional``: storages that some plan does not hold while only autograd stores them."""
        end = len(graph.events)
        unpacked: dict[int, list[Span]] = defaultdict(list)
        stored: dict[int, list[Span]] = defaultdict(list)
        for number, spans in facts.unpack_spans.items():
            unpacked[graph.saved[number]] += spans
        for number, at in facts.packed.items():
            stored[graph.saved[number]].append((at, facts.released.get(number, end)))
        workspace_bytes = np.zeros(end, dtype=np.int64)
        self._floor_spans: dict[int, list[Span]] = {}
        for op in graph.ops:
            run = facts.run_event[op.id]
            workspace_bytes[run] = op.workspace_bytes
            for s in op.makes:
                always_stored = [] if s in optional else stored[s]
                self._floor_spans[s] = _union([(run, facts.death.get(s, end)), *unpacked[s], *always_stored])
        self.kept_spans = {s: self.extra_spans(s, _union(stored[s])) for s in sorted(graph.stored & optional)}
        self.idle_bytes = _live_bytes(graph, self._floor_spans) + graph.start_bytes
        self.floor_bytes = self.idle_bytes + workspace_bytes
        self.plain_bytes = self.floor_bytes + _live_bytes(graph, self.kept_spans)

    def _read_stages(self, graph: StepGraph, facts: StepFacts) -> None:
        asks: dict[int, list[int]] = {s: [] for s in self.droppable}
        for number, spans in facts.unpack_spans.items():
            if graph.saved[number] in self.droppable:
                asks[graph.saved[number]] += [at for at, _ in spans]
        ask_events = {at for events in asks.values() for at in events}
        self.ask_events = np.array(sorted(ask_events), dtype=np.int64)
        self.stages: list[int] = []
        self.last_asks: list[int] = []
        op_ran = True
        for at, (kind, _) in enumerate(graph.events):
            op_ran |= kind == RUN
            if at in ask_events:
                if op_ran:
                    self.stages.append(at)
                    self.last_asks.append(at)
                self.last_asks[-1] = at
                op_ran = False
        self.stage_ends = [*self.stages[1:], len(graph.events)]
        self.ask_stages = {s: sorted({self.stage_of(at) for at in events}) for s, events in asks.items()}

    def _read_reach(self, graph: StepGraph) -> None:
        self.first_stage: dict[int, int] = {}
        self.last_stage: dict[int, int] = {}
        for op in reversed(self.useful):
            outputs = [s for s in graph.ops[op].makes if s in self.replayable]
            readers = [r for s in outputs for r in self.read_by.get(s, ())]
            stages = [t for s in outputs for t in self.ask_stages.get(s, ())]
            self.first_stage[op] = min([*stages, *(self.first_stage[r] for r in readers)])
            self.last_stage[op] = max([*stages, *(self.last_stage[r] for r in readers)])


@once_per_graph
def unavoidable(graph: StepGraph) -> Unavoidable:
    """What holds for plans that save or recompute."""
    return Unavoidable(graph)


@once_per_graph
def unavoidable_with_offload(graph: StepGraph) -> Unavoidable:
    """What holds for plans that may offload as well."""
    return Unavoidable(graph, may_offload=True)


def _live_bytes(graph: StepGraph, spans_of: dict[int, list[Span]]) -> np.ndarray:
    """Bytes of the storages whose spans are given, per event."""
    change = np.zeros(len(graph.events) + 1, dtype=np.int64)
    for s, spans in spans_of.items():
        for start, end in spans:
            change[start] += graph.storages[s].bytes
            change[end] -= graph.storages[s].bytes
    return np.cumsum(change[:-1])


def _union(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
