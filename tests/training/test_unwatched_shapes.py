"""Shapes that nobody has watched get plans too, and what was derived wrong is noticed."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.watched_training import Layered, activation_bytes, batch_of, reasons_of, resident_bytes, same, train

import lowtide
from lowtide.errors import PlannerFailedError
from lowtide.planning.plan_request import Answer
from lowtide.planning.planner_process import PendingPlan
from lowtide.recording.step_recording import StepRecording
from lowtide.shapes.shape_statistics import ShapeStatistics
from lowtide.training.excess import OWN_BYTES
from lowtide.training.plan_queue import Asked
from lowtide.training.plans_by_shape import PlansByShape

pytestmark = pytest.mark.usefixtures("one_thread")
WATCHED = (96, 112, 128)  # each larger than what was planned before: none is served by a plan


class Jumping(Layered):
    """Rows of some numbers are padded further: the same ops, other sizes."""

    def __init__(self, jumps) -> None:
        super().__init__()
        self.jumps = jumps

    def forward(self, x):
        padding = 16 if self.jumps(len(x)) else 1
        return super().forward(torch.nn.functional.pad(x, (0, 0, 0, padding)))[: len(x)]


@pytest.fixture
def budget(model):
    """A budget in which something has to go."""
    return budget_of(model, 128)


def budget_of(model, rows):
    return resident_bytes(model) + int(0.6 * activation_bytes(model, batch_of(rows)))


def learn(model, fit, rows=WATCHED):
    for n in rows:
        train(model, [batch_of(n)])
    fit.wait()


def test_a_short_batch_that_fits_plain_recomputes_nothing_from_its_first_step_on(model, budget):
    plain = copy.deepcopy(model)
    with lowtide.fit(model, budget=budget) as fit:
        for n in WATCHED:
            train(plain, [batch_of(n)])
        learn(model, fit)
        for rows in (32, 48, 24):
            assert same(train(plain, [batch_of(rows)]), train(model, [batch_of(rows)]))
            assert fit.plan.counts["recompute"] == 0
        status = fit.status()

    assert status.planned_steps == 3
    assert fit.graph.provenance["batch"] == "0: torch.float32 [48, 64]"


def test_a_shape_that_comes_often_is_planned_without_being_watched(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        learn(model, fit)
        for _ in range(6):
            train(model, [batch_of(80)])
            fit.wait()
        status = fit.status()

        assert status.steps - status.planned_steps == len(WATCHED)
        assert fit.graph.provenance["batch"] == "0: torch.float32 [80, 64]"
        assert 0 < fit.plan.counts["recompute"] < max(plan.counts["recompute"] for plan in fit.plans)
        assert fit.plan.predicted_peak_bytes <= budget


def test_a_larger_shape_is_planned_from_its_derived_graph_while_it_is_watched(model):
    with lowtide.fit(model, budget=budget_of(model, 144)) as fit:  # in a device's blocks, too, a plan fits
        learn(model, fit)
        train(model, [batch_of(160)])
        fit.wait()
        train(model, [batch_of(160)])

        assert fit.status().in_force
        assert "derived" in fit.graph.provenance
        assert "not as derived" not in reasons_of(fit)


def test_a_larger_shape_that_is_not_as_derived_is_told_and_planned_as_it_is():
    ours = Jumping(lambda rows: rows > 150)
    plain = copy.deepcopy(ours)
    budget = budget_of(ours, 160)
    with lowtide.fit(ours, budget=budget) as fit:
        learn(ours, fit, (64, 80, 96))
        for n in (64, 80, 96):
            train(plain, [batch_of(n)])
        for _ in range(2):
            assert same(train(plain, [batch_of(160)]), train(ours, [batch_of(160)]))
            fit.wait()

        assert "not as derived from other lengths" in reasons_of(fit)
        assert fit.status().in_force
        assert "derived" not in fit.graph.provenance

        train(ours, [batch_of(176)])
        fit.wait()
        train(ours, [batch_of(176)])
        assert fit.status().in_force
        assert "derived" not in fit.graph.provenance


def test_what_is_larger_than_all_watched_steps_is_watched_even_where_it_should_fit():
    ours = Jumping(lambda rows: rows > 150)
    with lowtide.fit(ours, budget=10 * budget_of(ours, 160)) as fit:
        learn(ours, fit, (64, 80, 96))
        train(ours, [batch_of(160)])

        assert not fit.status().in_force
        fit.wait()  # on a device a step is read when its ops are over
        assert "not as derived from other lengths" in reasons_of(fit)


def test_plans_that_served_no_step_keep_no_shape_from_being_compared_with_what_it_follows_from():
    ours = Jumping(lambda rows: rows > 150)
    with lowtide.fit(ours, budget=10 * budget_of(ours, 160)) as fit:
        for rows in (64, 80, 96):
            learn(ours, fit, (rows,))
        plans = fit._lifecycle.plans_by_shape
        assert plans._in_vain >= 3 and plans._num_steps % 8 != 7
        learn(ours, fit, (160,))

        assert "not as derived from other lengths" in reasons_of(fit)


@pytest.mark.parametrize("was_put_behind", [False, True])
def test_a_planners_first_answer_and_its_last_are_one_plan(model, budget, was_put_behind):
    """On a slow machine each comes by itself; three plans that serve no step would end the recording of steps."""
    with lowtide.fit(model, budget=budget) as fit:
        learn(model, fit, (96,))
        plans, (planned,) = fit._lifecycle.plans_by_shape, fit._lifecycle.plans_by_shape.plans
        request = SimpleNamespace(graph=planned.graph, costs=planned.costs)
        asked, before = Asked(planned.shapes, request, PendingPlan()), plans._in_vain
        asked.first = plans._adopted(asked, planned.plan)
        if was_put_behind:
            asked = Asked(planned.shapes, request, PendingPlan(), had_first=True)
        plans._adopted(asked, planned.plan)

        assert plans._in_vain == before + 1


def test_each_better_answer_of_the_planner_is_put_in_force_and_its_time_counts_before_the_last(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        learn(model, fit, (96,))
        plans, (planned,) = fit._lifecycle.plans_by_shape, fit._lifecycle.plans_by_shape.plans
        assert planned.costs is not None
        pending, before_s = PendingPlan(), plans.planning_s
        request = SimpleNamespace(graph=planned.graph, costs=planned.costs)
        plans._queue.asked = Asked(planned.shapes, request, pending)
        in_force = []
        for answer in (planned.plan, replace(planned.plan, status="feasible")):
            pending.add(Answer(answer, final=False), "thread")
            train(model, [batch_of(96)])
            in_force.append(plans.plans[-1].plan)
            assert in_force[-1].to_json() == answer.to_json()
            train(model, [batch_of(96)])
            assert plans.plans[-1].plan is in_force[-1]  # an answer is looked at once
        assert plans.planning_s > before_s and "for 0 s by now" in plans.why_no_plan(planned.shapes[0])


@pytest.mark.parametrize("has_first", [True, False])
def test_where_planning_fails_after_a_first_answer_that_one_stays(model, budget, has_first):
    with lowtide.fit(model, budget=budget) as fit:
        learn(model, fit, (96,))
        plans = fit._lifecycle.plans_by_shape
        (planned,) = plans.plans
        if not has_first:
            plans.plans.clear()
        pending = PendingPlan()
        pending.add(Answer(PlannerFailedError("it broke")), "thread")
        plans._adopt(Asked(planned.shapes, None, pending, first=planned if has_first else None))
        train(model, [batch_of(96)])

        assert fit.status().in_force == has_first
        assert ("first plan stays in force: it broke" in reasons_of(fit)) == has_first
        assert ("no plan for steps like this one, they run online: it broke" in reasons_of(fit)) != has_first


def test_a_plan_from_a_wrong_graph_is_given_up_and_nothing_is_derived_any_more():
    ours = Jumping(lambda rows: rows == 90)
    budget = budget_of(ours, 128)
    with lowtide.fit(ours, budget=budget) as fit:
        learn(ours, fit, (80, 96, 112, 128))
        for _ in range(8):
            train(ours, [batch_of(90)])
            fit.wait()
        assert "not as derived from other lengths" in reasons_of(fit)
        assert fit.status().in_force
        assert "derived" not in fit.graph.provenance

        watched = fit.status().steps - fit.status().planned_steps
        train(ours, [batch_of(24)])
        assert fit.status().steps - fit.status().planned_steps == watched + 1


def test_there_are_never_more_than_max_plans_and_the_largest_stays(model, budget):
    with lowtide.fit(model, budget=budget, max_plans=2) as fit:
        learn(model, fit)
        for rows in (88, 88, 88, 88, 40, 128, 72, 88, 40):
            train(model, [batch_of(rows)])
            fit.wait()
            assert fit.status().plans <= 2
        train(model, [batch_of(128)])
        assert fit.status().in_force
        assert fit.status().steps - fit.status().planned_steps == len(WATCHED)


def test_a_plan_that_makes_room_while_its_step_begins_serves_it_no_more(model, budget, monkeypatch):
    with lowtide.fit(model, budget=budget, max_plans=1) as fit:
        learn(model, fit)
        monkeypatch.setattr(
            ShapeStatistics, "next_shape", lambda self, like, *_: like._replace(sizes=(24, *like.sizes[1:]))
        )
        train(model, [batch_of(80)])  # under the plan for 128 rows, until one for 24 takes its place

        assert "lowtide's own" not in reasons_of(fit)
        assert fit.graph.provenance["batch"] == "0: torch.float32 [24, 64]"
        assert fit.status().observed_peak_bytes <= budget + OWN_BYTES


def test_where_nothing_follows_the_plan_used_least_recently_goes(model, budget):
    calls = [{}, {"scale": torch.ones(())}, {"scale": torch.ones(1)}]  # three ways to call it

    def step(kwargs):
        return train(model, [batch_of()], lambda model, x: model(x, **kwargs))

    with lowtide.fit(model, budget=budget, max_plans=2) as fit:
        for kwargs in (calls[0], calls[1], calls[0], calls[2]):
            step(kwargs)
            fit.wait()
        planned = []
        for kwargs in (calls[0], calls[2], calls[1]):
            step(kwargs)
            planned.append(fit.status().in_force)

    assert planned == [True, True, False]


def test_where_no_plan_serves_any_step_few_are_recorded(model, monkeypatch):
    recorded, graph_and_costs = [], StepRecording.graph_and_costs
    monkeypatch.setattr(PlansByShape, "_is_family_shape", lambda self, shape: False)
    monkeypatch.setattr(
        StepRecording, "graph_and_costs", lambda self, *args: (recorded.append(self), graph_and_costs(self, *args))[1]
    )
    rows = range(48, 144, 4)  # each larger than what is planned
    with lowtide.fit(model, budget=budget_of(model, 48)) as fit:
        for n in rows:
            train(model, [batch_of(n)])
            fit.wait()
        status = fit.status()
        assert 3 <= len(recorded) <= 3 + len(rows) // 8 + 1
        assert status.planned_steps == 0 and "plans have served no step" in status.why_not

        train(model, [batch_of(48)] * 3)
        assert fit.status().planned_steps > 0
