"""``lowtide.compile`` in loops as people write them: what no plan counts is told, and nothing ends the run."""

import warnings

import pytest
import torch
from support.compiled_layers import IDS, Decoder, decoder, equal, reference, step_of

import lowtide
from lowtide.compiled import compiled_model, layer_calls
from lowtide.measurement.allocator import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


def compiled_decoder(**options):
    """Two layers and a plan that is in force."""
    model = decoder(layers=2)
    compiled = lowtide.compile(model, **{"budget": "60%", **options})
    step_of(compiled, model)
    assert compiled.plan is not None and set(compiled.plan.layers.values()) != {"plain"}
    return model, compiled


def test_a_budget_holds_as_read_and_gradients_are_those_of_plain_compiled_layers():
    model, compiled = compiled_decoder()
    assert equal(step_of(compiled, model), reference(layers=2))
    measured = compiled.plan.resident_bytes + peak_bytes(lambda: compiled(IDS).backward())
    assert measured <= compiled.plan.predicted_peak_bytes <= compiled.plan.budget_bytes
    assert compiled.plan.predicted_peak_bytes == pytest.approx(measured, rel=0.005)


def test_evaluation_of_any_number_of_lengths_runs_between_steps():
    model, compiled = compiled_decoder()
    plain = Decoder(layers=2)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for length in range(3, 15):
            torch.testing.assert_close(compiled(IDS[:, :length]), plain(IDS[:, :length]))
    assert equal(step_of(compiled, model), reference(layers=2)) and compiled.reason == ""


@pytest.mark.slow
def test_a_budget_that_no_plan_fits_leaves_the_plan_in_force_and_nothing_is_compiled_again(monkeypatch):
    model, compiled = compiled_decoder()
    before, made = compiled.plan, []
    with pytest.raises(lowtide.BudgetInfeasibleError):
        compiled.set_budget(before.resident_bytes + 1)
    assert compiled.plan is before and equal(step_of(compiled, model), reference(layers=2))

    compile_layer = compiled_model.LayerKind.__call__
    monkeypatch.setattr(compiled_model.LayerKind, "__call__", lambda *args: made.append(1) or compile_layer(*args))
    compiled.set_budget(None)
    compiled.set_budget("60%")
    step_of(compiled, model)
    assert compiled.plan.layers == before.layers and not made


def test_several_calls_before_one_backward_are_told_and_store_as_little_as_they_can():
    _, compiled = compiled_decoder()
    with pytest.warns(UserWarning, match="several calls of the model ran before one backward"):
        (compiled(IDS) + compiled(IDS.flip(0))).backward()
    assert compiled.plan is None and "more than its budget" in compiled.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        (compiled(IDS) + compiled(IDS.flip(0))).backward()
    assert compiled.plan is None


@pytest.mark.slow
def test_accumulation_is_no_several_calls():
    _, compiled = compiled_decoder()
    for _ in range(2):
        (compiled(IDS) / 2).backward()
    assert compiled.reason == "" and compiled.plan is not None


@pytest.mark.slow
def test_layers_that_train_from_now_on_are_planned_anew():
    model = decoder(layers=2)
    model.blocks[0].requires_grad_(False)
    compiled = lowtide.compile(model, budget="70%")
    compiled(IDS).backward()
    first = compiled.plan
    model.blocks[0].requires_grad_(True)
    compiled(IDS).backward()
    assert compiled.plan is not first


@pytest.mark.slow
def test_a_layer_that_was_compiled_anew_is_told_and_planned_again():
    model, compiled = compiled_decoder()
    for block in model.blocks:
        block.dropout = 1e-9  # a number in the code: another graph
    with pytest.warns(UserWarning, match="was compiled anew, so its part of the plan is gone"):
        compiled(IDS).backward()
    compiled(IDS).backward()
    assert compiled.plan is not None and compiled.reason == ""


@pytest.mark.slow
def test_more_shapes_than_are_planned_run_as_they_are_and_are_told(monkeypatch):
    monkeypatch.setattr(layer_calls, "_MOST_SHAPES", 1)
    model, compiled = compiled_decoder()
    with pytest.warns(UserWarning, match="more than 1 sets of input shapes"):
        found = step_of(compiled, model, IDS[:2])
    plain = decoder(layers=2)
    torch.testing.assert_close(found[:-1], step_of(plain, plain, IDS[:2])[:-1])
    assert "Pad the batches" in compiled.reason
    assert equal(step_of(compiled, model), reference(layers=2))  # the first shape's plan stays


@pytest.mark.slow
def test_a_plan_that_is_asked_for_elsewhere_knows_the_steps_autocast():
    model = decoder(layers=2)
    compiled = lowtide.compile(model, budget="60%", round_as_eager=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(IDS)
    loss.backward()
    with torch.no_grad():
        compiled.set_budget("56%")  # outside of autocast, and without gradients
    assert compiled.plan is not None
    assert not any("does not have" in reason for reason in compiled.plan.refused)
