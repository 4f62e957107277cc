"""A layer that stores nothing but its inputs: backward runs the compiled forward again, then its own backward.

That is what ``torch.utils.checkpoint`` does around a compiled layer. A joint backward that computes everything again
is faster, as it leaves out what only the outputs need, but lives with more at its peak: Inductor orders the whole of
it, and this runs forward and backward one after the other.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from lowtide.device.generators import state_of, with_state


def storing_inputs_only(
    run: Callable[..., Sequence[Any]], *, draws: torch.device | None
) -> Callable[..., Sequence[Any]]:
    """``run`` so that autograd keeps the inputs alone.

    Args:
        run: A compiled function of tensors, whose forward gives the same bits each time.
        draws: It takes numbers from the generator of this device, whose state is kept too.
    """

    def call(*inputs: torch.Tensor) -> Sequence[Any]:
        return _RunAgain.apply(run, draws, *inputs)

    return call


class _RunAgain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Sequence[Any]], draws: torch.device | None, *inputs: torch.Tensor
    ) -> tuple:
        ctx.run, ctx.draws = run, draws
        ctx._materialize_non_diff_grads = False  # as in compiled code: no zeros for integers
        ctx.sizes = [None if isinstance(x, torch.Tensor) else x for x in inputs]
        given = [x for x in inputs if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(*given, *([] if draws is None else [state_of(draws)]))
        outputs = run(*(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs))
        tensors = [y for y in outputs if isinstance(y, torch.Tensor)]
        ctx.mark_non_differentiable(*(y for y in tensors if not (y.is_floating_point() or y.is_complex())))
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # as compiled code is
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple:
        kept = list(ctx.saved_tensors)
        again = nullcontext() if ctx.draws is None else with_state(ctx.draws, kept.pop())
        tensors = [x.detach().requires_grad_(x.requires_grad) for x in kept]
        del kept
        given = iter(tensors)
        inputs = [next(given) if size is None else size for size in ctx.sizes]
        ctx.maybe_clear_saved_tensors()  # unless the graph is kept: they go when this returns, not after its hooks
        with torch.enable_grad(), again:
            outputs = ctx.run(*inputs)
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None and y.requires_grad]
        edges, directions = [get_gradient_edge(y) for y, _ in pairs], [g for _, g in pairs]
        del outputs, pairs  # they live on where backward reads them
        wanted = [x for x in tensors if x.requires_grad]
        found = iter(
            torch.autograd.grad(edges, wanted, directions, allow_unused=True) if edges else [None] * len(wanted)
        )
        return None, None, *(next(found) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in inputs)
