"""A function that runs again in backward: the same gradients and masks, and nothing kept but its inputs."""

import pytest
import torch
from support.training_steps import differing

from lowtide.compiled.whole_rerun import storing_inputs_only

pytestmark = pytest.mark.usefixtures("one_thread")


def layer(x, weight, bias, mask):
    hidden = torch.nn.functional.dropout((x @ weight).tanh(), 0.4, training=True)
    return [hidden * mask + bias, hidden.argmax(-1), hidden.detach()]


def inputs():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(8, 16), torch.randn(16, 16), torch.randn(16)
    return [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), torch.rand(8, 16)]


def step(run, **options):
    given = inputs()
    torch.manual_seed(1)
    made = run(*given)
    torch.rand(3)  # the generator goes on between forward and backward
    (made[0] * torch.arange(16.0)).sum().backward(**options)
    return named([*made, *(x.grad for x in given), torch.rand(3)])


def named(tensors):
    return {str(i): x for i, x in enumerate(tensors)}


def test_bits_are_those_of_one_run_and_only_inputs_are_kept():
    kept = []

    def pack(x):
        kept.append(x.data_ptr())
        return x

    given = inputs()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        storing_inputs_only(layer, draws=torch.device("cpu"))(*given)
    assert len(kept) == 5 and set(kept[:4]) == {x.data_ptr() for x in given}  # and the generator's state
    expected, found = step(layer), step(storing_inputs_only(layer, draws=torch.device("cpu")))
    assert differing(expected, found) == []
    assert differing(expected, step(storing_inputs_only(layer, draws=None))) != []  # another mask


def test_a_kept_graph_runs_again_each_time():
    given = inputs()[:3]
    run = storing_inputs_only(lambda x, w, b: [(x @ w).tanh() + b], draws=None)
    loss = run(*given)[0].square().sum()
    first = torch.autograd.grad(loss, given, retain_graph=True)
    assert differing(named(first), named(torch.autograd.grad(loss, given))) == []
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, given)


def test_a_second_derivative_is_refused():
    x, weight = inputs()[:2]
    loss = storing_inputs_only(lambda x, w: [(x @ w).tanh()], draws=None)(x, weight)[0].square().sum()
    (gradient,) = torch.autograd.grad(loss, [x], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_an_input_that_was_written_since_is_an_error():
    x, weight = inputs()[:2]
    held = x * 1
    loss = storing_inputs_only(lambda x, w: [(x @ w).tanh()], draws=None)(held, weight)[0].sum()
    held.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
