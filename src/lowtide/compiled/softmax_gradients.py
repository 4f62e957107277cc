"""The gradient of a softmax, written over the gradient that it is made from.

Behind compiled layers the loss sets the peak: backward of a log-softmax holds its result, the incoming gradient and
the outgoing one, each as large as all logits. Its kernel reads a row before it writes it, so the outgoing gradient can
take the place of the incoming one where nothing else holds that. Values and time stay; the peak is a third lower.

Reference counts show whether anything else holds a tensor. The counts of an unshared gradient are measured once, on a
small graph, which also proves the bits. Where shared and unshared gradients have the same counts, nothing is
overwritten.
"""

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as num_modes
from torch._C import _storage_Use_Count as storage_use_count
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode

from lowtide.step.module_calls import never_compiled
from lowtide.step.node_hooks import call_around

_aten = torch.ops.aten
_KERNELS = {  # by autograd node: the kernel, and what it calls the tensor that it writes
    "LogSoftmaxBackward0": (_aten._log_softmax_backward_data, "out"),
    "SoftmaxBackward0": (_aten._softmax_backward_data, "grad_input"),
}
_MOST_NODES = 1000  # between the loss and the last layers
_TRIED_ROWS = 3
_MARK = "lowtide: written over"  # in a node's metadata: a graph that is kept runs backward more than once

Counts = tuple[int, int, int]  # references to a tensor: of its storage, of torch, of Python


class SoftmaxGradients(TorchDispatchMode):
    """Watches the softmaxes between a loss and the compiled layers; a mode that is on in their backward only.

    Args:
        is_layer: Whether an autograd node is that of a compiled layer of this model: nothing behind it is looked at.

    Attributes:
        held_bytes: Gradients of the last backward that could not be written over, since something else holds them.
    """

    def __init__(self, is_layer: Callable[[Any], bool]) -> None:
        super().__init__()
        self._is_layer = is_layer
        self.held_bytes = 0

    def before_backward(self, roots: Iterable[Any], *, creates: bool) -> None:
        """Have the softmaxes of this graph run under the mode, if the graph leads to compiled layers."""
        self.held_bytes = 0
        if sys.gettrace() is not None:  # a debugger holds what it sees: counts would say nothing
            return
        for node in self._softmaxes(roots):
            if _MARK not in node.metadata and _can_be_told(node):
                node.metadata[_MARK] = True
                self.follow(node)

    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None:
        """Nothing."""

    def follow(self, node: Any) -> None:
        """Be on while ``node`` runs. Where it fails the engine takes the mode off."""

        def begin(gradients: Any) -> None:
            _push_mode(self)

        def end(made: Any, gradients: Any) -> None:
            _pop_mode()

        call_around(node, begin, end)

    def _softmaxes(self, roots: Iterable[Any]) -> list[Any]:
        """Their nodes; none where there is no compiled layer behind them."""
        nodes = [r.grad_fn if isinstance(r, torch.Tensor) else r.node for r in roots]
        work = [node for node in nodes if node is not None]
        seen, found, layers = set(work), [], False
        while work and len(seen) < _MOST_NODES:
            node = work.pop()
            if self._is_layer(node):
                layers = True
                continue
            if node.name() in _KERNELS:
                found.append(node)
            new = [n for n, _ in node.next_functions if n is not None and n not in seen]
            seen.update(new)
            work += new
        return found if layers else []

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _node_of(func)
        if not name:
            return func(*args, **(kwargs or {}))
        counts = counts_of(args)
        alone = _alone(name, args[0].dtype, args[0].shape[-1], args[0].device) if _fits(*args) else None
        if alone is None:
            return func(*args)
        # Another mode may keep what it sees. A backward that makes a graph holds the gradient for that.
        if num_modes() or any(more > least for more, least in zip(counts, alone, strict=True)):
            self.held_bytes += args[0].nbytes
            return func(*args)
        return _write_over(name, args)


class _Counting(SoftmaxGradients):
    """Only notes the counts; ``writes``: it writes over every gradient too."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__(lambda node: False)
        self.counts: Counts = (0, 0, 0)
        self._writes = writes

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _node_of(func)
        if not name:
            return func(*args, **(kwargs or {}))
        self.counts = counts_of(args)
        return _write_over(name, args) if self._writes else func(*args)


def _node_of(func: Any) -> str:
    """The autograd node whose kernel ``func`` is; "" for any other."""
    return next((name for name, (kernel, _) in _KERNELS.items() if func is kernel.default), "")


def _write_over(name: str, args: Any) -> torch.Tensor:
    kernel, result = _KERNELS[name]
    return kernel.out(*args, **{result: args[0]})


def counts_of(args: Any) -> Counts:
    """References to the gradient, which is the first of ``args``. Under no other name: that would be one more."""
    return storage_use_count(args[0].untyped_storage()._cdata), args[0]._use_count(), sys.getrefcount(args[0])


def _fits(gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel makes of ``gradient`` a tensor of the same shape, row by row."""
    return (
        gradient.dim() > 0
        and gradient.dtype == output.dtype == dtype
        and dim in (-1, gradient.dim() - 1)
        and gradient.shape == output.shape
        and gradient.is_contiguous()
        and output.is_contiguous()
        and type(gradient) is torch.Tensor
    )


def _can_be_told(node: Any) -> bool:
    """Whether this softmax is of a kind for which the counts and the bits have shown what they should."""
    try:
        made = node._saved_result
    except RuntimeError:  # the graph is gone, which the engine says in its own words
        return False
    return made.dim() > 0 and _alone(node.name(), made.dtype, made.shape[-1], made.device) is not None


@cache
def _alone(name: str, dtype: torch.dtype, columns: int, device: torch.device) -> Counts | None:
    """The counts of an unshared gradient; None where the counts show no sharing, or the bits differ."""
    if not dtype.is_floating_point:
        return None
    tried = partial(_tried, name, dtype, columns, device)
    plain, free = tried(writes=False)
    written, again = tried(writes=True)
    # Held by Python, by another tensor of the same memory, by the engine.
    held = [tried(writes=False, hold=hold)[1] for hold in ("itself", "a view", "a result")]
    told = all(any(m > f for m, f in zip(more, free, strict=True)) for more in held)
    return free if told and free == again and torch.equal(plain, written) else None


def _tried(
    name: str, dtype: torch.dtype, columns: int, device: torch.device, *, writes: bool, hold: str = ""
) -> tuple[torch.Tensor, Counts]:
    """A small softmax's gradient, and the counts of what it was made from."""
    ramp = torch.linspace(-1, 1, _TRIED_ROWS * columns, dtype=torch.float64, device=device).reshape(-1, columns)
    start, other = ramp.to(dtype, copy=True).requires_grad_(), torch.zeros_like(ramp, dtype=dtype).requires_grad_()
    mode, kept = _Counting(writes=writes), list[Any]()
    with _disable_current_modes(), torch.enable_grad():
        made = (torch.log_softmax if name == "LogSoftmaxBackward0" else torch.softmax)(start, -1)
        mode.follow(made.grad_fn)
        if hold == "itself":
            made.register_hook(kept.append)
        elif hold == "a view":
            made.register_hook(lambda gradient: kept.append(gradient.detach()))
        total = made + other if hold == "a result" else made
        loss = (total * ramp.to(dtype).cos()).sum()
        del made, total
        found, *_ = torch.autograd.grad(loss, [start, other] if hold == "a result" else [start])
    return found, mode.counts
