"""``fit`` without a batch: planned beside training, in force or told, never the end of a run."""

import copy
import json
import re
from collections.abc import Callable

import pytest
import torch
from support.watched_training import activation_bytes, batch_of, reasons_of, resident_bytes, same, train
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.units import parse_budget

pytestmark = pytest.mark.usefixtures("one_thread")


def test_training_is_bitwise_the_same_before_and_under_the_plan(model, budget):
    plain = copy.deepcopy(model)
    batches = [batch_of()] * 3

    with lowtide.fit(model, budget=budget) as fit:
        assert same(train(plain, batches), train(model, batches))
        assert not fit.wait().status().in_force
        assert same(train(plain, batches), train(model, batches))
        status = fit.status()

    assert status.in_force
    assert (status.steps, status.planned_steps, status.calls, status.planned_calls) == (6, 3, 6, 3)
    assert status.plans == status.shapes == 1
    assert fit.plan.counts["recompute"] > 0


def test_every_step_keeps_the_budget(model, budget):
    allowed = budget - resident_bytes(model)
    x = batch_of()
    peaks = []
    with lowtide.fit(model, budget=budget) as fit:
        for n in range(5):
            if n == 3:
                fit.wait()
            peaks.append(peak_bytes(lambda: model(x).square().mean().backward()))
            model.zero_grad()
        assert fit.status().in_force

    assert max(peaks) <= 1.1 * allowed  # steps of these toys are a few tensors large
    assert max(peaks[3:]) <= allowed


def num_runs(op: OpOverload, step: Callable[[], None]) -> int:
    """Counted below the tape. PyTorch's profilers hang now and then where compilers have run before."""

    class Count(TorchDispatchMode):
        runs = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.runs += func is op
            return func(*args, **(kwargs or {}))

    with Count() as count:
        step()
    return count.runs


def test_what_the_watched_step_has_proven_is_not_proven_again_under_the_plan(model, budget):
    x = batch_of()

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    with lowtide.fit(model, budget=budget) as fit:
        step()
        fit.wait()
        (planned,) = fit._lifecycle.plans_by_shape.plans
        dropped = [op for op in planned.tape.program.ops if op.drops and op.name == "aten.addmm.default"]
        unproven = [op for op in dropped if not op.proven]
        first, second = num_runs(torch.ops.aten.addmm.default, step), num_runs(torch.ops.aten.addmm.default, step)
        assert fit.status().planned_steps == 2

    assert len(unproven) < len(dropped)
    assert first - second == len(unproven)


def test_the_batch_is_in_the_budget_of_a_watched_step(model):
    x = batch_of(512)
    budget = resident_bytes(model) + x.nbytes + int(0.5 * activation_bytes(model, x))
    allowed = budget - resident_bytes(model) - x.nbytes
    with lowtide.fit(model, budget=budget) as fit:
        peak = peak_bytes(lambda: model(x).square().mean().backward())
        seen = fit.status().observed_peak_bytes

    assert peak <= allowed + x.nbytes / 2
    # The first step leaves room for targets, a tenth at most.
    assert budget - 0.2 * allowed <= seen <= budget + x.nbytes / 2


def test_a_percentage_is_of_the_first_step_and_fixed_once(model):
    with lowtide.fit(model, budget="60%") as fit:
        assert fit.status().budget_bytes is None
        train(model, [batch_of()])
        first = fit.status().budget_bytes
        assert fit.status().observed_peak_bytes > first
        assert "the first step ran plain, since a percentage is of what it takes" in reasons_of(fit)
        train(model, [batch_of(200)])
        assert fit.status().budget_bytes == first


def test_status_is_a_paragraph_and_json(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        assert str(fit.status()).startswith("No step has been seen yet.")
        train(model, [batch_of()] * 2)
        fit.wait()
        train(model, [batch_of()])
        text, found = str(fit.status()), json.loads(json.dumps(fit.status().to_dict()))
        headline, report = fit.status().headline, fit.report()

    assert text.startswith("The plan is in force: 1 of 3 steps ran under a plan.")
    assert found["planned_steps"] == 1
    assert found["observed_peak_bytes"] <= 1.05 * budget
    assert headline in report
    assert max(map(len, report.split("\n\n", 1)[1].splitlines())) <= 100


def test_numbers_in_arguments_make_no_shape(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        for count in range(4):
            model(batch_of(), scale=count).square().mean().backward()
            model.zero_grad()
        assert fit.status().shapes == 1


def test_at_most_max_plans_are_kept(model, budget):
    with lowtide.fit(model, budget=budget, max_plans=2) as fit:
        for rows in (64, 80, 96):
            train(model, [batch_of(rows)])
            fit.wait()
            train(model, [batch_of(rows)])
            assert fit.status().in_force
        assert fit.status().plans == 2


def test_the_plan_of_the_largest_batch_serves_smaller_ones(model, budget):
    plain = copy.deepcopy(model)
    with lowtide.fit(model, budget=budget) as fit:
        for rows in (128, 120):
            assert same(train(plain, [batch_of(rows)]), train(model, [batch_of(rows)]))
            fit.wait()
        assert same(train(plain, [batch_of(112)]), train(model, [batch_of(112)]))
        status = fit.status()

    assert (status.in_force, status.plans, status.shapes) == (True, 1, 3)
    assert status.planned_steps == 2


def test_a_much_smaller_batch_gets_a_plan_that_recomputes_nothing(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        for rows in (128, 32, 32):
            train(model, [batch_of(rows)])
            fit.wait()
        assert fit.status().in_force
        assert fit.plan.counts["recompute"] == 0


def test_a_batch_that_runs_other_ops_is_watched_on_its_own():
    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x):
            activation = torch.nn.functional.gelu if len(x) > 120 else torch.nn.functional.silu
            for layer in self.layers:
                x = activation(layer(x)).exp().tanh()
            return x

    ours = Switching()
    budget = resident_bytes(ours) + int(0.6 * activation_bytes(ours, batch_of()))
    plain = copy.deepcopy(ours)
    with lowtide.fit(ours, budget=budget) as fit:
        for rows in (128, 120, 120, 120):
            assert same(train(plain, [batch_of(rows)]), train(ours, [batch_of(rows)]))
            fit.wait()
        assert fit.status().in_force
        assert fit.status().plans == 2


def test_several_calls_in_a_step_are_one_plan(model, budget):
    plain = copy.deepcopy(model)

    def two_calls(model, x):
        return model(x) + model(x.flip(0)) * 0.5

    with lowtide.fit(model, budget=budget + 400_000) as fit:
        for _ in range(2):
            assert same(train(plain, [batch_of()] * 2, two_calls), train(model, [batch_of()] * 2, two_calls))
            fit.wait()
        assert fit.status().in_force
        assert fit.status().planned_calls == 4
        assert len(fit.graph.calls) == 2


def test_evaluation_between_steps_runs_as_it_is(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        for n in range(4):
            train(model, [batch_of()])
            model.eval()
            with torch.no_grad():
                model(batch_of(500))
            model.train()
            if n == 1:
                fit.wait()
        assert fit.status().in_force
        assert fit.status().shapes == 1


def test_accumulated_gradients_are_the_same(model, budget):
    plain = copy.deepcopy(model)
    x = batch_of()

    def accumulate(model):
        torch.manual_seed(5)
        for _ in range(3):
            model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    with lowtide.fit(model, budget=budget + resident_bytes(model)) as fit:
        for _ in range(2):
            assert all(map(torch.equal, accumulate(plain), accumulate(model)))
            fit.wait()
        assert fit.status().in_force


# -- in force, or told ------------------------------------------------------------------------------------------


def test_forward_called_past_the_model_is_told(model, budget, caplog):
    with lowtide.fit(model, budget=budget) as fit:
        train(model, [batch_of()] * 2, call=lambda model, x: model.forward(x))
        assert not fit.status().in_force
        assert "its forward() was called directly" in reasons_of(fit)
    assert sum("did not see" in r.message for r in caplog.records) == 1


def test_compiled_after_fit_is_told(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        model.compile(backend="eager")
        train(model, [batch_of()])
        assert "it was compiled after fit" in reasons_of(fit)


def test_a_copy_that_trains_is_no_step_of_ours(model, budget):
    other = copy.deepcopy(model)
    with lowtide.fit(model, budget=budget) as fit:
        train(other, [batch_of()])
        assert fit.status().steps == 0
        assert fit.status().reasons == ()


def test_a_model_that_is_compiled_as_a_whole_is_told_what_plans_inside_of_it(model):
    model.compile(backend="aot_eager")
    with lowtide.fit(model, budget="70%") as fit:
        assert "real steps of it have no plan. lowtide.compile(model, layers=[\"*\"], budget='70%')" in reasons_of(fit)
    with lowtide.fit(model, batch_of(), budget="100%", step=lambda model, batch: model(batch).square().mean()) as fit:
        kept = re.search(r"its call stores is kept, (\S+ \S+) of the step's (\S+ \S+)\. lowtide", reasons_of(fit))
        assert (
            0 < parse_budget(kept[1]) < parse_budget(kept[2]) == pytest.approx(fit.plan.predicted_peak_bytes, rel=0.01)
        )
    with pytest.raises(lowtide.BudgetInfeasibleError) as told:
        lowtide.fit(model, batch_of(), budget="1%", step=lambda model, batch: model(batch).square().mean())
    assert 'lowtide.compile(model, layers=["*"], budget=' in str(told.value)
    assert re.search(r"compiled code, whose \S+ [KM]?i?B are kept or made again call by call here", str(told.value))


def test_a_compiled_part_is_planned_as_one_op(model, budget):
    model.layers[1].compile(backend="aot_eager")
    plain = copy.deepcopy(model)
    with lowtide.fit(model, budget=budget) as fit:
        assert same(train(plain, [batch_of()]), train(model, [batch_of()]))
        fit.wait()
        assert same(train(plain, [batch_of()] * 2), train(model, [batch_of()] * 2))
        assert fit.status().planned_steps == 2
        assert (
            "one op, which is kept or runs again as a whole: layers.1; lowtide.compile plans inside of them"
            in reasons_of(fit)
        )
