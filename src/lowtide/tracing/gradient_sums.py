"""Undo a difference that recording makes: under a dispatch mode the engine adds gradients out of place.

Where a node's gradient arrives in parts, autograd adds the second part into the first when nothing else refers to
it. ``can_accumulate_inplace`` (torch/csrc/autograd/input_buffer.cpp) says no whenever a dispatch mode is on, so the
recorder sees ``add`` and a new storage where the plain step has neither. On a state-space model that was 9 % of
the peak. A sum of which one term dies at once is therefore folded into that term. The same holds for what backward
formulas scatter into zeros (of ``gather`` and ``topk``, say): ``areAnyTensorSubclassLike`` makes them write to a new
storage under a mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lowtide.graph.step_graph import FREE, RUN, Op, StepGraph
from lowtide.tracing.live_storages import LiveStorages
from lowtide.tracing.operators import SCATTERS, fills_its_storage


class GradientSums:
    """Finds the engine's own additions among the ops of backward, by the autograd nodes that made their inputs.

    Attributes:
        targets: Op id of each addition -> the storages it may add into, in the engine's order.
    """

    def __init__(self, live: LiveStorages) -> None:
        self.targets: dict[int, tuple[int, ...]] = {}
        self._live = live
        self._nodes: list[Any] = []  # in the order in which they ran
        self._inner_nodes: list[Any] = []  # as _nodes, of a graph that backward itself made
        self._first_inner_node = 0
        self._made_by: dict[int, int | None] = {}  # storage -> autograd node that was running

    def start_backward(self) -> None:
        self._first_inner_node = torch._C._autograd._get_sequence_nr()

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

    def _current_node(self) -> int | None:
        """The sequence number of the autograd node that runs now, or ran last."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        number: int = node._sequence_nr()
        nodes = self._nodes
        if number >= self._first_inner_node:
            nodes = self._inner_nodes
        elif self._inner_nodes:  # that graph has run, and holds its inputs with their gradients
            _release_in_order(self._inner_nodes)
        if not nodes or nodes[-1] is not node:
            nodes.append(node)
        return number

    def forget_nodes(self) -> None:
        """Drop the nodes that were seen, which hold the graph of the step and, through its hooks, this object."""
        _release_in_order(self._inner_nodes)
        _release_in_order(self._nodes)


def _release_in_order(nodes: list[Any]) -> None:
    # Python's object of a node frees the next node's, recursively: a chain of 50,000 of them overflows the stack.
    nodes.reverse()
    while nodes:
        nodes.pop()


def fold(graph: StepGraph, targets: Mapping[int, tuple[int, ...]]) -> StepGraph:
    """The step as it is without a dispatch mode; ``targets`` as in ``GradientSums``."""
    sizes = [s.bytes for s in graph.storages]
    ops, events, replaced_by = _folded(list(graph.ops), list(graph.events), targets, sizes)
    left = [s for s in graph.storages if s.id not in replaced_by]
    number = {s.id: i for i, s in enumerate(left)}
    number |= {sum_: number[term] for sum_, term in replaced_by.items()}

    def renumbered(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number[s] for s in ids)

    return replace(
        graph,
        storages=tuple(replace(s, id=i) for i, s in enumerate(left)),
        ops=tuple(
            replace(o, reads=renumbered(o.reads), makes=renumbered(o.makes), writes=renumbered(o.writes)) for o in ops
        ),
        saved=renumbered(graph.saved),
        events=tuple((kind, number[n]) if kind == FREE else (kind, n) for kind, n in events),
    )


def _folded(
    ops: list[Op], events: list[tuple[int, int]], targets: Mapping[int, tuple[int, ...]], sizes: list[int]
) -> tuple[list[Op], list[tuple[int, int]], dict[int, int]]:
    """Ops and events without the sums' storages, and which storage replaces each of those."""
    replaced_by: dict[int, int] = {}
    kept: list[tuple[int, int]] = []
    skipped: set[int] = set()
    for at, (kind, number) in enumerate(events):
        if at in skipped:
            continue
        if kind == FREE:
            kept.append((FREE, replaced_by.get(number, number)))
            continue
        if kind == RUN:
            op = ops[number]
            reads = tuple(replaced_by.get(s, s) for s in op.reads)
            ops[number] = op = replace(op, reads=reads, writes=tuple(replaced_by.get(s, s) for s in op.writes))
            if number in targets and len(op.makes) == 1:
                dying = {}  # storage -> index of its FREE, among those right after the addition
                after = at + 1
                while after < len(events) and events[after][0] == FREE:
                    dying[replaced_by.get(events[after][1], events[after][1])] = after
                    after += 1
                made = op.makes[0]
                for term in (replaced_by.get(s, s) for s in targets[number]):
                    if term in dying and sizes[term] == sizes[made]:
                        replaced_by[made] = term
                        skipped.add(dying[term])
                        ops[number] = replace(op, makes=(), writes=(term,))
                        break
        kept.append((kind, number))
    return ops, kept, replaced_by
