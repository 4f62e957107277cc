"""``fit`` without a batch: planned beside training, in force or told, never the end of a run."""

import copy
import gc
import json
import logging
import warnings
import weakref

import pytest
import torch
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.runtime.plan_shelf import PlanShelf
from lowtide.runtime.step_watcher import StepWatcher
from lowtide.runtime.watched_step import WatchedStep
from lowtide.tape.online.tape import OnlineTape

pytestmark = pytest.mark.usefixtures("one_thread")


class Layered(nn.Module):
    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))
            for _ in range(layers)
        )

    def forward(self, x, scale=1):
        for layer in self.layers:
            x = x + layer(x) * scale
        return x


def batch_of(rows=128):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))


def resident_bytes(model):
    return sum(p.nbytes for p in model.parameters())


def activation_bytes(model, x):
    copied = copy.deepcopy(model)
    copied(x).square().mean().backward()
    copied.zero_grad()
    return peak_bytes(lambda: copied(x).square().mean().backward())


def train(model, batches, call=lambda model, x: model(x)):
    """Losses of an ordinary loop, and its weights at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    losses = []
    for x in batches:
        loss = call(model, x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


@pytest.fixture
def model():
    return Layered()


@pytest.fixture
def budget(model):
    """A budget in which something has to go."""
    return resident_bytes(model) + int(0.6 * activation_bytes(model, batch_of()))


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

    assert max(peaks) <= 1.05 * allowed  # steps of these toys are a few tensors large
    assert max(peaks[3:]) <= allowed


def test_a_percentage_is_of_the_first_step_and_fixed_once(model):
    with lowtide.fit(model, budget="60%") as fit:
        assert fit.status().budget_bytes is None
        train(model, [batch_of()])
        first = fit.status().budget_bytes
        train(model, [batch_of(200)])
        assert fit.status().budget_bytes == first


def test_status_is_a_paragraph_and_json(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        assert str(fit.status()).startswith("No step has been seen yet.")
        train(model, [batch_of()] * 2)
        fit.wait()
        train(model, [batch_of()])
        text, found = str(fit.status()), json.loads(json.dumps(fit.status().to_dict()))
        report = fit.report()

    assert text.startswith("The plan is in force: 1 of 3 steps ran under a plan.")
    assert found["planned_steps"] == 1
    assert found["observed_peak_bytes"] <= 1.05 * budget
    assert text in report
    assert max(map(len, report.split("\n\n", 1)[1].splitlines())) <= 100


def test_numbers_in_arguments_make_no_shape(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        for count in range(4):
            model(batch_of(), scale=count).square().mean().backward()
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


def reasons_of(fit):
    return " ".join(fit.status().reasons)


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


def test_a_compiled_part_runs_online(model, budget):
    model.layers[1].compile(backend="eager")
    plain = copy.deepcopy(model)
    with lowtide.fit(model, budget=budget + 300_000) as fit:
        assert same(train(plain, [batch_of()] * 2), train(model, [batch_of()] * 2))
        assert "layers.1 is compiled" in reasons_of(fit)


# -- never the end of a run -------------------------------------------------------------------------------------


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
    assert ["more than the budget" in reason for reason in status.reasons] == [True]


def test_a_budget_below_the_weights_is_refused(model):
    with pytest.raises(lowtide.BudgetInfeasibleError, match="alone take") as caught:
        lowtide.fit(model, budget=resident_bytes(model) // 2)
    assert caught.value.least_bytes >= resident_bytes(model)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(StepWatcher, "_begin_step"), (PlanShelf, "plan_for"), (WatchedStep, "graph_and_costs"), (OnlineTape, "_finish")],
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


def test_other_ops_than_planned_are_saved_and_watched_again(model, budget, monkeypatch):
    plain = copy.deepcopy(model)
    with lowtide.fit(model, budget=budget) as fit:
        train(model, [batch_of()])
        train(plain, [batch_of()])
        fit.wait()
        for m in (model, plain):
            for layer in m.layers:
                layer[1] = nn.SiLU()
        for _ in range(3):
            assert same(train(plain, [batch_of()]), train(model, [batch_of()]))
            fit.wait()
        assert fit.status().in_force
        assert "aten.silu.default" in {o.name for o in fit.graph.ops}


def test_a_planned_op_that_gives_other_bits_is_kept(model, budget, monkeypatch):
    with lowtide.fit(model, budget=budget) as fit:
        train(model, [batch_of()])
        fit.wait()
        monkeypatch.setattr("lowtide.tape.tape.same_bits", lambda a, b: False)
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


def test_what_needs_a_batch_is_refused(model):
    with pytest.raises(ValueError, match="step= needs a batch"):
        lowtide.fit(model, step=lambda model, batch: model(batch).sum())
    with pytest.raises(ValueError, match="offload= needs a batch"):
        lowtide.fit(model, offload=lowtide.Offload(disk_budget="1GiB"))


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
        assert again.plan.decisions == fit.plan.decisions or "a cached plan was ignored" in reasons_of(again)
    assert sorted(tmp_path.rglob("*.json.gz")) == kept


def test_an_automatic_budget_is_the_same_in_the_next_run(model, monkeypatch):
    budgets = set()
    for free in (10_000_000_000, 10_010_000_000, 10_090_000_000):
        monkeypatch.setattr("lowtide.runtime.budget.available_bytes", lambda device, free=free: free)
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
        assert fit.status().budget_bytes - resident == pytest.approx(0.9 * (budget - resident), abs=2)
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

        monkeypatch.setattr("lowtide.tape.tape.sum_of_words", lambda tensor: 0)
        monkeypatch.setattr("lowtide.tape.recipes.sum_of_words", lambda tensor: 0)
        loop(16)  # without the seals nothing tells


def test_a_fitted_model_that_nobody_holds_is_freed(budget):
    model = Layered()
    fit = lowtide.fit(model, budget=budget)
    train(model, [batch_of()])
    reference = weakref.ref(model)
    del model, fit
    gc.collect()
    assert reference() is None
    train(Layered(), [batch_of()])  # the engine's entry is as before
