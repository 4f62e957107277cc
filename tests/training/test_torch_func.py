"""Inside transforms of ``torch.func`` nothing is taped: they run as without lowtide, and that is told."""

import pytest
import torch
from support.watched_training import Layered, batch_of
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, vjp, vmap
from torch.nn.functional import layer_norm

import lowtide
from lowtide.step import seam
from lowtide.tape import plain_derivatives
from lowtide.training.past_training import _MANY_CALLS

pytestmark = pytest.mark.usefixtures("one_thread")


def of_parameters(model: torch.nn.Module, x: torch.Tensor):
    return lambda parameters: functional_call(model, parameters, (x,)).square().mean()


def with_grad(model, x):
    return grad(of_parameters(model, x))(dict(model.named_parameters()))


def with_vjp(model, x):
    _, back = vjp(of_parameters(model, x), dict(model.named_parameters()))
    return back(torch.ones(()))[0]


def per_sample(model, x):
    parameters = dict(model.named_parameters())
    each = vmap(lambda row: grad(of_parameters(model, row[None]))(parameters), randomness="same")
    return {name: g.mean(0) for name, g in each(x[:4]).items()}


def curvature(model, x):
    """Beside a step: it sets no gradient."""
    hessian(lambda row: model.layers[0](row).sum())(x[0])
    jacrev(lambda row: model.layers[0](row))(x[0])
    return {}


def along_a_direction(model, x):
    """Forward-mode AD. The formula of a layer norm has other bits where a dispatch mode is there."""
    with forward_ad.dual_level():
        y = layer_norm(model(forward_ad.make_dual(x, x.cos())), x.shape[1:])
        slope = forward_ad.unpack_dual(y).tangent
    names, parameters = zip(*model.named_parameters())
    return dict(zip(names, torch.autograd.grad(slope.square().mean(), parameters, materialize_grads=True)))


KINDS = [with_grad, with_vjp, per_sample, curvature, along_a_direction]


def trained(inside, *, budget: str | None, between: bool) -> list[torch.Tensor]:
    """Weights after steps with ``inside`` before, or between, forward and backward."""
    torch.manual_seed(0)
    model = Layered()
    model.eval()  # transforms refuse dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit = None if budget is None else lowtide.fit(model, budget=budget)
    torch.manual_seed(1)
    for i in range(4):
        x = batch_of() + i
        found = {} if between else inside(model, x)
        loss = model(x).square().mean()
        found = inside(model, x) if between else found
        loss.backward()
        for name, p in model.named_parameters():
            p.grad += found.get(name, 0.0)
        optimizer.step()
        optimizer.zero_grad()
        if fit is not None:
            fit.wait()
    if fit is not None:
        assert fit.status().steps >= 4 and fit.status().planned_steps
        fit.remove()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("between", [False, True], ids=["before", "between forward and backward"])
@pytest.mark.parametrize("inside", KINDS)
def test_transforms_beside_a_planned_step_run_as_plain(inside, between):
    plain = trained(inside, budget=None, between=between)
    ours = trained(inside, budget="70%", between=between)
    assert all(map(torch.equal, plain, ours))


def of_a_layer_norm(x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer_norm(forward_ad.make_dual(x, x.cos()), x.shape[1:])).tangent


def test_a_mode_in_place_would_change_bits_in_forward_mode(monkeypatch):
    model, x = Layered(), batch_of()
    expected = of_a_layer_norm(x)
    with lowtide.fit(model, budget="1GiB"):
        loss = model(x).square().mean()
        assert torch.equal(of_a_layer_norm(x), expected)
        monkeypatch.setattr(plain_derivatives, "anything_of_ours_is_on", lambda: False)
        assert not torch.equal(of_a_layer_norm(x), expected)
        loss.backward()


def test_with_hooks_in_place_transforms_would_fail(monkeypatch):
    monkeypatch.setattr(seam, "_is_ours", lambda pack: False)
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        trained(with_grad, budget="70%", between=True)


def test_hooks_of_the_users_own_are_refused_as_ever():
    model = Layered()
    with lowtide.fit(model, budget="1GiB"), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = model(batch_of()).square().mean()
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            with_grad(model, batch_of())
    loss.backward()


def test_transforms_under_a_compiler_are_its_own():
    model = Layered()
    compiled = torch.compile(lambda x: grad(lambda y: y.sin().sum())(x), backend="eager", fullgraph=True)
    with lowtide.fit(model, budget="1GiB"):
        model(batch_of()).square().mean().backward()
        assert torch.equal(compiled(torch.ones(3)), torch.ones(3).cos())


@pytest.mark.parametrize("step", ["transforms", "forward mode", "no backward"])
def test_steps_that_nobody_sees_are_told_of_after_ten_calls(step):
    model = Layered()
    with lowtide.fit(model, budget="1GiB") as fit:
        for _ in range(_MANY_CALLS):
            assert not [line for line in fit.warnings if "calls of the model" in line]
            if step == "transforms":
                grad_and_value(of_parameters(model, batch_of()))(dict(model.named_parameters()))
            elif step == "forward mode":
                along_a_direction(model, batch_of())
            else:
                model(batch_of())
        (line,) = [line for line in fit.warnings if "calls of the model" in line]
        assert ("torch.func" in line) == (step != "no backward")
        if step == "no backward":
            for _ in range(2):
                model(batch_of()).square().mean().backward()
            assert line not in fit.warnings
