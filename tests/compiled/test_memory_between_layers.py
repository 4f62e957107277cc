"""What lives between compiled layers, from one real step, by hooks and the allocator's events."""

import pytest
import torch
from torch import nn

from lowtide.compiled.choice import BACKWARD, BETWEEN, FORWARD
from lowtide.compiled.generated_code import VariantMemory
from lowtide.compiled.memory_between_layers import MemoryBetweenLayers

KIB = 1024
CPU = torch.device("cpu")
ROW = 32 * KIB  # bytes of what each layer makes, keeps and returns


class CompiledFunctionLike(torch.autograd.Function):
    """Doubles: stores a copy of its result, as compiled code stores what it made."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x * 2
        return ctx.kept.clone()

    @staticmethod
    def backward(ctx, gradient):
        made = gradient * 2
        del ctx.kept
        return made


# By hand: it makes two rows, keeps one, returns one. Backward makes one, frees what it kept and the gradient.
MEMORY = VariantMemory(
    stored_bytes=ROW,
    forward_peak_bytes=2 * ROW,
    forward_end_bytes=2 * ROW,
    backward_peak_bytes=ROW,
    backward_end_bytes=-ROW,
)


def watched(layers=3):
    weight = nn.Parameter(torch.ones(8 * KIB))
    weight.grad = torch.zeros_like(weight)
    watch = MemoryBetweenLayers(CPU)
    rows = [weight * 1.0]  # none of which goes while a layer runs
    for i in range(layers):
        watch.enter_forward(str(i), rows[-1:])
        rows.append(CompiledFunctionLike.apply(rows[-1]))
        watch.leave_forward(str(i), object(), MEMORY, rows[-1:], rows[-1].grad_fn, compiled_now=False)
    loss = (rows[-1] * 1.5).sum()  # a gradient with memory of its own
    loss.backward()
    return watch


class SavesWhatItReturns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        made = x * 2
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


@pytest.mark.usefixtures("one_thread")
def test_what_a_layer_returned_and_saves_is_counted_once_where_nobody_else_holds_it():
    """As the logits of a model as one graph: whoever called it took the loss alone."""
    memory = VariantMemory(
        stored_bytes=0, forward_peak_bytes=ROW, forward_end_bytes=ROW, backward_peak_bytes=ROW, backward_end_bytes=0,
        saved_output_bytes=ROW,
    )  # fmt: skip

    def live_in_backward(is_held):
        weight = nn.Parameter(torch.ones(8 * KIB))
        weight.grad = torch.zeros_like(weight)
        watch = MemoryBetweenLayers(CPU)
        x = weight * 1.0
        watch.enter_forward("all", [x])
        made = SavesWhatItReturns.apply(x)
        watch.leave_forward("all", object(), memory, [made], made.grad_fn, compiled_now=False)
        loss = made.sum()
        held = made if is_held else None
        del made
        loss.backward()
        assert watch.complete and (held is not None) == is_held
        return next(moment.live_bytes for moment in watch.moments if moment.kind == BACKWARD)

    assert live_in_backward(True) - live_in_backward(False) == ROW


@pytest.mark.usefixtures("one_thread")
def test_every_layer_is_found_twice_with_what_is_open():
    watch = watched()

    assert watch.complete and not watch.failed
    assert watch.handed_on == {"0", "1"}  # the last one's output goes elsewhere
    assert [(m.kind, m.layer) for m in watch.moments if m.kind != BETWEEN] == [
        *((FORWARD, str(i)) for i in range(3)),
        *((BACKWARD, str(i)) for i in (2, 1, 0)),
    ]
    assert [dict(m.open) for m in watch.moments if m.kind == BACKWARD] == [
        {"0": 1, "1": 1, "2": 1}, {"0": 1, "1": 1}, {"0": 1},
    ]  # fmt: skip


@pytest.mark.usefixtures("one_thread")
def test_what_layers_store_is_left_out_and_gradients_held_for_the_hooks_too():
    watch = watched()
    backward = [m.live_bytes for m in watch.moments if m.kind == BACKWARD]

    # One gradient lives at each: no layer's stored bytes, and no drift from one layer to the next.
    assert max(backward) - min(backward) < KIB
    assert watch.off_bytes == 0


@pytest.mark.usefixtures("one_thread")
def test_a_step_without_backward_is_not_complete_and_leaves_nothing_on():
    watch = MemoryBetweenLayers(CPU)
    watch.enter_forward("a", [])
    watch.stop()

    assert not watch.complete
    assert not torch.autograd._profiler_enabled()


@pytest.mark.usefixtures("one_thread")
def test_a_backward_after_the_end_of_the_watch_is_not_counted():
    weight = nn.Parameter(torch.ones(8))
    watch = MemoryBetweenLayers(CPU)
    watch.enter_forward("a", [])
    x = CompiledFunctionLike.apply(weight * 1.0)
    watch.leave_forward("a", object(), MEMORY, [x], x.grad_fn, compiled_now=False)
    watch.stop()
    x.sum().backward()

    assert not [m for m in watch.moments if m.kind == BACKWARD]
    assert not torch.autograd._profiler_enabled()
