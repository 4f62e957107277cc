"""What ``lowtide.compile`` meets in odd layers and processes: each is named, or right."""

import pytest
import torch
from support.compiled_layers import IDS, decoder, equal, reference, step_of
from support.quick import thorough_but
from torch import nn

import lowtide
from lowtide.compiled import compiled_model

pytestmark = pytest.mark.usefixtures("one_thread")


class Branching(nn.Module):
    """Which way it goes depends on values."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else x


class Choosing(nn.Module):
    """How many rows it makes depends on values."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x)[(x[:, 0] > 0).nonzero().flatten()]


def test_a_layer_whose_way_depends_on_values_is_refused_by_name():
    with pytest.raises(lowtide.UnsupportedModelError, match="^0 cannot be compiled as one graph: "):
        lowtide.compile(nn.Sequential(Branching(), Branching()), budget="60%")(torch.ones(2, 8))


@pytest.mark.parametrize("dynamic", thorough_but([False], [False, True]))
def test_a_size_that_depends_on_values_is_refused_by_name(dynamic):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        with pytest.raises(
            lowtide.UnsupportedModelError, match="^0: a compiled layer has a size that depends on values"
        ):
            lowtide.compile(nn.Sequential(Choosing(), Choosing()), budget="60%", dynamic=dynamic)(torch.ones(2, 8))


def test_a_device_that_inductor_has_no_code_for_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("torch._inductor.codegen.common.get_scheduling_for_device", lambda name: None)
    with pytest.raises(lowtide.UnsupportedModelError, match="lies on cpu, for which Inductor writes no code here"):
        compiled_model.check_devices([torch.device("cpu")])


@pytest.mark.slow
def test_a_compiler_that_forgets_in_mid_run_compiles_again_and_is_told():
    model = decoder(layers=2)
    compiled = lowtide.compile(model, budget="60%")
    step_of(compiled, model)
    first, expected = compiled.plan, reference(layers=2)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="was compiled anew, so its part of the plan is gone"):
        assert equal(step_of(compiled, model), expected)
    assert equal(step_of(compiled, model), expected)
    assert compiled.plan is not first and compiled.reason == ""
    assert (
        equal(step_of(compiled, model), expected) and compiled.plan.predicted_peak_bytes <= compiled.plan.budget_bytes
    )


@pytest.mark.slow
def test_two_models_in_one_process_have_budgets_of_their_own():
    expected = reference(layers=2)
    tight, wide = (lowtide.compile(decoder(layers=2), budget=budget) for budget in ("55%", "100%"))
    for _ in range(2):
        found = [step_of(one, one._model) for one in (tight, wide)]
        assert all(equal(one, expected) for one in found)
        assert tight.plan.predicted_peak_bytes < wide.plan.predicted_peak_bytes
    for one in (tight, wide):
        assert one.reason == "" and one.status().over_budget_steps == 0 and one.status().planned_steps == 1
    wide.set_budget("55%")
    assert equal(step_of(wide, wide._model), expected)
    assert wide.plan.predicted_peak_bytes <= wide.plan.budget_bytes


@pytest.mark.slow
def test_what_is_exported_and_compiled_ahead_of_time_is_the_model_without_a_plan(tmp_path):
    model = decoder(layers=2)
    compiled = lowtide.compile(model, budget="60%")
    step_of(compiled, model)
    with torch.no_grad():
        expected = model(IDS)
        exported = torch.export.export(model, (IDS,))
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(package)(IDS), expected)
    assert torch.equal(exported.module()(IDS), expected)
    assert equal(step_of(compiled, model), reference(layers=2)) and compiled.reason == ""


@pytest.mark.slow
def test_fit_plans_calls_of_code_in_cpp_from_end_to_end():
    """Which lowtide.compile refuses, since it reads what it plans inside of."""

    def compiled_decoder():
        torch._dynamo.reset()
        model = decoder(layers=2)
        for block in model.blocks:
            block.compile()
        return model

    with torch._inductor.config.patch(cpp_wrapper=True):
        plain = compiled_decoder()
        expected = step_of(plain, plain)
        model = compiled_decoder()
        with lowtide.fit(model, IDS, budget="70%", step=lambda model, ids: model(ids)) as fit:
            assert equal(step_of(model, model), expected)
            status = fit.status()
            assert status.in_force and status.over_budget_steps == 0 and "run again" in status.opaque_calls
