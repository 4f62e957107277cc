"""What a compiled layer sends between ranks, as under tensor parallelism: the same as the plain layer, in its order.

Each rank plans for itself, so ranks may run different variants of a layer at a time. They still meet in each
collective: a variant that would send something again, or in another order than the plain layer, is left out. Inductor
keeps the order of its graph. While a variant is tried, nothing is sent: ranks would have to agree on when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.step.module_calls import never_compiled
from lowtide.step.operators import is_wrapper_type

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "symm_mem")
_WAIT = "wait_tensor"


def _gathered(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return torch.cat([x] * ranks)


def _scattered(x: torch.Tensor, op: str, ranks: int, group: str) -> torch.Tensor:
    return x.chunk(ranks)[0].contiguous().clone()


def _copied(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _itself(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return x


def _exchanged(x: torch.Tensor, to_here: list[int], from_here: list[int], group: str) -> torch.Tensor:
    rows = torch.arange(sum(to_here), device=x.device)
    return x[rows % max(1, len(x))]


# What takes the place of a collective where there is one rank: values of the right size, which depend on the input.
_ALONE: dict[str, Callable[..., torch.Tensor]] = {
    "all_gather_into_tensor": _gathered, "all_gather_into_tensor_out": _gathered,
    "reduce_scatter_tensor": _scattered, "reduce_scatter_tensor_out": _scattered,
    "all_reduce": _copied, "all_reduce_": _itself, "broadcast": _copied, "broadcast_": _itself,
    "all_to_all_single": _exchanged, _WAIT: _itself,
}  # fmt: skip


def name_of(target: Any) -> str:
    """Of an operator that sends, or waits for what was sent; "" for any other."""
    if getattr(target, "namespace", "") not in _NAMESPACES:
        return ""
    return str(target._schema.name).partition("::")[2]


def sends(node: fx.Node) -> bool:
    """Whether ``node`` begins to send; its value is there once another node has waited for it."""
    return node.op == "call_function" and name_of(node.target) not in ("", _WAIT)


def waits(node: fx.Node) -> bool:
    return node.op == "call_function" and name_of(node.target) == _WAIT


def sent_by(graph: fx.Graph) -> tuple[str, ...]:
    """What a graph sends, in order: names of its nodes, which are those of the joint graph that it is a part of."""
    return tuple(node.name for node in graph.nodes if sends(node))


def unknown_in(graph: fx.Graph) -> str:
    """The first operator that sends in a way that is not known here; "" if there is none."""
    names = (name_of(node.target) for node in graph.nodes if node.op == "call_function")
    return next((name for name in names if name and name not in _ALONE), "")


def returns_its_input(target: Any) -> bool:
    """Whether an operator of generated code gives back what it is given, written or waited for."""
    return _ALONE.get(name_of(target)) is _itself


class Alone(TorchDispatchMode):
    """Inside, nothing is sent: what a collective gives is made of this rank's part."""

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper_type, types)):
            return NotImplemented
        name = name_of(func)
        if not name:
            return func(*args, **(kwargs or {}))
        out = (kwargs or {}).get("out")
        made = _ALONE[name](*args)
        return made if out is None else out.copy_(made)
