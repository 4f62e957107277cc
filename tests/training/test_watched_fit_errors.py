"""``fit`` without a batch: whatever goes wrong, the training loop goes on, and the reason is told."""

import copy
import gc
import logging
import warnings
import weakref

import pytest
import torch
from support.training_steps import is_clean
from support.watched_training import Layered, activation_bytes, batch_of, reasons_of, resident_bytes, same, train
from torch import nn

import lowtide
from lowtide.recording.step_recording import StepRecording
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.proof_at_birth import run_twice
from lowtide.training.lifecycle import Lifecycle
from lowtide.training.planned_step import PlannedStep
from lowtide.training.plans_by_shape import PlansByShape

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_infeasible_budget_runs_at_the_least_and_says_so(model):
    budget = resident_bytes(model) + int(0.05 * activation_bytes(model, batch_of()))
    plain = copy.deepcopy(model)
    with lowtide.fit(model, budget=budget) as fit:
        assert same(train(plain, [batch_of()] * 2), train(model, [batch_of()] * 2))
        fit.wait()
        assert same(train(plain, [batch_of()] * 2), train(model, [batch_of()] * 2))
        assert fit.status().in_force
        assert "running at the least there is" in reasons_of(fit)


def test_a_step_that_took_more_than_the_budget_for_a_proof_is_told():
    class WithoutLayers(nn.Module):
        """Nothing is proven early, as layers are: the last resort is a proof beside all that lives."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x):
            for _ in range(6):
                x = torch.cat([x, x.flip(0)], 1).tanh()[:, :64] @ self.weight
            return x

    ours = WithoutLayers()
    x = batch_of(256)
    budget = resident_bytes(ours) + int(0.4 * activation_bytes(ours, x))
    with lowtide.fit(ours, budget=budget) as fit:
        train(ours, [x, batch_of(260), batch_of(264)])  # each goes further over it
        status = fit.status()

    assert status.observed_peak_bytes > budget
    assert sum("more than the budget" in reason for reason in status.reasons) == 1


def test_a_budget_below_the_weights_is_refused(model):
    with pytest.raises(lowtide.BudgetInfeasibleError, match="alone take") as caught:
        lowtide.fit(model, budget=resident_bytes(model) // 2)
    assert caught.value.least_bytes >= resident_bytes(model)


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Lifecycle, "_begin_step"),
        (PlansByShape, "plan_for"),
        (StepRecording, "graph_and_costs"),
        (OnlineTape, "_finish"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_no_error_of_ours_reaches_the_loop(model, budget, monkeypatch, owner, name):
    def fail(*args, **kwargs):
        raise KeyError("of our own")

    plain = copy.deepcopy(model)
    monkeypatch.setattr(owner, name, fail)
    with lowtide.fit(model, budget=budget) as fit:
        assert same(train(plain, [batch_of()] * 2), train(model, [batch_of()] * 2))
        assert "KeyError" in reasons_of(fit)


def test_a_step_that_fails_half_way_makes_no_plan(model, budget):
    class WrongBatchError(Exception):
        pass

    def failing(module, args):
        raise WrongBatchError

    with lowtide.fit(model, budget=budget) as fit:
        hook = model.layers[2].register_forward_pre_hook(failing)
        with pytest.raises(WrongBatchError):
            model(batch_of())
        hook.remove()
        train(model, [batch_of()])
        fit.wait()
        train(model, [batch_of()])
        assert fit.status().in_force
        assert len(fit.graph.calls) == 1


def test_other_ops_than_planned_go_on_online_and_are_watched_again(model, budget, monkeypatch):
    plain = copy.deepcopy(model)
    with lowtide.fit(model, budget=budget) as fit:
        train(model, [batch_of()])
        train(plain, [batch_of()])
        fit.wait()
        for m in (model, plain):
            for layer in m.layers:
                layer[1] = nn.SiLU()
        for _ in range(13):  # six leave the plan; then this kind is usual
            assert same(train(plain, [batch_of()]), train(model, [batch_of()]))
            fit.wait()
        assert fit.status().in_force
        assert "aten.silu.default" in {o.name for o in fit.graph.ops}


def test_a_planned_op_that_gives_other_bits_is_kept(model, budget, monkeypatch):
    with lowtide.fit(model, budget=budget) as fit:
        train(model, [batch_of()])
        fit.wait()
        (planned,) = fit._lifecycle.plans_by_shape.plans
        for op in planned.tape.program.ops:  # as if the watched step had proven none
            op.proven = False
        monkeypatch.setattr("lowtide.tape.tape.same_bits", lambda a, b: False)
        monkeypatch.setattr("lowtide.tape.tape.run_twice", lambda *run: run_twice(*run)._replace(is_same=False))
        plain = copy.deepcopy(model)
        assert same(train(plain, [batch_of()]), train(model, [batch_of()]))
        assert "gives other bits when it runs again" in reasons_of(fit)


def test_removed_between_forward_and_backward_the_step_ends_as_plain(model, budget):
    plain = copy.deepcopy(model)
    fit = lowtide.fit(model, budget=budget)
    torch.manual_seed(2)
    loss = model(batch_of()).square().mean()
    fit.remove()
    loss.backward()
    torch.manual_seed(2)
    plain(batch_of()).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    fit.remove()
    assert model._compiled_call_impl is None


def test_removed_after_a_loss_outside_the_model_failed_nothing_is_left(model, budget):
    """The plan drops ops of that loss, which never ran: not another step than planned, but none."""

    def loss(fails=False):
        output = model(batch_of()).tanh()
        if fails:
            raise ValueError("stop here")
        return torch.cat([output.tanh(), output.sigmoid(), -output], -1).square().mean()

    fit = lowtide.fit(model, budget=budget)
    loss().backward()
    assert fit.wait().plan.counts["recompute"]
    with pytest.raises(ValueError, match="stop here"):
        loss(fails=True)
    fit.remove()
    assert is_clean(model)


def test_what_needs_a_batch_is_refused(model):
    with pytest.raises(ValueError, match="step= needs a batch"):
        lowtide.fit(model, step=lambda model, batch: model(batch).sum())


def test_waiting_before_any_step_says_so(model, budget):
    with lowtide.fit(model, budget=budget) as fit, pytest.raises(lowtide.LowtideError, match="no step has been seen"):
        fit.wait()


def test_a_plan_is_one_visible_line(model, budget, caplog):
    with lowtide.fit(model, budget=budget) as fit, caplog.at_level(logging.WARNING, "lowtide"):
        train(model, [batch_of()])
        fit.wait()
    assert (
        sum("planned beside training in" in r.message and "plan 1 of at most 8" in r.message for r in caplog.records)
        == 1
    )


def test_no_warning_of_python_is_raised(model, budget):
    with warnings.catch_warnings(), lowtide.fit(model, budget=budget) as fit:
        warnings.simplefilter("error")
        train(model, [batch_of()])
        fit.wait()
        train(model, [batch_of()])


def test_the_plans_of_a_run_are_kept_for_the_next(model, budget, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    with lowtide.fit(model, budget=budget) as fit:
        train(model, [batch_of()])
        fit.wait()
        kept = sorted(tmp_path.rglob("*.json.gz"))
        assert len(kept) == 1
    with lowtide.fit(model, budget=budget) as again:
        train(model, [batch_of()])
        again.wait()
        # Ops of a toy may take quite other times in the next step. Then a reason says so, and it is planned anew.
        assert again.plan.decisions == fit.plan.decisions or "a cached plan served" in reasons_of(again)
    assert sorted(tmp_path.rglob("*.json.gz")) == kept


def test_an_automatic_budget_is_the_same_in_the_next_run(model, monkeypatch):
    budgets = set()
    for free in (10_000_000_000, 10_010_000_000, 10_090_000_000):
        monkeypatch.setattr("lowtide.training.budget.available_bytes", lambda device, free=free: free)
        with lowtide.fit(model) as fit:
            budgets.add(fit.status().budget_bytes)
            assert 0.86 * free < fit.status().budget_bytes <= 0.9 * free + resident_bytes(model)
    assert len(budgets) == 1


def refuse_memory(module, args):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_after_a_step_without_enough_memory_the_next_is_leaner(model):
    budget = 2 * resident_bytes(model) + int(0.9 * activation_bytes(model, batch_of()))
    with lowtide.fit(model, budget=budget) as fit:
        train(model, [batch_of()])
        fit.wait()
        train(model, [batch_of()])
        before = fit.plan.predicted_peak_bytes

        hook = model.layers[2].register_forward_pre_hook(refuse_memory)
        with pytest.raises(torch.OutOfMemoryError):
            model(batch_of())
        hook.remove()
        for _ in range(2):
            train(model, [batch_of()])
            fit.wait()

        resident = resident_bytes(model)
        assert fit.status().budget_bytes - resident == pytest.approx(0.9 * (before - resident), abs=2)
        assert fit.plan.predicted_peak_bytes <= fit.status().budget_bytes < before
        assert "out of memory: the budget is" in reasons_of(fit)


def test_an_evaluation_without_enough_memory_changes_nothing(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        hook = model.layers[2].register_forward_pre_hook(refuse_memory)
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
            model(batch_of())
        hook.remove()
        assert fit.status().budget_bytes == budget


def test_backward_without_enough_memory_counts_too(model, budget):
    def refuse(gradient):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes.")

    with lowtide.fit(model, budget=budget) as fit:
        output = model(batch_of())
        output.register_hook(refuse)
        with pytest.raises(RuntimeError, match="can't allocate"):
            output.sum().backward()
        assert fit.status().budget_bytes < budget


class Shifted(nn.Module):
    """Its backward does not read ``shift``; a replay of what ``sin`` has read does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("shift", torch.zeros(64))

    def forward(self, x):
        return (self.linear(x) + self.shift).sin().cos()


def test_writes_through_data_that_no_version_counts_are_found_within_sixteen_steps(monkeypatch):
    model = nn.Sequential(Shifted(), Shifted())

    def loop(steps, written=True):
        for _ in range(steps):
            loss = model(batch_of()).square().mean()
            for module in model if written else ():
                module.shift.data.add_(0.5)
            loss.backward()
            model.zero_grad()

    with lowtide.fit(model, method="full") as fit:
        loop(1, written=False)  # a watched step that sees the write would plan for it
        fit.wait()
        with pytest.raises(lowtide.ReplayError, match=r"without a version\n\(through .data"):
            loop(16)
        assert fit.status().planned_steps < 16

        monkeypatch.setattr("lowtide.step.storage_bits._sum_there", lambda tensor: torch.zeros((), dtype=torch.int64))
        loop(16)  # without the seals nothing tells


@pytest.mark.parametrize("guarded", [True, False])
def test_a_call_that_fails_under_a_plan_of_the_whole_step_leaves_nothing_in_place(guarded, monkeypatch):
    monkeypatch.setattr(PlannedStep, "needs_whole_step", True)
    if not guarded:
        monkeypatch.setattr(Lifecycle, "leave_plan", lambda self, failed=False: None)
    model = nn.Sequential(Shifted(), Shifted())
    with lowtide.fit(model, batch_of(), method="full"):
        hook = model[1].register_forward_hook(lambda *_: [][0])
        with pytest.raises(IndexError):
            model(batch_of())
        hook.remove()
        modes = torch._C._len_torch_dispatch_stack()
        assert (modes == 0) == guarded
        monkeypatch.undo()


def test_a_fitted_model_that_nobody_holds_is_freed(budget):
    model = Layered()
    fit = lowtide.fit(model, budget=budget)
    train(model, [batch_of()])
    reference = weakref.ref(model)
    del model, fit
    gc.collect()
    assert reference() is None
    train(Layered(), [batch_of()])  # the engine's entry is as before


def test_what_waits_for_the_planner_is_asked_with_the_lower_budget(model):
    budget = 2 * resident_bytes(model) + 4 * activation_bytes(model, batch_of(256))
    with lowtide.fit(model, budget=budget) as fit:
        model(batch_of()).square().mean().backward()
        fit._lifecycle.recorded.request_plans(waits=True)  # the times of its ops may not be known yet
        plans_by_shape, lower = fit._lifecycle.plans_by_shape, int(0.9 * budget)
        queue = plans_by_shape._queue
        queue.add(queue.asked.shapes, queue.asked.request)  # as a larger batch that came meanwhile
        plans_by_shape.change_budget(lower)
        fit.wait()
        assert [plan.budget_bytes for plan in fit.plans] == [lower]


def test_no_plan_at_all_is_no_choice(model):
    with pytest.raises(ValueError, match="max_plans=0"):
        lowtide.fit(model, max_plans=0)
