"""The gradient of a softmax written over the one that comes in: same bits, lower peak, and never where it is held."""

from functools import partial

import pytest
import torch
from support.compiled_layers import Decoder
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.compiled import softmax_gradients
from lowtide.compiled.memory_between_layers import is_of, mark
from lowtide.compiled.softmax_gradients import SoftmaxGradients
from lowtide.measurement.allocator import peak_bytes
from lowtide.step import backward_entry

ROWS, COLUMNS, WIDTH = 256, 1024, 16
MIB = 1 << 20  # of logits in float32

pytestmark = pytest.mark.usefixtures("one_thread")


MODEL = object()  # that the layers are of


class CompiledFunctionLike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.0


def layer_of(owner):
    """A compiled layer of that model."""

    def layer(x):
        made = CompiledFunctionLike.apply(x)
        mark([made], owner)
        return made

    return layer


@pytest.fixture
def watcher():
    made = SoftmaxGradients(partial(is_of, MODEL))
    undo = backward_entry.observe(made)
    yield made
    undo()


def start(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH, dtype=dtype), torch.randn(COLUMNS, WIDTH, dtype=dtype).requires_grad_()


def loss_of(x, weight, softmax=torch.log_softmax, hook=None, dim=-1, layer=None):
    logits = (layer or layer_of(MODEL))(x.requires_grad_()) @ weight.t()
    made = softmax(logits, dim)
    if hook is not None:
        made.register_hook(hook)
    if softmax is torch.log_softmax:
        return F.nll_loss(made, torch.arange(ROWS))
    return (made @ torch.arange(COLUMNS, dtype=made.dtype).sin()).sum()


def gradients(**options):
    x, weight = start(options.pop("dtype", torch.float32))
    peak = peak_bytes(lambda: loss_of(x, weight, **options).backward())
    return peak, x.grad, weight.grad


def without(**options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax_gradients, "_KERNELS", {})
        return gradients(**options)


@pytest.mark.parametrize("softmax", [torch.log_softmax, torch.softmax])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_lower_by_the_logits_and_no_bit_differs(watcher, softmax, dtype):
    lean, *found = gradients(softmax=softmax, dtype=dtype)
    plain, *expected = without(softmax=softmax, dtype=dtype)

    assert all(map(torch.equal, found, expected))
    assert plain - lean == pytest.approx(MIB * dtype.itemsize // 4, rel=0.15)  # products take memory of their own
    assert watcher.held_bytes == 0


def test_a_gradient_that_is_held_keeps_its_values(watcher):
    for keep in (lambda g: g, lambda g: g.detach(), lambda g: g[3:], lambda g: g.numpy()):
        held, expected = [], []
        gradients(hook=lambda g, keep=keep, held=held: held.append(keep(g)))
        assert watcher.held_bytes == MIB
        without(hook=lambda g, keep=keep, expected=expected: expected.append(keep(g)))
        assert torch.equal(torch.as_tensor(held[0]), torch.as_tensor(expected[0]))


def test_a_gradient_that_another_op_gets_as_well_is_not_written_over(watcher):
    x, weight = start()
    layer = layer_of(MODEL)(x.requires_grad_())
    other = torch.zeros(ROWS, COLUMNS, requires_grad=True)
    found = torch.autograd.grad(
        F.nll_loss(torch.log_softmax(layer @ weight.t(), -1) + other, torch.arange(ROWS)), [other, weight]
    )

    assert watcher.held_bytes == MIB
    assert torch.count_nonzero(found[0]) == ROWS  # one for each label


@pytest.mark.parametrize(
    "options",
    [{"dim": 0}, {"layer": lambda x: x * 1.0}, {"layer": layer_of(object())}],
    ids=["by columns", "no compiled layer", "another model's layer"],
)
def test_other_softmaxes_are_left_alone(watcher, options):
    lean, *found = gradients(**options)
    plain, *expected = without(**options)

    assert lean == plain and all(map(torch.equal, found, expected))


def test_nothing_is_written_over_for_a_gradient_that_has_one_itself(watcher):
    x, weight = start()
    loss = loss_of(x, weight)
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax_gradients, "_KERNELS", {})
        (expected,) = torch.autograd.grad(loss_of(x, weight), weight, create_graph=True)

    assert gradient.requires_grad and torch.equal(gradient, expected)


def test_a_graph_that_is_kept_gives_the_same_gradients_again(watcher):
    x, weight = start()
    loss = loss_of(x, weight)
    first, again = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))

    assert torch.equal(first, again)


def test_a_graph_that_is_kept_for_a_gradient_that_has_one_itself_stays_right(watcher):
    found = []
    for first in (True, False):
        x, weight = start()
        loss = loss_of(x, weight)
        if first:  # its hooks stay on the graph
            torch.autograd.grad(loss, weight, retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        assert watcher.held_bytes == MIB
        found.append(torch.autograd.grad(gradient.square().sum(), weight)[0])

    assert torch.equal(*found)


def test_a_graph_that_is_gone_is_told_by_the_engine(watcher):
    loss = loss_of(*start())
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_another_mode_sees_what_it_would_see_without(watcher):
    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    loss = loss_of(*start())
    with Names() as names:
        loss.backward()

    assert "aten._log_softmax_backward_data.default" in names.seen


def test_a_backward_that_fails_leaves_no_mode_on(watcher):
    def fail(gradient):
        raise ValueError("here")

    x, weight = start()
    loss = loss_of(x, weight)
    loss.grad_fn.next_functions[0][0].register_hook(lambda made, given: fail(given))  # right behind the mode's hooks
    with pytest.raises(ValueError, match="here"):
        loss.backward()

    assert torch._C._len_torch_dispatch_stack() == 0
    _, *found = gradients()
    assert all(map(torch.equal, found, without()[1:]))


def test_where_counts_do_not_tell_who_holds_a_gradient_nothing_is_written_over(watcher, monkeypatch):
    plain = without()[0]
    softmax_gradients._alone.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(softmax_gradients, "counts_of", lambda args: (1, 1, 1))
        assert gradients()[0] == plain
    softmax_gradients._alone.cache_clear()
    assert gradients()[0] < 0.7 * plain


class Small(nn.Module):
    """A loss that is the largest part of the step; ``keep`` is a hook on what goes into it."""

    def __init__(self):
        super().__init__()
        self.inner, self.keep = Decoder(layers=2, width=16), None
        self.head = nn.Linear(16, 4096)
        for p in self.parameters():
            p.grad = torch.zeros_like(p)

    def forward(self, ids):
        x = self.inner.embed(ids)
        for block in self.inner.blocks:
            x = block(x)
        logs = torch.log_softmax(self.head(x).flatten(0, 1), -1)
        if self.keep is not None:
            logs.register_hook(self.keep)
        return F.nll_loss(logs, ids.flatten())


@pytest.mark.thorough
def test_a_compiled_model_has_the_lower_peak_and_tells_when_somebody_holds_the_gradient():
    model, ids = Small(), torch.arange(128).reshape(4, 32) % 64
    compiled = lowtide.compile(model, layers=["inner.blocks.*"])
    compiled(ids).backward()
    plan = compiled.plan
    logits = 128 * 4096 * 4

    assert plan.resident_bytes + peak_bytes(lambda: compiled(ids).backward()) <= plan.predicted_peak_bytes
    kept = []
    model.keep = kept.append
    more = plan.resident_bytes + peak_bytes(lambda: compiled(ids).backward()) - plan.predicted_peak_bytes
    assert more == pytest.approx(logits, rel=0.01) and compiled.reason == ""
    with pytest.warns(UserWarning, match=r"something holds a softmax's gradient of 2\.00 MiB"):
        compiled(ids)


def test_a_compiled_model_watches_until_it_is_taken_apart():
    before = len(backward_entry._observers)
    compiled = lowtide.compile(Small(), layers=["inner.blocks.*"])
    assert len(backward_entry._observers) > before
    compiled.remove()
    assert len(backward_entry._observers) == before
