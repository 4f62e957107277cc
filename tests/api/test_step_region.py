"""Steps that call the model in their own ways, and batches of other shapes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.training_steps import (
    Net,
    deep,
    differing,
    harshest,
    mlp,
    outcome,
    plain,
)
from torch import nn

import lowtide
from lowtide import LowtideError

pytestmark = pytest.mark.usefixtures("one_thread")


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, target = batch
    return F.cross_entropy(model(x).exp().log() * 2, target)


def test_a_step_region_tapes_the_loss_too(drops_all):
    model, batch = mlp(), (torch.randn(64, 16), torch.randint(0, 16, (64,)))
    fit = lowtide.fit(model, batch, step=loss_of, budget="100%")
    expected = plain(copy.deepcopy(mlp()), batch, loss_of)

    dropped = []
    for region in (True, False):  # called bare, what the plan drops outside the model is taped too
        before = fit._lifecycle.plans_by_shape.plans[0].tape.counts.dropped
        model.zero_grad()
        torch.manual_seed(7)
        if region:
            with fit.step_region():
                loss = loss_of(model, batch)
        else:
            loss = loss_of(model, batch)
        loss.backward()
        dropped.append(fit._lifecycle.plans_by_shape.plans[0].tape.counts.dropped - before)
        assert differing(expected, outcome(model, loss)) == []

    assert dropped[0] == dropped[1] > 0
    assert fit._lifecycle.plans_by_shape.plans[0].tape.counts.mismatched == 0


def test_a_step_region_is_open_once_at_a_time_and_closes_on_errors():
    model, x = mlp(), torch.randn(4, 16)
    fit = lowtide.fit(model, x, budget="100%")

    with fit.step_region():
        with pytest.raises(LowtideError, match="open already"):
            with fit.step_region():
                pass
    with pytest.raises(ZeroDivisionError):
        with fit.step_region():
            model(x)
            1 / 0  # noqa: B018
    with fit.step_region():
        model(x)
    fit.remove()


def test_a_step_that_never_calls_the_model_itself_is_taped_in_a_step_region(drops_all):
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model[4:](model[:4](x)).square().mean()

    model, x = mlp(), torch.randn(4, 16)
    fit = lowtide.fit(model, x, step=step, budget="100%")
    with fit.step_region():
        loss = step(model, x)
    loss.backward()

    assert fit.status().in_force
    assert fit.warnings == ["the step never calls the model itself: only what runs inside fit.step_region() is taped"]
    assert fit._lifecycle.latest.tape.counts.dropped > 4
    assert differing(plain(copy.deepcopy(mlp()), x, step), outcome(model, loss)) == []


def test_an_annealed_number_among_the_arguments_is_no_new_shape(drops_all):
    model = Net(lambda self, x, weight: self.layers[1](self.layers[0](x).sin()).sin() * weight)
    x = torch.randn(4, 8)
    fit = lowtide.fit(model, (x, 1.0), budget="100%")
    for weight in (0.9, 0.8):
        expected = plain(model, (x, weight))
        model.zero_grad()
        loss = model(x, weight).square().mean()
        loss.backward()
        assert differing(expected, outcome(model, loss)) == []

    assert len(fit.plans) == 1


def contrast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """SimCSE: the same rows twice under dropout, every other row a negative."""
    a, b = model(x), model(x)
    scores = F.cosine_similarity(a[:, None], b[None], dim=-1) / 0.05
    return F.cross_entropy(scores, torch.arange(len(x)))


def test_a_step_that_calls_the_model_twice_is_exact(drops_all):
    model, x = deep(), torch.randn(16, 32)
    expected = plain(model, x, contrast)
    fit = lowtide.fit(model, x, step=contrast, budget="100%")

    for region in (True, False):
        for m in model.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.reset_running_stats()
        model.zero_grad()
        torch.manual_seed(7)
        if region:
            with fit.step_region():
                loss = contrast(model, x)
        else:
            loss = contrast(model, x)
        loss.backward()
        assert differing(expected, outcome(model, loss)) == []
    assert fit._lifecycle.plans_by_shape.plans[0].tape.counts.mismatched == 0


def test_a_second_shape_runs_under_the_larger_plan_or_gets_one_of_its_own(drops_all):
    model = deep()
    bare = copy.deepcopy(model)
    fit = lowtide.fit(model, torch.randn(64, 32), budget="50%")
    for rows in (64, 60, 128, 128, 60):
        x = torch.randn(rows, 32)
        found = []
        for m in (bare, model):
            m.zero_grad()
            torch.manual_seed(7)
            loss = m(x).square().mean()
            loss.backward()
            found.append(outcome(m, loss))
        fit.wait()
        assert differing(*found) == []

    first, second = sorted(fit._lifecycle.plans_by_shape.plans, key=lambda p: p.shapes[0].sizes)
    assert (first.shapes[0].sizes, second.shapes[0].sizes) == ((64, 32), (128, 32))
    assert (first.tape.counts.steps, second.tape.counts.steps) == (3, 1)
    assert first.tape.counts.mismatched == second.tape.counts.mismatched == 0


def test_a_batch_that_the_model_rejects_raises_the_models_own_error_while_training():
    model = mlp()
    lowtide.fit(model, torch.randn(4, 16), budget="100%")

    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        model(torch.randn(4, 3))

    model(torch.randn(4, 16)).sum().backward()


class Scored:
    """An output whose loss only a step knows."""

    def __init__(self, score: torch.Tensor) -> None:
        self.score = score


def scoring() -> nn.Module:
    return Net(lambda self, x: Scored(self.layers[1](self.layers[0](x).sin()).sin()))


def test_a_second_shape_whose_loss_only_the_step_knows_is_planned(drops_all):
    def step(model: nn.Module, batch: tuple[torch.Tensor, float]) -> torch.Tensor:
        return model(batch[0]).score.square().mean() * batch[1]

    fit = lowtide.fit(model := scoring(), (torch.randn(8, 8), 0.5), step=step, budget="100%")
    batch = (torch.randn(64, 8), 0.5)
    for _ in range(2):
        expected = plain(model, batch, step)
        model.zero_grad()
        loss = step(model, batch)
        loss.backward()
        fit.wait()
        assert differing(expected, outcome(model, loss)) == []

    assert fit.status().planned_steps == 1


def test_a_second_shape_under_apply_is_saved_where_it_differs_and_right():
    model, x = mlp(), torch.randn(8, 16)
    plan = harshest(model, x)
    other = torch.randn(5, 16)

    ours = copy.deepcopy(model)
    torch.manual_seed(7)
    with lowtide.apply(ours, plan) as applied:
        loss = ours(other).square().mean()
    loss.backward()

    assert applied.counts.mismatched > 0
    assert differing(plain(model, other), outcome(ours, loss)) == []
