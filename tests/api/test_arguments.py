"""What cannot be planned is refused before anything runs, in one sentence with the value and the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.training_steps import deep, differing, is_clean, mlp, outcome, plain
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide
from lowtide.errors import BudgetInfeasibleError, StepError
from lowtide.plan import RECOMPUTE
from lowtide.step.optimizer_state import optimizer_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
METHODS = "exact, none, full, every_n, sqrt_n, selective, revolve, rotor, knapsack"
X = torch.randn(4, 16)
DATA = TensorDataset(X, X)


@pytest.fixture
def nothing_runs(monkeypatch):
    def runs(*_: Any, **__: Any) -> None:
        raise AssertionError("the step ran")

    monkeypatch.setattr("lowtide.training.rehearsal.record", runs)


def refused(kind: type[Exception], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as error:
        lowtide.fit(*args, **kwargs)
    return str(error.value)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"budgte": 1}, TypeError, "fit() has no argument 'budgte'. Did you mean 'budget'?"),
        (
            {"method": "ful"},
            ValueError,
            f"method='ful' is not known. Did you mean 'full'? Use one of {METHODS}.",
        ),
        (
            {"budget": "1GiB", "budget_kind": "reserved"},
            ValueError,
            "budget_kind='reserved' has no meaning here: memory of device 'cpu' does not come from a caching allocator "
            "as modelled here. Use 'allocated'.",
        ),
        ({"method": "magic"}, ValueError, f"method='magic' is not known. Use one of {METHODS}."),
        (
            {"method": "full", "n": 2},
            ValueError,
            'n=2 has no meaning for method=\'full\'. Leave it out, or use method="every_n" or "revolve".',
        ),
        (
            {"method": "rotor", "ratio": 0.5},
            ValueError,
            "ratio=0.5 has no meaning for method='rotor'. Leave it out, or use method=\"knapsack\".",
        ),
        (
            {"method": "full", "gap": 0.0},
            ValueError,
            "gap=0.0 has no meaning for method='full'. Leave it out, or use method=\"exact\".",
        ),
        (
            {"budget": "150%"},
            ValueError,
            "budget='150%' is more activation memory than the plain step's. Pass 100% or less; \"100%\" changes "
            "nothing.",
        ),
        ({"step": 3}, TypeError, "step=3 is a int. Pass a function (model, batch) -> loss."),
        ({"offload": "disk"}, TypeError, "offload='disk' is a str. Pass lowtide.Offload(...)."),
    ],
    ids=str,
)
def test_an_argument_is_refused_before_anything_runs(arguments, kind, message):
    assert refused(kind, mlp(2), X, **arguments) == message


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("batch", "name"),
    [(DataLoader(DATA), "DataLoader"), (iter([X]), "list_iterator"), (DATA, "TensorDataset")],
    ids=["loader", "iterator", "dataset"],
)
def test_what_holds_batches_is_no_batch(batch, name):
    assert refused(TypeError, mlp(2), batch) == f"batch is a {name}, not one batch. Pass one: next(iter(...))."


@pytest.mark.usefixtures("nothing_runs")
def test_swapped_arguments_are_named():
    assert refused(TypeError, X, mlp(2)) == (
        "model is a Tensor and batch is a Sequential: they are swapped. Call fit(model, batch)."
    )


@pytest.mark.usefixtures("nothing_runs")
def test_a_model_without_parameters_has_nothing_to_train():
    assert refused(StepError, nn.Tanh(), X).startswith("the Tanh has no parameter: there is nothing to train.")


def test_a_small_int_is_asked_about():
    text = refused(BudgetInfeasibleError, mlp(2), X, budget=6)

    assert text.endswith("\nbudget=6 means 6 B. Did you mean '6GiB'?")


def test_a_model_in_eval_mode_is_warned_about():
    with lowtide.fit(mlp().eval(), X, budget="100%") as fit:
        assert fit.warnings == [
            "the model is in eval mode: dropout and BatchNorm are off in this plan. Call model.train() first to train"
        ]
    with lowtide.fit(mlp(), X, budget="100%") as fit:
        assert fit.warnings == []


def test_a_step_that_calls_backward_itself_is_refused():
    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    model = mlp(2)

    assert refused(StepError, model, X, step=step) == (
        "the step called backward itself.\nReturn the loss and leave its backward to the caller."
    )
    assert is_clean(model) and all(p.grad is None for p in model.parameters())


# -- optimizers -------------------------------------------------------------------------------------------------------


class Wrapped:
    """As DeepSpeed wraps an optimizer: its groups pass through, its constructor takes something else."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        return self.optimizer.state


@pytest.fixture
def accelerated() -> Iterator[Callable[[Any], Any]]:
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True).prepare_optimizer
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_an_optimizer_prepared_by_accelerate_counts_as_the_one_inside(accelerated):
    optimizer = torch.optim.AdamW((model := mlp()).parameters())
    prepared = accelerated(optimizer)

    assert type(prepared) is not torch.optim.AdamW
    assert optimizer_bytes(prepared, list(model.parameters())) == optimizer_bytes(optimizer, list(model.parameters()))


@pytest.mark.parametrize("wrap", [Wrapped, lambda o: Wrapped(Wrapped(o))], ids=["once", "twice"])
def test_a_wrapped_optimizer_counts_as_the_one_inside(wrap):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = list(model.parameters())

    assert optimizer_bytes(wrap(optimizer), parameters) == optimizer_bytes(optimizer, parameters)
    with lowtide.fit(model, X, budget="100%", optimizer=wrap(optimizer)) as fit:
        assert fit.graph.resident["optimizer"] == 2 * 4 * sum(p.numel() for p in parameters)


def test_an_optimizer_is_probed_once_whatever_its_learning_rate_and_again_with_other_state():
    """A probe takes as long as a small step, and every watched step asks."""

    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            Counting.steps += 1
            return super().step(closure)

    parameters = [nn.Parameter(torch.zeros(64, 64))]
    optimizer = Counting(parameters, lr=0.1)
    first = optimizer_bytes(optimizer, parameters)
    optimizer.param_groups[0]["lr"] = 0.05
    steps = Counting.steps

    assert optimizer_bytes(optimizer, parameters) == first and first[0] == 0
    assert Counting.steps == steps > 0
    optimizer.param_groups[0]["momentum"] = 0.9
    assert optimizer_bytes(optimizer, parameters)[0] == parameters[0].nbytes


# -- one policy for tiers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["apply", "verify"])
def test_apply_and_verify_take_the_same_policy(verb, tmp_path):
    model = mlp(2)
    plan = lowtide.solve(graph := lowtide.trace(model, X), lowtide.Costs((1.0,) * len(graph.ops)), method="none")

    def act(**arguments: Any) -> None:
        if verb == "verify":
            lowtide.verify(model, X, plan, rounds=0, **arguments)
        else:
            with lowtide.apply(model, plan, **arguments):
                model(X)

    act(offload=lowtide.Offload(scratch_dir=tmp_path, checksums=True))
    with pytest.raises(TypeError, match=r"^offload=1 is a int. Pass lowtide.Offload\(...\)"):
        act(offload=1)
    with pytest.raises(TypeError, match=rf"^{verb}\(\) has no argument 'offlod'. Did you mean 'offload'\?"):
        act(offlod=1)


@pytest.mark.parametrize("amount", ["40%", "auto"])
def test_a_disk_budget_is_an_amount(amount):
    with pytest.raises(ValueError, match=f"^disk_budget='{amount}' is not an amount of memory"):
        lowtide.Offload(disk_budget=amount)


# -- another shape keeps what was asked for ---------------------------------------------------------------------------


def test_a_new_shape_is_planned_by_the_method_that_was_asked_for():
    model = deep()
    with lowtide.fit(model, torch.randn(16, 32), budget="100%", method="revolve", n=2) as fit:
        absolute = fit.plan.plain_peak_bytes
    # The second shape is larger and does not fit: it runs at the least that the method reaches.
    with lowtide.fit(model, torch.randn(16, 32), budget=absolute, method="revolve", n=2) as fit:
        model(torch.randn(48, 32)).square().mean().backward()
        fit.wait()

        assert [plan.method for plan in fit.plans] == ["revolve", "revolve"]
    assert any(line.startswith("no plan fits") for line in fit.warnings)


def test_a_new_shape_is_planned_with_the_loss_that_it_really_has():
    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]).exp().log1p().sqrt(), batch[1])  # more than the call shows

    model = mlp()
    larger = torch.randn(256, 16).abs(), torch.randn(256, 16)
    budget = lowtide.trace(model, larger, step=loss_of).resident_bytes + 150_000
    with lowtide.fit(model, (X, X), step=loss_of, budget=budget) as fit:
        for _ in range(3):
            expected = plain(copy.deepcopy(model), larger, loss_of)
            model.zero_grad()
            loss = loss_of(model, larger)
            loss.backward()
            fit.wait()
            assert differing(expected, outcome(model, loss)) == []

        assert fit.status().in_force and fit.plan.counts[RECOMPUTE]
        assert {op.name for op in fit.graph.forward_ops} >= {"aten.sqrt.default", "aten.mse_loss.default"}
        # The first step does not know the loss before it runs.
        assert all("aten.mse_loss in the model takes 16.01 KiB beside what it makes" in line for line in fit.warnings)
