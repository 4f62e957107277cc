"""Which nodes of a joint graph take memory: views take none, values that Inductor materialises do, fused ones do not.

Inductor writes a value to memory where it must: around calls of its own (matrix products, attention), for reductions,
for what several later kernels read, and for what the graph returns. All else is computed inside the kernels that read
it. These rules follow its scheduler; what it really did is read from its code afterwards (``generated_code.py``).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowtide.compiled import collectives
from lowtide.compiled.partitioner import draws
from lowtide.compiled.sizes import FIXED, Sizes

aten, prims = torch.ops.aten, torch.ops.prims
VIEWS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.expand, aten.unsqueeze,
    aten.squeeze, aten.slice, aten.select, aten.alias, aten.detach, aten.as_strided,
}  # fmt: skip
REDUCTIONS = {
    aten.sum, aten.mean, aten.amax, aten.amin, aten.any, aten.var_mean, aten.prod, aten.cumsum, aten.max, aten.argmax,
}  # fmt: skip
# Fused though PyTorch's partitioner does not list them so.
FUSED_TOO = {
    prims.iota, aten.constant_pad_nd, aten.slice_scatter, aten.full, aten.index, aten.cat, prims.convert_element_type,
    aten.embedding, aten.bitwise_and, aten.gather, aten.where, aten.scalar_tensor, aten.full_like,
    prims.inductor_random, prims.inductor_lookup_seed,
}  # fmt: skip
SLOW_ELEMENTWISE = {
    "exp", "silu", "sigmoid", "tanh", "gelu", "erf", "log", "sin", "cos", "_softmax", "pow", "inductor_random",
}  # fmt: skip

_MOST_READS = 4  # Inductor's realize_reads_threshold: a value computed from more is written where two kernels read it


def packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and packet_of(node) in VIEWS


def is_part(node: fx.Node) -> bool:
    """One output of an operator that has several."""
    return node.target is operator.getitem


def is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_reduction(node: fx.Node) -> bool:
    return packet_of(node) in REDUCTIONS


def is_size(node: fx.Node) -> bool:
    """A number that stands for a size, and takes no memory."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def _is_number(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype.is_floating_point


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


class JointNodes:
    """The nodes of one joint graph, classified.

    Args:
        graph: Its nodes.
        is_forward: Whether a node is needed for what forward returns.
        num_outputs: How many values forward returns.
        sizes: Of this call.

    Attributes:
        materialised: Values that get memory, in order; of an operator with several outputs the parts.
        is_forward: Whether a node is needed for what forward returns.
        returns_number: Forward returns a number of floating point, as a loss is.
    """

    def __init__(
        self, graph: fx.Graph, is_forward: Callable[[fx.Node], bool], num_outputs: int, sizes: Sizes = FIXED
    ) -> None:
        from torch._functorch.partitioners import get_default_op_list

        self.sizes = sizes
        self._ops = get_default_op_list()
        self.nodes = list(graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.is_forward = {node: is_forward(node) for node in self.nodes}
        returned = self.nodes[-1].args[0]
        assert isinstance(returned, (list, tuple))
        nodes = [base_of(a) if isinstance(a, fx.Node) else None for a in returned]
        self.returned_forward = {n for n in nodes[:num_outputs] if n is not None}
        self.returns_number = any(map(_is_number, returned[:num_outputs]))
        self.returned_backward = {n for n in nodes[num_outputs:] if n is not None}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        self._read: dict[fx.Node, frozenset[fx.Node]] = {}  # what gets memory and a value is computed from
        self.materialised = [n for n in self.nodes if n.op == "call_function" and self._note(n)]
        self._kept = set(self.materialised)

    def at(self, sizes: Sizes) -> JointNodes:
        """The same nodes in a call of other sizes."""
        found = copy.copy(self)
        found.sizes = sizes
        return found

    def bytes_of(self, node: fx.Node) -> int:
        return self.sizes.bytes_of(node.meta.get("val"))

    @property
    def roundings(self) -> int:
        """Values of less than single precision that are computed, views aside."""
        values = [n.meta.get("val") for n in self.nodes if n.op == "call_function" and not is_view(n)]
        low = (v for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point and v.dtype.itemsize < 4)
        return sum(self.sizes.bytes_of(v) // v.dtype.itemsize for v in low)

    def is_extern(self, node: fx.Node) -> bool:
        """A kernel of its own that Inductor calls and does not write."""
        if node.op != "call_function" or is_view(node) or is_part(node):
            return False
        return not (self._ops.is_fusible(node) or is_reduction(node) or packet_of(node) in FUSED_TOO)

    def is_elementwise(self, node: fx.Node) -> bool:
        return not (self.is_extern(node) or is_reduction(node) or is_part(node))

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Who reads a value, through views."""
        if node not in self._readers:
            found: list[fx.Node] = []
            for user in node.users:
                found += self.readers(user) if is_view(user) else [] if is_size(user) else [user]
            self._readers[node] = list(dict.fromkeys(found))
        return self._readers[node]

    def _note(self, node: fx.Node) -> bool:
        """Whether it gets memory; nodes come in order."""
        inputs = [base_of(read) for read in node.all_input_nodes if not is_size(read)]
        self._read[node] = frozenset().union(*(self._read.get(read, {read}) for read in inputs))
        found = self._is_materialised(node)
        if found:
            self._read[node] = frozenset([node])
        return found

    def _is_materialised(self, node: fx.Node) -> bool:
        if is_view(node) or is_size(node) or isinstance(node.meta.get("val"), (tuple, list)):
            return False  # the parts of several outputs are values, the whole is none
        if collectives.sends(node):
            return False  # what has been waited for is the value
        if is_part(node) or self.is_extern(node) or is_reduction(node) or draws(node):
            return True
        if node in self.returned_forward or node in self.returned_backward:
            return True
        if self.bytes_of(node) == 0:
            return False
        readers = [r for r in self.readers(node) if r.op != "output"]
        if any(self.is_extern(r) for r in readers):
            return True
        if not self.is_forward[node]:  # without this the gradient of a residual would be one kernel of all layers
            return len(readers) >= 2 and len(self._read[node]) > _MOST_READS
        same = [r for r in readers if self.is_forward[r]]
        # A mask is small beside what it is made of: worth a choice of its own.
        mask = node.meta["val"].dtype in (torch.bool, torch.uint8) and len(same) < len(readers)
        return len(same) >= 2 or mask

    def sources(self, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """Values and inputs that ``node`` is computed from, and the nodes fused in between."""
        start = node.args[0] if is_part(node) else node
        assert isinstance(start, fx.Node)
        reads, fused, seen = list[fx.Node](), list[fx.Node](), set[fx.Node]()
        if start is not node:
            fused.append(start)
        work = list(start.all_input_nodes)
        while work:
            read = base_of(work.pop())
            if read in seen or is_size(read):
                continue
            seen.add(read)
            if read in self._kept or read.op in ("placeholder", "get_attr"):
                reads.append(read)
            else:
                fused.append(read)
                work += read.all_input_nodes
        return sorted(reads, key=self.order.__getitem__), fused
