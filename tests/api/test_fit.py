"""What ``fit`` and ``apply`` promise a training loop, on tiny models."""

from __future__ import annotations

import copy
import gc
import pickle
import random

import numpy as np
import pytest
import torch
from support.training_steps import (
    deep,
    differing,
    harshest,
    is_clean,
    mlp,
    outcome,
    plain,
    run,
    same_state,
    state_of,
    tight,
)
from torch import nn

import lowtide
from lowtide import LowtideError
from lowtide.plan import RECOMPUTE

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(model: nn.Module, steps: int = 4, batch: int = 64) -> tuple[list[torch.Tensor], nn.Module]:
    """Losses of a plain training loop, and the model afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(steps, batch, 32, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    torch.manual_seed(2)
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model


def test_training_under_apply_is_bitwise_the_plain_training():
    """A plan of the whole step: what an optimizer runs first, before it writes, may begin the next pass."""
    losses, bare = trained(deep())
    model = deep()
    graph = lowtide.trace(model, torch.randn(64, 32), step=lambda model, x: model(x).square().mean())
    plan = lowtide.solve(graph, lowtide.measure(graph), budget="60%")

    with lowtide.apply(model, plan):
        found, _ = trained(model)

    assert plan.counts[RECOMPUTE] > 1
    assert all(map(torch.equal, losses, found))
    assert all(map(torch.equal, bare.state_dict().values(), model.state_dict().values()))


def test_training_under_fit_is_bitwise_the_plain_training():
    losses, bare = trained(deep())
    fit = tight(model := deep(), torch.randn(64, 32), optimizer="adamw")

    found, model = trained(model)

    assert fit.plan.counts[RECOMPUTE] > 1
    assert fit._lifecycle.plans_by_shape.plans[0].tape.counts.mismatched == 0
    assert fit._lifecycle.plans_by_shape.plans[0].tape.counts.steps == 4
    assert all(map(torch.equal, losses, found))
    assert all(map(torch.equal, bare.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("verb", ["fit", "trace", "verify"])
def test_gradients_buffers_and_generators_are_left_untouched(verb):
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = deep()
            self.register_buffer("average", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average = 0.9 * self.average + 0.1 * x.mean().detach()  # assigned anew, not written
            return self.inner(x) * random.random() * float(np.random.rand())

    model, x = Draws(), torch.randn(64, 32, requires_grad=True)
    plan = harshest(model, x)
    next(model.parameters()).grad = torch.randn(32, 32)  # the others have none
    x.grad = torch.ones(64, 32)
    before, batch = state_of(model), [x.detach().clone(), x.grad.clone(), id(x.grad), x._version]

    if verb == "fit":
        lowtide.fit(model, x, budget="70%").remove()
    elif verb == "trace":
        lowtide.trace(model, x)
    else:
        lowtide.verify(model, x, plan, rounds=1)

    assert same_state(before, state_of(model))
    assert same_state(batch, [x.detach(), x.grad, id(x.grad), x._version])


@pytest.mark.thorough
def test_the_first_fit_of_a_process_moves_no_generator():
    script = (
        "import random, numpy, torch, lowtide\n"
        "model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.randn(4, 8)\n"
        "def state(): return random.getstate(), numpy.random.get_state()[1:3], torch.get_rng_state()\n"
        "a = state(); lowtide.fit(model, x, budget='100%').report(); b = state()\n"
        "print(a[0] == b[0], (a[1][0] == b[1][0]).all() and a[1][1] == b[1][1], torch.equal(a[2], b[2]))\n"
    )
    assert run(script) == "True True True\n"


def test_class_names_and_state_dict_stay_and_remove_restores(drops_all):
    model, x = deep(), torch.randn(64, 32)
    names = list(model.state_dict()), [n for n, _ in model.named_parameters()], [n for n, _ in model.named_modules()]
    before = state_of(model)
    fit = lowtide.fit(model, x, budget="100%")

    assert type(model) is nn.Sequential
    assert list(model.state_dict()) == names[0]
    assert [n for n, _ in model.named_parameters()] == names[1]
    assert [n for n, _ in model.named_modules()] == names[2]

    fit.remove()
    fit.remove()
    assert same_state(before, state_of(model))
    assert is_clean(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_fitted_model_is_plain(copied, drops_all):
    fit = lowtide.fit(model := deep(), x := torch.randn(64, 32), budget="100%")

    other = copied(model)
    fit.remove()
    torch.manual_seed(7)
    loss = other(x).square().mean()
    loss.backward()

    assert is_clean(other)
    assert fit._lifecycle.plans_by_shape.plans[0].tape.counts.steps == 0
    assert differing(plain(model, x), outcome(other, loss)) == []


def test_a_fitted_model_dies_with_its_last_user():
    import weakref

    model = deep()
    fit = lowtide.fit(model, torch.randn(64, 32), budget="100%")
    watched = weakref.ref(model)
    del model
    gc.collect()

    assert watched() is None
    with pytest.raises(LowtideError, match="gone"):
        fit.model  # noqa: B018
    fit.remove()


def test_two_fits_on_one_model_are_refused():
    model, x = mlp(), torch.randn(4, 16)
    fit = lowtide.fit(model, x, budget="100%")
    plan = fit.plan
    attached = [m._compiled_call_impl for m in model.modules()]

    for second in (lambda: lowtide.fit(model, x, budget="100%"), lambda: lowtide.apply(model, plan).__enter__()):
        with pytest.raises(LowtideError) as error:
            second()
        assert str(error.value) == (
            "the model is already fitted: two plans cannot drive one module.\n"
            "Call fit.remove() (or leave lowtide.apply) first."
        )
    assert [m._compiled_call_impl for m in model.modules()] == attached
    fit.remove()
    lowtide.fit(model, x, budget="100%").remove()


def test_a_model_in_eval_mode_trains_under_its_own_plan(drops_all):
    model, x = deep().eval(), torch.randn(64, 32)
    fit = lowtide.fit(model, x, budget="100%")
    expected = plain(model, x)

    torch.manual_seed(7)
    loss = model(x).square().mean()
    loss.backward()
    fit.remove()

    assert fit._lifecycle.plans_by_shape.plans[0].tape.counts.dropped
    assert differing(expected, outcome(model, loss)) == []


def test_calls_without_gradients_between_steps_are_plain(drops_all):
    model, x = deep(), torch.randn(64, 32)
    bare = copy.deepcopy(model)
    fit = lowtide.fit(model, x, budget="100%")
    for _ in range(2):
        found = []
        for m in (bare, model):
            torch.manual_seed(7)
            m.zero_grad()
            with torch.no_grad():
                m(x)
            with torch.inference_mode():
                m(x[:5])
            m.eval()
            with torch.no_grad():
                quiet = m(x)
            m.train()
            loss = m(x).square().mean()
            loss.backward()
            found.append({**outcome(m, loss), "quiet": quiet})
        assert differing(*found) == []

    counts = fit._lifecycle.plans_by_shape.plans[0].tape.counts
    assert (counts.steps, counts.mismatched, len(fit.plans)) == (2, 0, 1)


def test_no_grad_calls_inside_apply_are_no_part_of_the_step():
    model, x = mlp(), torch.randn(4, 16)
    plan = harshest(model, x)
    with lowtide.apply(model, plan) as applied:
        for _ in range(3):
            with torch.no_grad():
                model(x)
            model.zero_grad()
            torch.manual_seed(7)
            loss = model(x).square().mean()
            loss.backward()
            assert differing(plain(copy.deepcopy(mlp()), x), outcome(model, loss)) == []
            with torch.no_grad():
                model(x[:2])

    assert applied.counts.mismatched == 0
    assert applied.counts.dropped == 3 * sum(d.action == RECOMPUTE for d in plan.decisions)


def test_gradients_accumulate_over_micro_batches():
    model, x = deep(), torch.randn(4, 64, 32)
    bare = copy.deepcopy(model)
    fit = lowtide.fit(model, x[0], budget="60%")
    for m in (bare, model):
        torch.manual_seed(7)
        for micro in x:
            (m(micro).square().mean() / 4).backward()

    assert differing(outcome(bare, x.sum()), outcome(model, x.sum())) == []
    plans = fit._lifecycle.plans_by_shape.plans
    assert {planned.shapes[0].has_gradients for planned in plans} == {
        False,
        True,
    }  # the first micro-batch, and later ones
    assert fit.status().planned_steps == 4


def test_several_steps_inside_one_apply_are_one_pass_each():
    model, x = mlp(), torch.randn(4, 16)
    plan = harshest(model, x)
    optimizer = torch.optim.AdamW(model.parameters())
    bare = copy.deepcopy(model)
    same = torch.optim.AdamW(bare.parameters())

    with lowtide.apply(model, plan) as applied:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for _ in range(3):
        same.zero_grad()
        bare(x).square().mean().backward()
        same.step()

    assert all(map(torch.equal, bare.state_dict().values(), model.state_dict().values()))
    assert applied.counts.mismatched == 0
