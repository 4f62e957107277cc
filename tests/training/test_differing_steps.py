"""Steps that ran other ops than planned: what becomes of the plan, and of the shapes it serves."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.shapes.call_shapes import CallShape
from lowtide.training.differing_steps import STEPS_REMEMBERED, DifferingSteps, Verdict
from lowtide.training.plans_by_shape import PlansByShape

OWN, SMALLER = CallShape("a call", (8, 64)), CallShape("a call", (4, 64))


def planned(kind, last_served=OWN):
    return SimpleNamespace(kind=kind, shapes=(OWN,), last_served=last_served, diverged=True)


def after(*kinds, differed=()):
    """Steps of these kinds, of which the last ones ran under a plan and ``differed`` from it or not."""
    steps = DifferingSteps()
    for kind in kinds:
        steps.kinds.note(OWN.pattern, kind)
    for one in differed:
        steps.note(OWN.pattern, differed=one)
    return steps


def test_a_plan_of_the_usual_kind_is_kept():
    assert after(0, 0, 0, 1, differed=[False, True]).judge(planned(0)) is Verdict.KEEP


def test_a_plan_of_a_rare_kind_goes_and_the_usual_one_is_waited_for():
    steps = after(0, *[1] * 6, differed=[True])
    assert steps.judge(planned(0)) is Verdict.LET_GO
    assert steps.run_online(OWN.pattern) and steps.lately(OWN.pattern) == (0, 0)


def test_a_plan_whose_kind_nobody_knows_is_made_anew_twice():
    steps = after(differed=[False, True])
    assert [steps.judge(planned(None)) for _ in range(3)] == [Verdict.LET_GO, Verdict.LET_GO, Verdict.KEEP]


def test_where_most_steps_differ_no_plan_fits():
    steps = after(differed=[True] * STEPS_REMEMBERED)
    assert steps.judge(planned(None)) is Verdict.NO_PLAN_FITS
    assert steps.run_online(OWN.pattern)
    steps.start_afresh()
    assert steps.run_online(OWN.pattern)  # for good


def test_a_smaller_shape_that_runs_other_ops_wants_a_plan_of_its_own():
    steps = after(0, 0, differed=[False, True])
    assert steps.judge(planned(0, last_served=SMALLER)) is Verdict.NOT_FOR_THIS_SHAPE
    assert steps.alone == {SMALLER}


@pytest.mark.parametrize(("kinds", "is_worthless"), [([0, 1, 1], True), ([0, 0, 0, 0, 1], False)])
def test_a_plan_of_rare_steps_is_worthless_once_another_left_it_and_took_too_much(kinds, is_worthless):
    steps, plan = after(*kinds), planned(0)
    steps.note_left_above(plan)
    assert (plan.kind is None) == steps.run_online(OWN.pattern) == is_worthless


class Growing(nn.Module):
    """Runs as many of its layers as it is told by an attribute."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6))
        self.num_layers = 3

    def forward(self, x):
        for layer in self.layers[: self.num_layers]:
            x = layer(x)
        return x


def test_what_a_step_took_that_left_its_plan_is_told(monkeypatch):
    torch.manual_seed(0)
    model, x, told = Growing(), torch.randn(512, 128), []
    monkeypatch.setattr(PlansByShape, "note_left", lambda self, planned, peak: told.append(peak))

    def step():
        model(x).square().mean().backward()
        model.zero_grad()

    with lowtide.fit(model, budget="2.7MiB") as fit:
        for _ in range(4):
            step()
            fit.wait()
        assert fit.status().planned_steps and not told
        model.num_layers = 6
        step()
        assert told == [fit.status().last_peak_bytes]
