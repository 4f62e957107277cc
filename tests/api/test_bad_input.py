"""What makes no sense is refused with its value and the way out, and leaves the model exactly as it was."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.training_steps import Net, harshest, is_clean, mlp, same_state, state_of
from torch import nn

import lowtide
from lowtide import BudgetInfeasibleError, GraphFormatError, LowtideError, Plan, PlanMismatchError
from lowtide.errors import StepError, TierError
from lowtide.graph import json_format

WAY_OUT = 'Write bytes as an int, "6GiB" (2^30), "6GB" (10^9), "40%" of the plain step\'s activation memory, or "auto".'


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def refused(act: Callable[[], Any], model: nn.Module, kind: type[Exception]) -> str:
    """The error's text; the model, its gradients and every generator are as they were."""
    for p in model.parameters():
        p.grad = torch.randn_like(p) if p.dim() == 1 and p.requires_grad else None
    before = state_of(model)

    with pytest.raises(kind) as error:
        act()

    assert same_state(before, state_of(model))
    assert is_clean(model)
    return str(error.value)


def test_the_helper_sees_each_thing_that_may_move():
    moves: list[Callable[[nn.Module], Any]] = [
        lambda m: m[0].weight.data.add_(1),
        lambda m: setattr(m[0].weight, "grad", torch.zeros_like(m[0].weight)),
        lambda m: m[0].bias.grad.add_(1),
        lambda m: m[1].running_mean.add_(1),
        lambda m: m.eval(),
        lambda m: m[0].register_forward_hook(lambda *_: None),
        lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda p: None),
        lambda m: m[0].weight.requires_grad_(False),
        lambda m: setattr(m[0], "_compiled_call_impl", m[0]._call_impl),
        lambda m: torch.rand(1),
        lambda m: random.random(),
        lambda m: np.random.rand(),
    ]
    for move in moves:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[0].bias.grad = torch.zeros(4)
        before = state_of(model)
        assert same_state(before, state_of(model))
        move(model)
        assert not same_state(before, state_of(model))


BUDGETS = {
    "12 parsecs": (ValueError, "budget='12 parsecs': 'parsecs' is not a unit of memory. " + WAY_OUT),
    "a lot": (ValueError, "budget='a lot' is not an amount of memory. " + WAY_OUT),
    "": (ValueError, "budget='' is not an amount of memory. " + WAY_OUT),
    "-3GiB": (ValueError, "budget='-3GiB' is not an amount of memory. " + WAY_OUT),
    "0%": (ValueError, "budget='0%' is not positive. " + WAY_OUT),
    "0 GiB": (ValueError, "budget='0 GiB' is not positive. " + WAY_OUT),
    -1: (ValueError, "budget=-1 bytes is not positive. " + WAY_OUT),
    0: (ValueError, "budget=0 bytes is not positive. " + WAY_OUT),
    None: (TypeError, "budget=None is a NoneType. " + WAY_OUT),
    True: (TypeError, "budget=True is a bool. " + WAY_OUT),
    1.5: (TypeError, "budget=1.5 is a float. " + WAY_OUT),
}


@pytest.mark.parametrize("budget", BUDGETS, ids=repr)
def test_a_budget_that_makes_no_sense_is_refused_with_its_value_and_the_way_out(budget):
    kind, message = BUDGETS[budget]
    model, x = mlp(2), torch.randn(4, 16)

    assert refused(lambda: lowtide.fit(model, x, budget=budget), model, kind) == message


def test_a_budget_below_everything_says_what_lives_through_the_step():
    model, x = mlp(2), torch.randn(4, 16)

    text = refused(lambda: lowtide.fit(model, x, budget=1), model, BudgetInfeasibleError)

    assert text.startswith(
        "no plan fits budget=1 B: 4.50 KiB (4608 bytes) live through the whole step, or "
        "are gradients that are there at its end.\n"
    )
    assert "shard the model" in text


def test_a_budget_below_everything_knows_the_least_that_works():
    model, x = mlp(2), torch.randn(4, 16)

    with pytest.raises(BudgetInfeasibleError) as found:
        lowtide.fit(model, x, budget=1)
    lowtide.fit(model, x, budget=found.value.least_bytes).remove()


def test_a_batch_that_the_model_rejects_is_shown_with_its_shape():
    model, x = mlp(2), torch.randn(4, 3)

    text = refused(lambda: lowtide.fit(model, x, budget="50%"), model, StepError)

    with pytest.raises(RuntimeError) as own:
        model(x)
    assert text == (
        f"the step failed on this batch: RuntimeError: {own.value}\n"
        "  batch  torch.float32 [4, 3]\n"
        "Make the step run without lowtide first; the traceback above is the model's own."
    )


def test_a_batch_of_other_arguments_is_shown_by_name():
    model = mlp(2)

    text = refused(lambda: lowtide.fit(model, {"pixels": torch.zeros(1, 16)}, budget="50%"), model, StepError)

    assert "TypeError" in text
    assert "  batch  pixels: torch.float32 [1, 16]\n" in text


STEPS = {
    "vector": (
        lambda m, x: m(x),
        "the step returned a tensor of shape [4, 16], not a scalar loss.\n"
        "Return one number that backward can start from.",
    ),
    "number": (
        lambda m, x: m(x).sum().item(),
        "the step returned 'float', not a scalar loss.\nReturn one number that backward can start from.",
    ),
    "nothing": (
        lambda m, x: None,
        "the step returned 'NoneType', not a scalar loss.\nReturn one number that backward can start from.",
    ),
    "no gradient": (
        lambda m, x: m(x).sum().detach(),
        "the step's loss requires no gradient: nothing would be trained.\n"
        "Leave no_grad, and train at least one parameter that the loss depends on.",
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_without_a_scalar_loss_is_refused(case):
    step, message = STEPS[case]
    model, x = mlp(2), torch.randn(4, 16)

    assert refused(lambda: lowtide.fit(model, x, step=step), model, StepError) == message


@pytest.mark.parametrize("output", [lambda h: h.argmax(-1), lambda h: None, lambda h: {"ids": h.argmax(-1)}])
def test_a_model_without_a_loss_to_start_from_is_refused(output):
    model, x = Net(lambda self, x: output(self.layers[0](x))), torch.randn(4, 8)

    text = refused(lambda: lowtide.fit(model, x), model, StepError)

    assert text.startswith("the model returned no floating-point tensor that requires a gradient (it returned ")
    assert text.endswith("Pass step=lambda model, batch: ... that returns the scalar loss.")


def test_a_model_with_nothing_to_train_is_refused():
    model, x = mlp(2).requires_grad_(False), torch.randn(4, 16)

    text = refused(lambda: lowtide.fit(model, x), model, StepError)

    assert text == "the model has no trainable parameter.\nSet requires_grad=True on what you want to train."


def test_a_model_without_numbers_is_refused():
    model, x = mlp(2).to("meta"), torch.zeros(4, 16, device="meta")

    with pytest.raises(lowtide.UnsupportedModelError) as error:
        lowtide.fit(model, x)

    assert str(error.value) == (
        "the model is on the meta device: it has shapes and no numbers, and cannot be rehearsed yet.\n"
        "Put it on the device where it trains (model.to_empty(device=...), then load its weights)."
    )
    assert is_clean(model)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError) as error:
        lowtide.fit(lambda x: x, torch.randn(4, 16))

    assert str(error.value) == ("model is a function, not an nn.Module. Pass the module, and step= for the rest.")


@pytest.mark.parametrize(
    ("optimizer", "kind", "message"),
    [
        (3, TypeError, "optimizer is a int. Pass a torch.optim.Optimizer, several, or a name like 'adamw'."),
        (
            "sophia",
            ValueError,
            "optimizer='sophia' is not one of adafactor, adagrad, adam, adamw, adamw_for_loop, adamw_fused, rmsprop, "
            "sgd, sgd_momentum. Pass the optimizer itself.",
        ),
    ],
)
def test_an_optimizer_nobody_knows_is_refused(optimizer, kind, message):
    model, x = mlp(2), torch.randn(4, 16)

    assert refused(lambda: lowtide.fit(model, x, optimizer=optimizer), model, kind) == message


def test_an_unknown_method_is_refused():
    model, x = mlp(2), torch.randn(4, 16)

    text = refused(lambda: lowtide.fit(model, x, method="magic", budget="50%"), model, ValueError)

    assert text.startswith("method='magic' is not known. Use one of exact, ")


# -- plans ------------------------------------------------------------------------------------------------------------


def enter(model: nn.Module, plan: Any) -> None:
    with lowtide.apply(model, plan):
        raise AssertionError("the plan was taken")


def test_a_plan_for_another_model_is_refused_by_the_module_it_names():
    plan = harshest(mlp(4), torch.randn(4, 16))
    model = mlp(2)

    text = refused(lambda: enter(model, plan), model, PlanMismatchError)

    assert text == (
        "the plan is for another model: 4 of its modules are not in this Sequential, 4 first.\n"
        "  plan made for  Sequential\n"
        "Trace this model and solve again."
    )


def test_a_plan_for_another_device_is_refused():
    model = mlp(2)
    plan = replace(harshest(model, torch.randn(4, 16)), device="xpu")

    text = refused(lambda: enter(model, plan), model, PlanMismatchError)

    here = torch.get_default_device().type
    assert text == f"the plan is for xpu, the model is on {here}.\nMove the model, or trace and solve there."


def test_verify_refuses_a_plan_for_another_model():
    plan = harshest(mlp(4), x := torch.randn(4, 16))
    model = mlp(2)

    refused(lambda: lowtide.verify(model, x, plan), model, PlanMismatchError)


def test_what_is_no_plan_is_refused():
    model = mlp(2)

    text = refused(lambda: enter(model, "plan.json"), model, TypeError)

    assert text == "plan is a str. Pass what lowtide.solve or Plan.load returns."


def test_a_plan_that_moves_to_a_tier_that_is_not_here_is_refused():
    model = mlp(2)
    plan = harshest(model, torch.randn(4, 16))
    offload = replace(plan, decisions=tuple(replace(d, action="cpu_offload") for d in plan.decisions))

    text = refused(lambda: enter(model, offload), model, TierError)

    assert text == (
        "there is no host tier beside a model on cpu: its memory is the host's.\n"
        "Leave host_budget= out, and use the disk tier: scratch_dir= or disk_budget=."
    )


def body(**changes: Any) -> str:
    """A plan file with some fields changed; ``...`` takes one out."""
    fields = json.loads(harshest(mlp(2), torch.randn(4, 16)).to_json())
    fields.update(changes)
    return json.dumps({k: v for k, v in fields.items() if v is not ...})


def rows(columns: str, *values: list) -> dict[str, Any]:
    return {"columns": columns.split(), "rows": list(values)}


def decision(*values: Any) -> dict[str, Any]:
    return rows("storage action bytes op output stored recompute_ms", [*values, True, 0.0])


DAMAGED: dict[str, Callable[[], str]] = {
    "empty": lambda: "",
    "cut short": lambda: body()[:200],
    "a list": lambda: "[1, 2]",
    "version": lambda: body(version=99),
    "no version": lambda: body(version=...),
    "no ops": lambda: body(ops=...),
    "unknown field": lambda: body(surprise=1),
    "unknown column": lambda: body(frames=rows("parent path ordinal surprise", [-1, "", 0, 1])),
    "unknown action": lambda: body(decisions=decision(0, "forget", 8, 0, 0)),
    "op out of range": lambda: body(decisions=decision(0, "save", 8, 10**6, 0)),
    "negative bytes": lambda: body(decisions=decision(0, "save", -8, 0, 0)),
    "bytes as text": lambda: body(decisions=decision(0, "recompute", "8", 0, 0)),
    "output as text": lambda: body(decisions=decision(0, "recompute", 8, 0, "0")),
    "short decision": lambda: body(decisions=rows("storage action", [0, "save"])),
    "short row": lambda: body(decisions=rows("storage action bytes op output stored", [0, "save"])),
    "op in no frame": lambda: body(ops=rows("name frame", ["aten.sin.default", 10**6]), decisions=rows("storage")),
    "frame before its parent": lambda: body(
        frames=rows("parent path ordinal", [-1, "", 0], [7, "0", 0]), ops=rows("name"), decisions=rows("storage")
    ),
    "op without a name": lambda: body(ops=rows("name frame", [3, 0]), decisions=rows("storage")),
    "decisions as a number": lambda: body(decisions=3),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_plan_file_is_refused(case, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(DAMAGED[case]())

    with pytest.raises(GraphFormatError, match="^not a plan: ") as error:
        Plan.load(path)

    assert isinstance(error.value, (LowtideError, ValueError))
    assert error.value.__doc__


def test_a_version_that_nobody_knows_is_refused_by_its_number():
    with pytest.raises(GraphFormatError) as error:
        Plan.from_json(body(version=99))

    assert str(error.value) == ("not a plan: field 'version' is 99, not 2. Make the plan again with this lowtide.")


def test_a_graph_in_place_of_a_plan_is_named(tmp_path):
    json_format.save(lowtide.trace(mlp(2), torch.randn(4, 16)), tmp_path / "graph.json")

    with pytest.raises(GraphFormatError, match=r"^not a plan: this is a traced step \(a graph\)"):
        Plan.load(tmp_path / "graph.json")


def test_a_plan_that_has_been_applied_can_be_copied_and_pickled():
    model, x = mlp(), torch.randn(4, 16)
    plan = harshest(model, x)
    with lowtide.apply(model, plan):
        model(x)

    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)


def test_a_plan_survives_its_file(tmp_path):
    plan = harshest(mlp(2), torch.randn(4, 16))
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == plan
