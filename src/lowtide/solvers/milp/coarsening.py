"""The step graph that the MILP sees: groups of ops, pieces of memory, keep decisions, and the moments that count.

Words used by the model (``peak_model.py``):

- *piece*: a storage made in forward that a plan can keep or replay, or that a replay may read.
- *group*: ops that are replayed together. An op whose outputs autograd does not store joins its only consumer; this
  keeps a decoder layer at some 16 groups. It is a heuristic (the merged op can be neither kept nor replayed alone), so
  graphs small enough go without.
- *keep decision*: pieces of one group that are kept or recomputed together. Secondary outputs that are tiny beside the
  group's others (the statistics of a norm, attention's logsumexp) have no decision of their own. Nor have outputs that
  backward alone reads, all at once: keeping one of them spares no replay while another is missing.
- *trigger*: a moment in backward at which replays may start: a droppable storage is unpacked for the first time. What
  one op stored and one node unpacks is one trigger: a call of compiled code may store thirty tensors.
- *memory interval*: events between which Python drops no piece and autograd releases none. Memory there is a constant,
  the largest over the interval, plus what the decisions add.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import RUN
from lowtide.solvers import tuning
from lowtide.solvers.graph_queries import droppable, ops_worth_replaying, recomputable
from lowtide.solvers.search_context import SearchContext

_NEVER = 1 << 60


@dataclass(eq=False)
class Piece:
    """One storage. Events are indices into ``StepGraph.events``."""

    storage: int
    bytes: int
    group: OpGroup | None  # that makes it; None when it may not be replayed
    dead: int  # event at which Python drops it
    direct_end: int  # event of the last release or drop of a handle on it; -1 when autograd does not store it
    first: int | None  # trigger of its first unpack; None when there is none
    consumers: list[OpGroup]  # groups whose replay reads it
    decision: KeepDecision | None = None


@dataclass(eq=False)
class KeepDecision:
    """Pieces of one group, kept or recomputed together. ``group`` is None for a piece that can only be kept."""

    group: OpGroup | None
    pieces: list[Piece]

    @property
    def stored(self) -> bool:
        return any(p.direct_end >= 0 for p in self.pieces)

    def kept_at(self, event: int) -> int:
        """Bytes that live at ``event``, between forward and backward, only if the pieces are kept."""
        return sum(p.bytes for p in self.pieces if p.dead < event and (p.direct_end < 0 or p.direct_end >= event))

    @property
    def first(self) -> int | None:
        return min((p.first for p in self.pieces if p.first is not None), default=None)


@dataclass(eq=False)
class OpGroup:
    """Ops replayed together, in program order; the last one's outputs are the group's."""

    ops: tuple[int, ...]
    segment: int
    ms: float  # of one replay, recording included
    burst_bytes: int  # most that it holds while it runs alone, outputs and workspace included
    rng_bytes: int
    pieces: list[Piece] = field(default_factory=list)
    reads: list[Piece] = field(default_factory=list)  # pieces that it reads and does not make
    decisions: list[KeepDecision] = field(default_factory=list)
    triggers: list[int] = field(default_factory=list)  # when it may be replayed

    @property
    def head(self) -> int:
        return self.ops[-1]

    def step_of(self, trigger: int) -> int:
        """Index into ``triggers`` of the last one up to ``trigger``; -1 before the first."""
        return bisect_right(self.triggers, trigger) - 1


@dataclass(frozen=True)
class MemoryInterval:
    """Events from ``start`` on, after ``trigger``; ``base_bytes`` live without any piece that is dead in Python."""

    start: int
    base_bytes: int
    trigger: int


class CoarseGraph:
    """The step of ``context`` as groups, keep decisions, triggers and memory intervals.

    Args:
        segment_of: Segment of each forward op; None: all are in one. Ops of different segments share no group.
        within_segments: Nothing is replayed of segments that backward has not come to.

    Attributes:
        per_op: Whether each op is a group of its own.
    """

    def __init__(
        self, context: SearchContext, segment_of: Mapping[int, int] | None = None, *, within_segments: bool = False
    ) -> None:
        graph = self.graph = context.graph
        self.costs, self.per_op = context.costs, context.per_op
        self.facts = step_facts(graph)
        self.run_event = self.facts.run_event
        free = recomputable(graph)
        self.droppable = droppable(graph)
        self.ops = ops_worth_replaying(graph)
        self.segment_of = segment_of or {op.id: 0 for op in graph.forward_ops}
        uses = sorted((event, s) for s, event in self.facts.first_use.items() if s in self.droppable)
        self.trigger_events: list[int] = []
        self._trigger_of_storage = self._triggers(uses)
        self.groups = self._groups()
        self.group_of = {op: group for group in self.groups for op in group.ops}
        self.pieces = self._pieces(free)
        self.decisions = self._decisions()
        self._windows(within_segments=within_segments)
        self.base_live, self.base_peak = self._base()
        self.intervals = self._intervals()

    @property
    def size(self) -> int:
        """The number of (group, trigger) pairs at which a replay may start: what the model grows with."""
        return sum(len(group.triggers) for group in self.groups)

    def _triggers(self, uses: list[tuple[int, int]]) -> dict[int, int]:
        """The trigger of each droppable storage. ``uses`` are first unpacks and their storages, in order."""
        runs = sorted(self.run_event.values())
        found: dict[int, int] = {}
        maker, until = None, -1  # of the last trigger: who made what it unpacks, and when the next op runs
        for event, s in uses:
            if self.graph.storages[s].op != maker or event > until:
                maker, at = self.graph.storages[s].op, bisect_right(runs, event)
                until = runs[at] if at < len(runs) else _NEVER
                self.trigger_events.append(event)
            found[s] = len(self.trigger_events) - 1
        return found

    def _groups(self) -> list[OpGroup]:
        graph, consumers = self.graph, self.facts.readers
        replayable, head_of = set(self.ops), dict[int, int]()
        stored = graph.stored
        for number in reversed(self.ops):
            op = graph.ops[number]
            heads = {head_of[c] for s in op.makes for c in consumers.get(s, ()) if c in replayable}
            head_of[number] = number
            if self.per_op or len(heads) != 1 or any(s in stored or graph.storages[s].fixed for s in op.makes):
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

    def _group(self, ops: tuple[int, ...]) -> OpGroup:
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
        return OpGroup(ops, self.segment_of[ops[-1]], ms, peak, rng)

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

    def _piece(self, storage: int, group: OpGroup | None) -> Piece:
        return Piece(
            storage=storage,
            bytes=self.graph.storages[storage].bytes,
            group=group,
            dead=self.facts.death.get(storage, _NEVER),
            direct_end=self._direct_end(storage),
            first=self._trigger_of_storage.get(storage) if group else None,
            consumers=[],
        )

    def _direct_end(self, storage: int) -> int:
        never = len(self.graph.events) if storage in self.facts.first_pack else -1
        return self.facts.last_reference.get(storage, never)

    def _decisions(self) -> list[KeepDecision]:
        kept = set(self.pieces)
        decisions = []
        for group in self.groups:
            mine = sorted((p for p in group.pieces if p in kept), key=lambda p: -p.bytes)
            total = sum(p.bytes for p in mine)
            for_backward: dict[int | None, KeepDecision] = {}  # by trigger
            for piece in mine:
                if group.decisions and not self.per_op and piece.bytes < tuning.TINY_OUTPUT_SHARE * total:
                    group.decisions[0].pieces.append(piece)
                elif not piece.consumers and piece.first in for_backward:
                    for_backward[piece.first].pieces.append(piece)
                else:
                    group.decisions.append(decision := KeepDecision(group, [piece]))
                    if not piece.consumers:
                        for_backward[piece.first] = decision
            decisions += group.decisions
        decisions += [KeepDecision(None, [p]) for p in self.pieces if p.group is None]
        for decision in decisions:
            for piece in decision.pieces:
                piece.decision = decision
        return decisions

    def _windows(self, *, within_segments: bool) -> None:
        """When each group may be replayed: at its own first unpacks and whenever a consumer may be."""
        segment_of_trigger = {p.first: p.group.segment for p in self.pieces if p.group and p.first is not None}
        for group in reversed(self.groups):
            window = {p.first for p in group.pieces if p.first is not None}
            for consumer in dict.fromkeys(c for p in group.pieces for c in p.consumers):
                window.update(
                    t for t in consumer.triggers if not within_segments or segment_of_trigger[t] <= group.segment
                )
            group.triggers = sorted(window)

    def _base(self) -> tuple[np.ndarray, np.ndarray]:
        """Live bytes after and at most during each event, with all pieces gone once Python drops them."""
        graph, ends = self.graph, len(self.graph.events)
        change = np.zeros(ends + 1, dtype=np.int64)
        peak_extra = np.zeros(ends, dtype=np.int64)
        optional = {p.storage for p in self.pieces if p.group is not None}
        for op in graph.ops:
            for storage in op.makes:
                end = self.facts.death.get(storage, ends)
                if storage not in optional and storage in self.facts.first_pack:
                    end = max(end, self._direct_end(storage))
                change[self.run_event[op.id]] += graph.storages[storage].bytes
                change[min(end, ends)] -= graph.storages[storage].bytes
            peak_extra[self.run_event[op.id]] = op.workspace_bytes
        live = np.cumsum(change[:-1]) + graph.start_bytes
        return live, live + peak_extra

    def _intervals(self) -> list[MemoryInterval]:
        """Slots in order; of those before the first trigger only the ones that can bind."""
        cuts = {p.dead for p in self.pieces} | {p.direct_end for p in self.pieces}
        triggers = set(self.trigger_events)
        intervals: list[MemoryInterval] = []
        start, split = 0, False
        trigger = -1
        for event, (kind, _) in enumerate(self.graph.events):
            if (event in triggers or (kind == RUN and split)) and event > start:
                intervals.append(self._interval(start, event, trigger))
                start, split = event, False
            if event in triggers:
                trigger += 1
            split |= event in cuts
        intervals.append(self._interval(start, len(self.graph.events), trigger))
        # Until autograd releases something, decisions only add memory: an interval with a lower base than a later one
        # never binds.
        first_release = min((p.direct_end for p in self.pieces if p.direct_end >= 0), default=0)
        kept: list[MemoryInterval] = []
        floor = -1
        for interval in reversed(intervals):
            if interval.trigger < 0 and interval.start <= first_release:
                if interval.base_bytes <= floor:
                    continue
                floor = interval.base_bytes
            kept.append(interval)
        return kept[::-1]

    def _interval(self, start: int, end: int, trigger: int) -> MemoryInterval:
        return MemoryInterval(start, int(self.base_peak[start:end].max()), trigger)
