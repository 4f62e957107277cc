"""A step graph as the exact method sees it: groups of ops, pieces of memory, decisions, and the moments that count.

Words used by the model (``peak_model.py``):

- *piece*: a storage made in forward that a plan can keep or bring back, or that a replay may read.
- *group*: ops that are replayed together. An op whose outputs autograd does not store joins its only consumer; this
  keeps a decoder layer at some 16 groups. It is a heuristic (the merged op can be neither kept nor replayed alone), so
  graphs small enough go without.
- *decision*: pieces of one group that are kept or recomputed together. Secondary outputs that are tiny beside the
  group's others (the statistics of a norm, attention's logsumexp) have no decision of their own.
- *trigger*: a moment in backward at which replays may start: something dropped is unpacked for the first time.
- *slot*: a stretch of the step in which neither what is dead in Python nor what is still stored changes. Memory there
  is a constant, the largest over the slot, plus what the decisions add.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import DROP, FREE, PACK, RELEASE, RUN, UNPACK, StepGraph
from lowtide.solvers import tuning
from lowtide.solvers.decomposition.segments import segments, worth_replaying
from lowtide.solvers.graph_queries import droppable, readers, recomputable

_NEVER = 1 << 60


@dataclass(eq=False)
class Piece:
    """One storage. Events are indices into ``StepGraph.events``.

    Attributes:
        group: The group that makes it; None when it may not be replayed.
        dead: Event at which Python drops it.
        direct_end: Event of the last release or drop of a handle on it; -1 when autograd does not store it.
        first: Trigger of its first unpack; None when there is none.
        consumers: Groups whose replay reads it.
    """

    storage: int
    bytes: int
    group: Group | None
    dead: int
    direct_end: int
    first: int | None
    consumers: list[Group]
    decision: Decision | None = None


@dataclass(eq=False)
class Decision:
    """Pieces of one group with one fate. ``group`` is None for a piece that can only be kept."""

    group: Group | None
    pieces: list[Piece]

    @property
    def stored(self) -> bool:
        return any(p.direct_end >= 0 for p in self.pieces)

    @property
    def first(self) -> int | None:
        return min((p.first for p in self.pieces if p.first is not None), default=None)


@dataclass(eq=False)
class Group:
    """Ops replayed together, in program order; the last one's outputs are the group's.

    Attributes:
        ms: Time of one replay, recording included.
        burst_bytes: Most bytes it holds while it runs alone, outputs and workspace included.
        reads: Pieces that it needs from elsewhere.
        triggers: When it may be replayed.
    """

    ops: tuple[int, ...]
    segment: int
    ms: float
    burst_bytes: int
    rng_bytes: int
    pieces: list[Piece]
    reads: list[Piece]
    decisions: list[Decision]
    triggers: list[int]

    @property
    def head(self) -> int:
        return self.ops[-1]

    def step_of(self, trigger: int) -> int:
        """Index into ``triggers`` of the last one up to ``trigger``; -1 before the first."""
        return bisect_right(self.triggers, trigger) - 1


@dataclass(frozen=True)
class Slot:
    """Events ``start`` to ``end``; ``base_bytes`` live without any piece that is dead in Python; after ``trigger``."""

    start: int
    end: int
    base_bytes: int
    trigger: int


class CoarseGraph:
    """``graph`` cut into groups, decisions, triggers and slots.

    Args:
        reach: How many segments back a replay may start; None: any number.
    """

    def __init__(self, graph: StepGraph, costs: Costs, *, reach: int | None = None) -> None:
        self.graph, self.costs, self.reach = graph, costs, reach
        self._read_events()
        free = recomputable(graph)
        self.droppable = droppable(graph)
        self.ops = worth_replaying(graph)
        self.fine = len(self.ops) <= tuning.PER_OP_MODEL_OPS
        self.segment_of = segments(graph, self.ops)
        self.trigger_events, self._trigger_of_storage = self._triggers()
        self.groups = self._groups()
        self.group_of = {op: group for group in self.groups for op in group.ops}
        self.pieces = self._pieces(free)
        self.decisions = self._decisions()
        self._windows()
        self.base_live, self.base_peak = self._base()
        self.slots = self._slots()

    @property
    def size(self) -> int:
        """Moments at which some group may be replayed, over all groups: what the model grows with."""
        return sum(len(group.triggers) for group in self.groups)

    def trigger_at(self, event: int) -> int:
        """The last trigger at or before ``event``; -1 before the first."""
        return bisect_right(self.trigger_events, event) - 1

    def _read_events(self) -> None:
        graph = self.graph
        self._dead: dict[int, int] = {}
        self._packed: dict[int, int] = {}
        self._direct_end: dict[int, int] = {}
        self._first_unpack: dict[int, int] = {}
        self.run_event: dict[int, int] = {}
        for at, (kind, number) in enumerate(graph.events):
            if kind == RUN:
                self.run_event[number] = at
            elif kind == FREE:
                self._dead[number] = at
            elif kind == PACK:
                self._packed.setdefault(graph.saved[number], at)
            elif kind == UNPACK:
                self._first_unpack.setdefault(graph.saved[number], at)
            elif kind in (RELEASE, DROP):
                self._direct_end[graph.saved[number]] = at
        for storage in self._packed:
            self._direct_end.setdefault(storage, len(graph.events))  # stored and never let go

    def _triggers(self) -> tuple[list[int], dict[int, int]]:
        """Events at which replays may start, and the trigger of each droppable storage."""
        at = sorted((event, s) for s, event in self._first_unpack.items() if s in self.droppable)
        return [event for event, _ in at], {s: trigger for trigger, (_, s) in enumerate(at)}

    def _groups(self) -> list[Group]:
        graph, consumers = self.graph, readers(self.graph)
        worth, head_of = set(self.ops), dict[int, int]()
        stored = graph.stored
        for number in reversed(self.ops):
            op = graph.ops[number]
            heads = {head_of[c] for s in op.makes for c in consumers.get(s, ()) if c in worth}
            head_of[number] = number
            if self.fine or len(heads) != 1 or any(s in stored or graph.storages[s].fixed for s in op.makes):
                continue
            head = heads.pop()
            made, consumed = self._made_bytes(number), self._made_bytes(head)
            if made <= tuning.KEEP_SHARE * consumed and self.costs.op_ms[number] >= self.costs.op_ms[head]:
                continue
            if made >= tuning.MERGE_SHARE * consumed and self.segment_of[head] == self.segment_of[number]:
                head_of[number] = head
        members: dict[int, list[int]] = {}
        for number in self.ops:
            members.setdefault(head_of[number], []).append(number)
        return [self._group(tuple(members[head])) for head in sorted(members)]

    def _made_bytes(self, op: int) -> int:
        return sum(self.graph.storages[s].bytes for s in self.graph.ops[op].makes)

    def _group(self, ops: tuple[int, ...]) -> Group:
        graph, costs = self.graph, self.costs
        last_read = {s: op for op in ops for s in graph.ops[op].reads}
        live = peak = 0
        for op in ops:
            live += self._made_bytes(op)
            # The generator's present state is put aside while the recorded one is in force.
            peak = max(peak, live + graph.ops[op].workspace_bytes + graph.ops[op].rng_bytes)
            if op != ops[-1]:
                live -= sum(graph.storages[s].bytes for s in graph.ops[op].makes if s not in last_read)
            live -= sum(
                graph.storages[s].bytes for s, last in last_read.items() if last == op and graph.storages[s].op in ops
            )
        ms = sum(costs.op_ms[op] + (costs.replay_us + costs.record_us) / 1e3 for op in ops)
        rng = sum(graph.ops[op].rng_bytes for op in ops)
        return Group(ops, self.segment_of[ops[-1]], ms, peak, rng, [], [], [], [])

    def _pieces(self, free: frozenset[int]) -> list[Piece]:
        graph, pieces = self.graph, {}
        for group in self.groups:
            for s in graph.ops[group.head].makes:
                if s in free:
                    pieces[s] = self._piece(s, group if s in self.droppable or s not in graph.stored else None)
                    if pieces[s].group is group:
                        group.pieces.append(pieces[s])
            outside = dict.fromkeys(s for op in group.ops for s in graph.ops[op].reads)
            for s in outside:
                maker = graph.storages[s].op
                if maker is None or maker in group.ops:
                    continue
                if s not in pieces:  # may not be replayed, only be kept
                    pieces[s] = self._piece(s, None)
                pieces[s].consumers.append(group)
                group.reads.append(pieces[s])
        return [p for p in pieces.values() if p.consumers or p.direct_end >= 0]

    def _piece(self, storage: int, group: Group | None) -> Piece:
        return Piece(
            storage=storage,
            bytes=self.graph.storages[storage].bytes,
            group=group,
            dead=self._dead.get(storage, _NEVER),
            direct_end=self._direct_end.get(storage, -1),
            first=self._trigger_of_storage.get(storage) if group else None,
            consumers=[],
        )

    def _decisions(self) -> list[Decision]:
        kept = set(map(id, self.pieces))
        decisions = []
        for group in self.groups:
            mine = sorted((p for p in group.pieces if id(p) in kept), key=lambda p: -p.bytes)
            total = sum(p.bytes for p in mine)
            for piece in mine:
                if group.decisions and not self.fine and piece.bytes < tuning.TINY_OUTPUT_SHARE * total:
                    group.decisions[0].pieces.append(piece)
                else:
                    group.decisions.append(Decision(group, [piece]))
            decisions += group.decisions
        decisions += [Decision(None, [p]) for p in self.pieces if p.group is None]
        for decision in decisions:
            for piece in decision.pieces:
                piece.decision = decision
        return decisions

    def _windows(self) -> None:
        """When each group may be replayed: at its own first unpacks and whenever a consumer may be."""
        segment_of_trigger = {p.first: p.group.segment for p in self.pieces if p.group and p.first is not None}
        for group in reversed(self.groups):
            window = {p.first for p in group.pieces if p.first is not None}
            for consumer in {id(c): c for p in group.pieces for c in p.consumers}.values():
                window.update(
                    t for t in consumer.triggers
                    if self.reach is None or segment_of_trigger[t] <= group.segment + self.reach
                )  # fmt: skip
            group.triggers = sorted(window)

    def _base(self) -> tuple[np.ndarray, np.ndarray]:
        """Live bytes after and at most during each event, with all pieces gone once Python drops them."""
        graph, ends = self.graph, len(self.graph.events)
        change = np.zeros(ends + 1, dtype=np.int64)
        peak_extra = np.zeros(ends, dtype=np.int64)
        optional = {p.storage for p in self.pieces if p.group is not None}
        for op in graph.ops:
            for storage in op.makes:
                end = self._dead.get(storage, ends)
                if storage not in optional and storage in self._packed:
                    end = max(end, self._direct_end[storage])
                change[self.run_event[op.id]] += graph.storages[storage].bytes
                change[min(end, ends)] -= graph.storages[storage].bytes
            peak_extra[self.run_event[op.id]] = op.workspace_bytes
        live = np.cumsum(change[:-1]) + graph.resident_bytes
        return live, live + peak_extra

    def _slots(self) -> list[Slot]:
        """Slots in order; of those before the first trigger only the ones that can bind."""
        cuts = {p.dead for p in self.pieces} | {p.direct_end for p in self.pieces}
        triggers = set(self.trigger_events)
        slots: list[Slot] = []
        start, split = 0, False
        trigger = -1
        for event, (kind, _) in enumerate(self.graph.events):
            if (event in triggers or (kind == RUN and split)) and event > start:
                slots.append(self._slot(start, event, trigger))
                start, split = event, False
            if event in triggers:
                trigger += 1
            split |= event in cuts
        slots.append(self._slot(start, len(self.graph.events), trigger))
        # As long as nothing is taken back the decisions only ever add: a slot with a lower base than a later one of
        # that stretch never binds.
        taken_back = min((p.direct_end for p in self.pieces if p.direct_end >= 0), default=0)
        kept: list[Slot] = []
        floor = -1
        for slot in reversed(slots):
            if slot.trigger < 0 and slot.start <= taken_back:
                if slot.base_bytes <= floor:
                    continue
                floor = slot.base_bytes
            kept.append(slot)
        return kept[::-1]

    def _slot(self, start: int, end: int, trigger: int) -> Slot:
        return Slot(start, end, int(self.base_peak[start:end].max()), trigger)
