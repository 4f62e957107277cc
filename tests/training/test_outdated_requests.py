"""Steps whose kind does not come any more: what the planner does for them waits, and their plans go.

A program's first step often runs other ops than all that follow: TorchScript optimizes code after its first call.
"""

from types import SimpleNamespace

import pytest
import torch
from support.watched_training import activation_bytes, batch_of, resident_bytes, train
from torch import nn

import lowtide
from lowtide.planning.planner_process import PendingPlan
from lowtide.shapes.call_shapes import CallShape
from lowtide.training.kinds_of_steps import UsualKinds
from lowtide.training.plan_queue import PlanQueue

pytestmark = pytest.mark.usefixtures("one_thread")


class Settling(nn.Module):
    """Its first step runs other ops, and more of them, than all others."""

    def __init__(self, layers=6):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(layers)
        )
        self.has_settled = False

    def forward(self, x):
        for layer in self.layers:
            x = x + (layer(x) if self.has_settled else layer(x).tanh().exp().sin())
        return x


def fitted(model):
    model.has_settled = True
    allowed = int(0.6 * activation_bytes(model, batch_of(128)))
    model.has_settled = False
    return lowtide.fit(model, budget=resident_bytes(model) + allowed)


class NeverReady:
    """A planner that answers all but the first request."""

    def __init__(self, planner):
        self._planner, self.pending = planner, None

    def submit(self, request):
        if self.pending is None:
            self.pending = PendingPlan()
            return self.pending
        return self._planner.submit(request)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_the_planner_goes_on_to_what_comes_now(is_noticed, monkeypatch):
    if not is_noticed:
        monkeypatch.setattr(UsualKinds, "is_gone", lambda self, pattern, kind: False)
    model = Settling()
    with fitted(model) as fit:
        queue = fit._lifecycle.plans_by_shape._queue
        queue._planner = planner = NeverReady(queue._planner)
        planned = 0
        for rows in (128, 120, 112, 104, 120, 112, 104, 120):
            before = fit.status().planned_steps
            train(model, [batch_of(rows)])
            model.has_settled = True
            planned += fit.status().planned_steps - before
            if queue.asked is not None and queue.asked.pending is not planner.pending:
                fit.wait()

    assert (planned > 0) == is_noticed
    assert planner.pending.is_abandoned == is_noticed


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_plan_of_steps_that_do_not_come_any_more_goes_whatever_the_shape(is_noticed, monkeypatch):
    if not is_noticed:
        monkeypatch.setattr(UsualKinds, "is_gone", lambda self, pattern, kind: False)
    model = Settling()
    with fitted(model) as fit:
        for rows in range(128, 88, -2):
            train(model, [batch_of(rows)])
            model.has_settled = True
            fit.wait()
        status = fit.status()

    assert (status.plan_left_steps <= 4) == is_noticed
    assert (status.planned_steps >= 12) == is_noticed


def test_a_kind_is_gone_after_three_steps_of_one_other():
    kinds = UsualKinds()
    for kind, is_gone in ((1, False), (2, False), (2, False), (2, True), (3, True), (1, False)):
        kinds.note("call", kind)
        assert kinds.is_gone("call", 1) == is_gone
    assert not kinds.is_gone("call", None) and not kinds.is_gone("another", 1)


def test_where_all_are_other_kinds_none_is_gone():
    kinds = UsualKinds()
    for kind in range(8):
        kinds.note("call", kind)
    assert not kinds.is_gone("call", 0)


def test_requests_of_kinds_that_are_gone_wait_behind_smaller_ones_and_are_asked_for_in_the_end():
    submitted, gone = [], set()

    def submit(request):
        submitted.append(request)
        return PendingPlan()

    queue = PlanQueue(SimpleNamespace(submit=submit), lambda pattern, kind: kind in gone)
    large, small = ((CallShape("call", (rows,)),) for rows in (8, 4))
    queue.add(large, "first", 1)
    queue.ask_next([])
    first = queue.asked.pending
    gone.add(1)
    queue.ask_next([])
    assert queue.asked.pending is first and queue.first_shapes == []  # nothing else is to be done

    queue.add(small, "second", 2)
    queue.ask_next([])
    assert submitted == ["first", "second"] and first.is_abandoned and first.done()
    assert queue.first_shapes == [small[0]]

    queue.asked = None
    queue.ask_next([])
    assert submitted == ["first", "second", "first"]


@pytest.mark.parametrize("has", ["no first answer", "a first answer", "had one before"])
@pytest.mark.parametrize("other", ["without a plan", "with a plan", "that is gone", "that had a first answer"])
def test_a_better_plan_is_sought_after_the_first_ones_of_others(has, other):
    submitted = []

    def submit(request):
        submitted.append(request)
        return PendingPlan()

    queue = PlanQueue(SimpleNamespace(submit=submit), lambda pattern, kind: kind == "gone")
    large, small = ((CallShape(pattern, (rows,)),) for pattern, rows in (("call", 8), ("other call", 4)))
    queue.add(large, "large")
    queue.ask_next([])
    asked = queue.asked
    asked.first = "in force" if has == "a first answer" else None
    asked.had_first = has == "had one before"
    queue.add(small, "small", "gone" if other == "that is gone" else None)
    if other == "that had a first answer":
        queue._waiting = [queue._waiting[0]._replace(had_first=True)]

    planned = [large, small] if other == "with a plan" else [large]
    queue.ask_next(planned)
    if has == "no first answer" or other != "without a plan":
        assert submitted == ["large"] and not asked.pending.is_abandoned
        return
    assert submitted == ["large", "small"] and asked.pending.is_abandoned
    queue.asked.first = "in force"
    queue.ask_next([large, small])
    assert submitted == ["large", "small"]  # they do not take turns
    queue.asked = None
    queue.ask_next([small])  # also where the plan of the first answer had to go for another
    assert submitted == ["large", "small", "large"] and queue.asked.had_first
