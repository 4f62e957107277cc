"""The joint graph of one compiled layer as a ``StepGraph`` that lowtide's solvers plan.

One op is one value that gets memory (``joint_nodes.py``), with all that is fused into it. Backward ops that Inductor
puts into one kernel are one op here: they share their inputs, and nothing is written in place.

A last forward op stands for the rest of the model: it takes ``slack_bytes`` for a moment while all that the layer saves
lives. So a budget of ``b + slack_bytes`` allows the layer to save ``b`` bytes, and its backward to take the whole.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import fx

from lowtide.compiled import collectives, op_rates
from lowtide.compiled.joint_nodes import JointNodes, is_part, is_size, is_tangent
from lowtide.compiled.partitioner import draws
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import DROP, FREE, PACK, RELEASE, RUN, UNPACK, Frame, Op, StepGraph, Storage

DRAWN, SENT = "drawn from a generator", "sent by other ranks"
_FUSED_REACH = 8  # so many ops back a backward op may join a kernel
_LEAST_FUSED_BYTES = 4096


@dataclass(frozen=True)
class LayerGraph:
    """A layer's joint graph for planning.

    Attributes:
        graph, costs: With no slack; ``with_slack`` gives the graph to solve.
        names: FX node by storage id, of the values made in forward.
    """

    graph: StepGraph
    costs: Costs
    names: dict[int, str]
    turn_op: int = 0

    def with_slack(self, slack_bytes: int) -> StepGraph:
        """The graph whose rest of the model takes ``slack_bytes`` at the turn."""
        ops = list(self.graph.ops)
        ops[self.turn_op] = replace(ops[self.turn_op], workspace_bytes=slack_bytes)
        return replace(self.graph, ops=tuple(ops))


def layer_graph(nodes: JointNodes, device: torch.device) -> LayerGraph:
    """Convert the nodes of a joint graph of a layer on ``device``."""
    return _Converter(nodes, device).converted()


class _Converter:
    def __init__(self, nodes: JointNodes, device: torch.device) -> None:
        self.nodes, self._device = nodes, device
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.ms: list[float] = []
        self.id_of: dict[fx.Node, int] = {}
        self.heads: list[fx.Node | None] = []  # by op
        self.turn_op = 0

    def converted(self) -> LayerGraph:
        for node in self.nodes.nodes:
            if node.op in ("placeholder", "get_attr") and not (is_tangent(node) or is_size(node)):
                self.id_of[node] = len(self.storages)
                self.storages.append(Storage(len(self.storages), 0, "parameter"))
        made: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)  # parts of one operator have one op
        for node in self.nodes.materialised:
            head = node.args[0] if is_part(node) else node
            assert isinstance(head, fx.Node)
            made[head].append(node)
        forward = [h for h in made if self.nodes.is_forward[h]]
        backward = [h for h in made if not self.nodes.is_forward[h]]
        for head in forward:
            self._add(head, [made[head]])
        self._turn()
        for group in self._kernels(backward, made):
            self._add(group[0], [made[h] for h in group])
        events, saved = self._events()
        kind = self._device.type
        graph = StepGraph(
            kind, kind, {}, ({},), (Frame(-1, "", 0),), tuple(self.storages), tuple(self.ops), saved, events
        )
        names = {s: n.name for n, s in self.id_of.items() if self.storages[s].kind == "activation"}
        return LayerGraph(graph, Costs(tuple(self.ms), source="estimated"), names, self.turn_op)

    def _add(self, head: fx.Node, made: list[list[fx.Node]]) -> None:
        """One op: ``made`` by group, of which each is computed from its own sources."""
        number, reads, fused = len(self.ops), list[fx.Node](), list[fx.Node]()
        for group in made:
            more_reads, more_fused = self.nodes.sources(group[0])
            reads += more_reads
            fused += more_fused
        values = [node for group in made for node in group]
        reads = [r for r in dict.fromkeys(reads) if r not in values]
        kind = "activation" if self.nodes.is_forward[head] else "backward"
        ids = tuple(range(len(self.storages), len(self.storages) + len(values)))
        fixed = DRAWN if draws(head) or any(map(draws, fused)) else SENT if collectives.waits(head) else ""
        for output, (storage, node) in enumerate(zip(ids, values, strict=True)):
            self.id_of[node] = storage
            self.storages.append(Storage(storage, self.nodes.bytes_of(node), kind, number, output, fixed))
        if self.nodes.is_extern(head):
            ms = op_rates.extern_ms(head, self._device, self.nodes.sizes)
        else:
            moved_bytes = sum(map(self.nodes.bytes_of, [*reads, *values]))
            ms = op_rates.fused_ms(head, moved_bytes, fused, self._device, self.nodes.sizes)
        inputs = tuple(self.id_of[r] for r in reads if r in self.id_of)
        self.ops.append(Op(number, str(head.target), 0, kind == "backward", inputs, ids))
        self.ms.append(ms)
        self.heads.append(head)

    def _turn(self) -> None:
        """The rest of the model, and then the gradients that it hands back."""
        self.turn_op = len(self.ops)
        self.ops.append(Op(self.turn_op, "rest of the model", 0, False, (), ()))
        tangents = sorted(filter(is_tangent, self.nodes.nodes), key=self.nodes.order.__getitem__)
        ids = tuple(range(len(self.storages), len(self.storages) + len(tangents)))
        for output, (storage, node) in enumerate(zip(ids, tangents, strict=True)):
            self.id_of[node] = storage
            self.storages.append(Storage(storage, self.nodes.bytes_of(node), "backward", self.turn_op + 1, output))
        self.ops.append(Op(self.turn_op + 1, "gradients", 0, True, (), ids))
        self.ms += [0.0, 0.0]
        self.heads += [None, None]

    def _kernels(self, heads: list[fx.Node], made: dict[fx.Node, list[fx.Node]]) -> list[list[fx.Node]]:
        """Backward ops by kernel: those of one size that share a large input join the first of them."""
        place = {node: i for i, head in enumerate(heads) for node in made[head]}
        groups = [[head] for head in heads]
        for i, head in enumerate(heads):
            if not self._joins(head):
                continue
            reads = set(self.nodes.sources(head)[0])
            for j in range(max(0, i - _FUSED_REACH), i):
                first = heads[j]
                if not groups[j] or not self._joins(first) or self.nodes.bytes_of(first) != self.nodes.bytes_of(head):
                    continue
                shared = reads & set(self.nodes.sources(first)[0])
                if any(self.nodes.bytes_of(r) >= self.nodes.bytes_of(head) for r in shared) and all(
                    place.get(r, -1) < j for r in reads
                ):
                    groups[j] += groups[i]
                    groups[i] = []
                    break
        return [group for group in groups if group]

    def _joins(self, head: fx.Node) -> bool:
        return self.nodes.is_elementwise(head) and self.nodes.bytes_of(head) >= _LEAST_FUSED_BYTES

    def _events(self) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        last_forward, last_backward = dict[int, int](), dict[int, int]()
        handle: dict[int, int] = {}
        for op in self.ops:
            for s in op.reads:
                maker = self.storages[s].op
                if maker is None:
                    continue
                (last_backward if op.backward else last_forward)[s] = op.id
                if op.backward and not self.ops[maker].backward:
                    handle.setdefault(s, -1)
        to_end = {self.id_of[n] for n in self.nodes.returned_backward if n in self.id_of}
        to_turn = {self.id_of[n] for n in self.nodes.returned_forward if n in self.id_of}
        kept = to_end | to_turn
        saved: list[int] = []
        events: list[tuple[int, int]] = []
        for op in self.ops:
            if not op.backward:
                if op.id == self.turn_op:  # what the layer returns is counted where the next one takes it
                    events += [(FREE, s) for s in sorted(to_turn) if self.storages[s].op is not None]
                events.append((RUN, op.id))
                for s in op.makes:
                    if s in handle:
                        handle[s] = len(saved)
                        saved.append(s)
                        events.append((PACK, handle[s]))
                dying = [s for s in op.reads if last_forward.get(s) == op.id]
                dying += [s for s in op.makes if s not in last_forward]
                events += [(FREE, s) for s in dying if s not in kept]
                continue
            events += self._backward_events(op, handle, last_backward, to_end)
        events += [(FREE, s) for s in sorted(to_end) if self.storages[s].op is not None and s not in to_turn]
        return tuple(events), tuple(saved)

    def _backward_events(
        self, op: Op, handle: dict[int, int], last: dict[int, int], to_end: set[int]
    ) -> list[tuple[int, int]]:
        reads = [s for s in op.reads if self.storages[s].op is not None]
        stored = [s for s in reads if s in handle]
        released = [s for s in stored if last[s] == op.id]
        dying = [s for s in reads if s not in handle and last[s] == op.id and s not in to_end]
        over = self._written_over(op, [*dying, *released])
        events = [(UNPACK, handle[s]) for s in stored]
        if over in released:
            events += [(DROP, handle[over]), (RELEASE, handle[over])]
        if over in dying:
            events.append((FREE, over))
        events.append((RUN, op.id))
        events += [(DROP, handle[s]) for s in stored if s != over or over not in released]
        events += [(RELEASE, handle[s]) for s in released if s != over]
        events += [(FREE, s) for s in dying if s != over]
        return events + [(FREE, s) for s in op.makes if s not in last and s not in to_end]

    def _written_over(self, op: Op, dying: list[int]) -> int:
        """A dying input that an elementwise kernel writes its one result over; -1 if there is none."""
        head = self.heads[op.id]
        if head is None or not self.nodes.is_elementwise(head) or len(op.makes) != 1:
            return -1
        size = self.storages[op.makes[0]].bytes
        same = [s for s in dying if self.storages[s].bytes == size and size >= _LEAST_FUSED_BYTES]
        return same[0] if same else -1
