"""Undo a difference that recording makes: under a dispatch mode the engine adds gradients out of place.

Where a node's gradient arrives in parts, autograd adds the second part into the first when nothing else refers to
it. ``can_accumulate_inplace`` (torch/csrc/autograd/input_buffer.cpp) says no whenever a dispatch mode is on, so the
recorder sees ``add`` and a new storage where the plain step has neither. On a state-space model that was 9 % of
the peak. A sum of which one term dies at once is therefore folded into that term. The same holds for what backward
formulas scatter into zeros (of ``gather`` and ``topk``, say): ``areAnyTensorSubclassLike`` makes them write to a new
storage under a mode.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lowtide.graph.step_graph import FREE, NEW_GRADIENT, RUN, Op, StepGraph, Storage
from lowtide.recording.live_storages import LiveStorages
from lowtide.step.operators import SCATTERS, fills_its_storage


class GradientSums:
    """Finds the engine's own additions among the ops of backward, by the autograd nodes that made their inputs."""

    def __init__(self, live: LiveStorages) -> None:
        self.targets: dict[int, tuple[int, ...]] = {}  # op id -> storages it may add into, in the engine's order
        self._live = live
        self._nodes: list[Any] = []  # in the order in which they ran
        self._inner_nodes: list[Any] = []  # as _nodes, of backwards inside this one
        self._outermost: int | None = None  # the number of the backward that others are inside
        self._made_by: dict[int, tuple[int, int] | None] = {}  # storage -> autograd node that was running

    def add_op(self, op: int, func: Any, args: tuple, inputs: list[torch.Tensor]) -> None:
        """``op`` of backward has run."""
        if func is torch.ops.aten.add.Tensor:
            # A view holds its base and with it the storage: never added into (a linear weight's gradient is one).
            terms = [self._live.id_of(t) for t in inputs if fills_its_storage(t) and not t._is_view()]
            # A node's own formula may add two temporaries of its own; the engine adds what an earlier node left.
            if any(n is not None and self._made_by.get(n) not in (None, self._current_node()) for n in terms):
                self.targets[op] = tuple(n for n in terms if n is not None)
        elif func in SCATTERS:
            filled = self._live.id_of(args[0])
            if filled is not None and self._made_by.get(filled) == self._current_node():
                self.targets[op] = (filled,)

    def add_made(self, storages: list[int]) -> None:
        """An op of backward has made these."""
        self._made_by.update(dict.fromkeys(storages, self._current_node()))

    def _current_node(self) -> tuple[int, int] | None:
        """The autograd node that runs now, or ran last: the number of its backward, and its own in there."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        # Numbers of nodes are each thread's own, those of backwards are not: an inner one has a higher number. On an
        # accelerator the nodes of a graph that backward itself makes are numbered by the device's thread.
        backward: int = torch._C._current_graph_task_id()
        if self._outermost is None or backward < self._outermost:
            self.forget_nodes()
            self._outermost = backward
        nodes = self._nodes
        if backward != self._outermost:
            nodes = self._inner_nodes
        elif self._inner_nodes:  # that graph has run, and holds its inputs with their gradients
            _release_in_order(self._inner_nodes)
        if not nodes or nodes[-1] is not node:
            nodes.append(node)
        return backward, node._sequence_nr()

    def forget_nodes(self) -> None:
        """Drop the nodes, which hold the graph of the step and, through its hooks, this object."""
        _release_in_order(self._inner_nodes)
        _release_in_order(self._nodes)
        self._outermost = None


def _release_in_order(nodes: list[Any]) -> None:
    # Python's object of a node frees the next node's, recursively: a chain of 50,000 of them overflows the stack.
    nodes.reverse()
    while nodes:
        nodes.pop()


def fold(graph: StepGraph, targets: Mapping[int, tuple[int, ...]]) -> StepGraph:
    """The step as it is without a dispatch mode; ``targets`` as in ``GradientSums``."""
    events, ops = graph.events, list(graph.ops)
    replaced_by: dict[int, int] = {}  # storage of a sum -> the term that it is added into
    skipped: set[int] = set()  # indices of events
    for at, (kind, op) in enumerate(events):
        if kind != RUN or op not in targets or len(ops[op].makes) != 1:
            continue
        dying = {}  # storage -> index of its FREE, among those right after the addition
        for after in range(at + 1, len(events)):
            kind, freed = events[after]
            if kind != FREE:
                break
            dying[replaced_by.get(freed, freed)] = after
        (made,) = ops[op].makes
        for term in (replaced_by.get(s, s) for s in targets[op]):
            if term in dying and graph.storages[term].bytes == graph.storages[made].bytes:
                replaced_by[made] = term
                skipped.add(dying[term])
                ops[op] = replace(ops[op], makes=(), writes=(term,))
                break
    if not replaced_by:
        return graph
    # A gradient of two parts is the first one, into which the second was added.
    gradients = {term for made, term in replaced_by.items() if graph.storages[made].kind == NEW_GRADIENT}
    left = [
        replace(s, kind=NEW_GRADIENT) if s.id in gradients else s for s in graph.storages if s.id not in replaced_by
    ]
    number = {s.id: i for i, s in enumerate(left)}
    number |= {made: number[term] for made, term in replaced_by.items()}

    def renumbered(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([number[s] for s in ids]) if ids else ids

    def with_numbers(op: Op) -> Op:
        return Op(  # ``replace`` takes three times as long
            op.id, op.name, op.frame, op.backward, renumbered(op.reads), renumbered(op.makes), renumbered(op.writes),
            op.workspace_bytes, op.rng_bytes, op.signature, op.dynamic, op.completes_inplace,
        )  # fmt: skip

    return replace(
        graph,
        storages=tuple([Storage(i, s.bytes, s.kind, s.op, s.output, s.fixed) for i, s in enumerate(left)]),
        ops=tuple(map(with_numbers, ops)),
        saved=renumbered(graph.saved),
        events=tuple((k, number[n] if k == FREE else n) for i, (k, n) in enumerate(events) if i not in skipped),
    )
