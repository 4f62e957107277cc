"""``lowtide.compile`` in loops as people write them: what no plan counts is told, and nothing ends the run."""

import copy
import pickle
import warnings

import pytest
import torch
from support.compiled_layers import IDS, Block, Decoder, decoder, equal, reference, step_of
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.compiled import captured_layer, layer_calls
from lowtide.compiled.compiled_plan import CompiledPlan
from lowtide.compiled.counted_steps import CountedStep, CountedSteps
from lowtide.compiled.generated_code import UnreadableCodeError
from lowtide.compiled.input_shapes import shapes_of
from lowtide.compiled.partitioner import BudgetedChoices
from lowtide.measurement.allocator import peak_bytes
from lowtide.step.batches import Call
from lowtide.training.budget import StepBudget
from lowtide.training.notices import Notices

pytestmark = pytest.mark.usefixtures("one_thread")


def compiled_decoder(**options):
    """Two layers and a plan that is in force."""
    model = decoder(layers=2)
    compiled = lowtide.compile(model, **{"budget": "60%", **options})
    step_of(compiled, model)
    assert compiled.plan is not None and set(compiled.plan.layers.values()) != {"plain"}
    return model, compiled


def test_a_budget_holds_as_read_and_gradients_are_those_of_plain_compiled_layers():
    """In a loop that evaluates, and in the end calls the model twice: compiling again for each would take minutes."""
    model = decoder(layers=2)
    compiled = lowtide.compile(model, budget="60%", optimizer=torch.optim.AdamW(model.parameters()))
    step_of(compiled, model)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    assert compiled.plan.resident_bytes == pytest.approx(4 * parameter_bytes, rel=0.02)  # gradients, and AdamW's two
    assert set(compiled.plan.layers.values()) != {"plain"}
    assert equal(step_of(compiled, model), reference(layers=2))
    measured = compiled.plan.resident_bytes + peak_bytes(lambda: compiled(IDS).backward())
    assert measured <= compiled.plan.predicted_peak_bytes <= compiled.plan.budget_bytes
    assert compiled.plan.predicted_peak_bytes == pytest.approx(measured, rel=0.005)
    assert equal(step_of(model, model), reference(layers=2)), "as a trainer calls it"
    status = compiled.status()
    assert (status.steps, status.planned_steps, status.calls, status.plans) == (4, 3, 4, 1) and status.in_force
    assert status.budget_bytes == compiled.plan.budget_bytes and status.over_budget_steps == 0
    above = measured - compiled.plan.resident_bytes  # of which AdamW's state is not there yet
    assert status.last_peak_bytes == pytest.approx(2 * parameter_bytes + IDS.nbytes + above, abs=256)
    report = compiled.report()
    assert report.startswith("The plan is in force: 3 of 4 steps") and "blocks.*" in report
    with pytest.raises(lowtide.UnsupportedModelError, match="has a plan already"):
        lowtide.compile(model)
    with pytest.raises(lowtide.LowtideError, match="is already fitted"):
        lowtide.fit(model, budget="60%")
    assert "inside of compiled layers" in report and "warnings" not in report

    plain = Decoder(layers=2)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS[:, :5]), plain(IDS[:, :5]))
    assert equal(step_of(compiled, model), reference(layers=2)) and compiled.reason == ""

    with pytest.warns(UserWarning, match="several calls of the model ran before one backward"):
        (compiled(IDS) + compiled(IDS.flip(0))).backward()
    assert compiled.plan is None and "more than its budget" in compiled.reason


@pytest.mark.slow
def test_gradients_count_from_where_backward_makes_them():
    """Of two micro-batches the first makes them, the second adds to them: each has its own plan."""
    torch.manual_seed(0)
    model = Decoder(layers=2, width=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = lowtide.compile(model, budget="85%")
    found = []
    for _ in range(3):
        for _ in range(2):
            compiled(IDS).backward()
            found.append((compiled.status(), compiled.plan))
        optimizer.step()
        optimizer.zero_grad()
    planned = [(status.last_peak_bytes, plan.predicted_peak_bytes) for status, plan in found[2:]]

    assert all(abs(counted - predicted) < 1024 for counted, predicted in planned)
    assert planned[0][1] + sum(p.nbytes for p in model.parameters()) // 2 < planned[1][1], (
        "gradients that are not there"
    )
    assert [status.why_not for status, _ in found[:2]] == ["the last step was watched, to plan the next"] * 2
    assert compiled.status().planned_steps == 4 and compiled.status().plans == 2


@pytest.mark.slow
def test_the_state_of_an_optimizer_that_nobody_passed_is_in_the_plan():
    model = decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    compiled = lowtide.compile(model, budget="60%")
    step_of(compiled, model)
    optimizer.step()
    step_of(compiled, model)

    state_bytes = sum(t.nbytes for kept in optimizer.state.values() for t in kept.values())
    there = sum(2 * p.nbytes for p in model.parameters()) + IDS.nbytes
    assert compiled.plan.resident_bytes == pytest.approx(there + state_bytes, abs=256)


def test_a_plan_of_compiled_layers_is_a_plan(tmp_path):
    """Decisions inside of the layers, what is at the peak, pages and files, as of any plan."""
    _, compiled = compiled_decoder()
    plan = compiled.plan
    layers = {plan.scope(d) for d in plan.decisions}
    plan.save(tmp_path / "plan.json")
    loaded = lowtide.Plan.load(tmp_path / "plan.json")

    assert isinstance(plan, lowtide.Plan) and layers == {"blocks.0", "blocks.1"}
    assert plan.counts["recompute"] > 0 and plan.plain_step_ms > 0
    assert "blocks" in str(plan.explain()) and "recompute" in plan._repr_html_()
    assert (loaded.decisions, loaded.predicted_peak_bytes) == (plan.decisions, plan.predicted_peak_bytes)
    with pytest.raises(lowtide.PlanMismatchError, match="is of another model"):
        compiled.use(loaded)
    compiled.set_budget(None)
    assert compiled.plan.keeps_everything or set(compiled.plan.layers.values()) == {"plain"}
    with pytest.raises(lowtide.PlanMismatchError, match="one of lowtide.compile"):
        lowtide.apply(decoder(layers=2), plan).__enter__()


@pytest.mark.thorough
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
    compiled_now, compile_layer = [], captured_layer.CapturedLayer._compile

    def counting(captured, partitioner, lowered, *, reuse):
        if not isinstance(partitioner, BudgetedChoices):  # which asks PyTorch what it would save, and compiles nothing
            compiled_now.append((id(captured), partitioner.saved))
        return compile_layer(captured, partitioner, lowered, reuse=reuse)

    monkeypatch.setattr(captured_layer.CapturedLayer, "_compile", counting)
    model, compiled = compiled_decoder()
    before = compiled.plan
    with pytest.raises(lowtide.BudgetInfeasibleError):
        compiled.set_budget(before.resident_bytes + 1)
    assert compiled.plan is before and equal(step_of(compiled, model), reference(layers=2))

    compiled.set_budget(None)
    compiled.set_budget("60%")
    step_of(compiled, model)
    assert compiled.plan.predicted_peak_bytes <= compiled.plan.budget_bytes == before.budget_bytes
    assert len(compiled_now) == len(set(compiled_now)) > 2


@pytest.mark.thorough
def test_several_calls_before_one_backward_are_told_and_store_as_little_as_they_can():
    _, compiled = compiled_decoder()
    with pytest.warns(UserWarning, match="several calls of the model ran before one backward"):
        (compiled(IDS) + compiled(IDS.flip(0))).backward()
    assert compiled.plan is None and "more than its budget" in compiled.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        (compiled(IDS) + compiled(IDS.flip(0))).backward()
    assert compiled.plan is None
    compiled.set_budget("60%")  # knows one call only
    assert compiled.plan is None


def test_steps_that_a_dispatch_mode_sees_run_as_they_are_and_later_ones_compiled_and_planned(caplog):
    """As where FLOPs are counted now and then. In PyTorch 2.13 Dynamo leaves code that it met so alone for good."""
    model, plain = decoder(layers=2), decoder(layers=2)
    compiled = lowtide.compile(model, budget="60%")
    with FlopCounterMode(display=False) as counter:  # before anything is compiled
        assert equal(step_of(compiled, model), step_of(plain, plain))
    assert counter.get_total_flops() > 0 and "FlopCounterMode" in compiled.status().why_not
    step_of(compiled, model)
    plan = compiled.plan
    assert equal(step_of(compiled, model), reference(layers=2)) and compiled.status().in_force
    with FlopCounterMode(display=False):
        assert equal(step_of(compiled, model), step_of(plain, plain))
    assert not compiled.status().in_force and compiled.plan is plan
    assert equal(step_of(compiled, model), reference(layers=2)) and compiled.status().in_force
    assert compiled.status().planned_steps == 2 and compiled.reason == ""
    assert [record.message for record in caplog.records if "FlopCounterMode" in record.message] == [
        f"lowtide: {layer_calls.SEEN_BY_A_MODE}"
    ]


@pytest.mark.slow
def test_a_call_that_lived_beside_a_late_one_loses_its_plan_too():
    _, compiled = compiled_decoder()
    compiled(IDS[:2]).backward()
    assert compiled.plan is not None
    with pytest.warns(UserWarning, match="several calls of the model"):
        (compiled(IDS) + compiled(IDS[:2])).backward()
    assert compiled._plans == {}


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


@pytest.mark.parametrize("planned", [layer_calls.PLAIN, "saving 3 values"])
def test_code_that_is_made_anew_is_no_part_of_the_plan_even_under_the_same_name(planned):
    memory = captured_layer.VariantMemory(0, 0, 0, 0, 0)
    session = layer_calls.Session()

    def shape(*names):
        made = object.__new__(layer_calls.LayerShape)
        made._session, made.whole = session, False
        made.variants = {name: captured_layer.Variant(name, None, memory, run=list) for name in names}
        return made

    names = layer_calls.PLAIN, layer_calls.LEAST, layer_calls.AGAIN
    old, anew = shape(*names, planned), shape(*names)
    session.variants, session.shapes = {"blocks.0": planned}, {"blocks.0": old}
    assert old.running("blocks.0").name == planned and session.not_as_planned == ""
    assert anew.running("blocks.0").name == layer_calls.LEAST
    assert "blocks.0 was compiled anew" in session.not_as_planned


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


@pytest.mark.slow
def test_a_later_shape_that_no_plan_fits_ends_no_run():
    model = decoder(layers=2)
    compiled = lowtide.compile(model, budget=1)
    compiled(IDS[:2]).backward()
    for _ in range(2):  # at the start it is an error, each time
        with pytest.raises(lowtide.BudgetInfeasibleError) as infeasible:
            compiled(IDS[:2])
    compiled.set_budget(infeasible.value.least_bytes)
    first = compiled.plan
    expected = reference(layers=2)
    with pytest.warns(UserWarning, match="no plan fits .* Steps of these input shapes take more"):
        for _ in range(2):
            assert equal(step_of(compiled, model), expected)
    assert "no plan fits" in compiled.reason and compiled.plan is first
    compiled.set_budget(None)
    assert compiled.plan.plain_peak_bytes > first.plain_peak_bytes  # of the longer step


@pytest.mark.slow
def test_a_later_shape_whose_code_cannot_be_read_ends_no_run(monkeypatch):
    model, compiled = compiled_decoder()

    def unreadable(*args, **_):
        raise UnreadableCodeError("generated code uses 'strange'.")

    with monkeypatch.context() as patched:
        patched.setattr(layer_calls.LayerShape, "__init__", unreadable)
        with pytest.warns(UserWarning, match="runs as it is.*uses 'strange'"):
            compiled(IDS[:2]).backward()
        with pytest.raises(UnreadableCodeError, match="^blocks.0: "):  # at the start it is an error
            lowtide.compile(decoder(layers=2), budget="60%")(IDS[:2])
    assert equal(step_of(compiled, model), reference(layers=2))


class LateBlock(Block):
    """Leaves the graph in its forward."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


class Grows(Decoder):
    """Has blocks of another class, which run from some step on."""

    def __init__(self):
        super().__init__(layers=2)
        self.late, self.deep = nn.ModuleList(LateBlock() for _ in range(2)), False

    def forward(self, ids):
        x = self.embed(ids)
        for block in [*self.blocks, *(self.late if self.deep else [])]:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.thorough
def test_layers_that_run_later_and_cannot_be_compiled_end_no_run_but_a_first_step():
    torch.manual_seed(0)
    model = Grows()
    compiled = lowtide.compile(model, budget="80%")
    compiled(IDS).backward()
    assert compiled.plan is not None

    model.deep = True
    with pytest.warns(UserWarning, match=r"late.1 is a layer which is not compiled .* cannot be compiled as one graph"):
        compiled(IDS).backward()
    assert all(p.grad is not None for p in model.parameters())
    compiled.remove()
    with pytest.raises(lowtide.UnsupportedModelError, match=r"late.0 cannot be compiled as one graph"):
        lowtide.compile(model, budget="80%")(IDS)


def test_flags_and_names_part_steps_and_numbers_do_not():
    model = decoder(layers=2)

    def shapes(*args, **kwargs):
        return shapes_of(args, kwargs, model)

    parted = [(IDS,), (IDS, True), (IDS, False), (IDS, None), (IDS[:2],), (IDS.float(),)]
    named = [{"ids": IDS}, {"mask": IDS}, {"ids": IDS, "states": True}, {"ids": {"deep": IDS}}]
    assert len({*(shapes(*args) for args in parted), *(shapes(**kwargs) for kwargs in named)}) == 10
    assert shapes(ids=IDS, count=1, name="a") == shapes(ids=IDS, count=2, name="b")


@pytest.mark.slow
def test_layers_that_differ_in_a_number_share_their_shapes(monkeypatch):
    monkeypatch.setattr(layer_calls, "_MOST_SHAPES", 1)
    model = decoder(layers=3)
    for i, block in enumerate(model.blocks):
        block.dropout = i * 1e-9
    compiled = lowtide.compile(model)
    compiled(IDS).backward()
    assert compiled.plan is not None and compiled.reason == ""


def test_a_layer_that_is_compiled_anew_too_often_runs_as_it_is(monkeypatch):
    model = decoder(layers=2)
    compiled = lowtide.compile(model)

    def limit(*args, **kwargs):
        raise torch._dynamo.exc.FailOnRecompileLimitHit("recompile_limit reached")

    for call in compiled._calls.values():
        monkeypatch.setattr(call, "_run", limit)
    plain = decoder(layers=2)
    with pytest.warns(UserWarning, match="blocks.1 is a layer which .* compiled anew too often"):
        assert equal(step_of(compiled, model), step_of(plain, plain))


def test_copies_and_pickles_hold_the_model_and_the_settings():
    model = decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lowtide.compile(model, budget="60%", layers=["blocks.*"], optimizer=optimizer).eval()
    for copied in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        mine, copies = dict(model.named_parameters()), dict(copied.named_parameters())
        assert mine.keys() == copies.keys() and not copied.training
        assert all(torch.equal(mine[name], copies[name]) and mine[name] is not copies[name] for name in mine)
        assert copied._optimizer.param_groups[0]["params"][0] is next(copied.parameters())
        assert copied._budget == 0.6 and list(copied._calls) == ["blocks.0", "blocks.1"]
        assert all(copied._calls[name]._call_impl.__self__ is block for name, block in modules_of(copied))
    compiled.remove()
    with pytest.raises(lowtide.PlanMismatchError, match="taken apart"):
        copy.deepcopy(compiled)


def modules_of(compiled):
    return [(f"blocks.{i}", block) for i, block in enumerate(compiled.blocks)]


@pytest.mark.slow
def test_a_copy_trains_by_a_plan_of_its_own():
    _, compiled = compiled_decoder()
    copied = copy.deepcopy(compiled)
    assert copied.plan is None
    for p in copied._model.parameters():
        p.grad = torch.zeros_like(p)
    assert equal(step_of(copied, copied._model), reference(layers=2))
    assert copied.plan is not None and copied.plan is not compiled.plan


def test_code_in_cpp_from_end_to_end_is_refused_by_the_name_of_the_setting():
    with torch._inductor.config.patch(cpp_wrapper=True):
        with pytest.raises(lowtide.errors.UnsupportedModelError, match=r"cpp_wrapper is on.*cpp_wrapper = False"):
            lowtide.compile(decoder(layers=2))(IDS)


@pytest.mark.thorough
def test_the_state_of_an_optimizer_lives_throughout():
    found = []
    for options in ({}, {"optimizer": torch.optim.AdamW}):
        model = decoder(layers=2)
        compiled = lowtide.compile(model, **{name: kind(model.parameters()) for name, kind in options.items()})
        compiled(IDS).backward()
        found.append((compiled.plan.resident_bytes, sum(p.nbytes for p in model.parameters())))
    (without, _), (counted, parameter_bytes) = found
    assert counted - without == pytest.approx(2 * parameter_bytes, rel=0.01)


@pytest.mark.slow
def test_named_layers_alone_are_compiled_and_planned():
    model, compiled = compiled_decoder(layers=["blocks.1"], budget="90%")
    assert list(compiled.plan.layers) == ["blocks.1"]
    expected = decoder(layers=2)
    expected.blocks[1].compile(fullgraph=True, dynamic=False)
    assert equal(step_of(compiled, model), step_of(expected, expected))


def test_a_plan_that_is_asked_for_elsewhere_knows_the_steps_state():
    captured = []

    def backend(graph, inputs):
        captured.append(captured_layer.CapturedLayer(graph, inputs))
        return graph

    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True)
        with torch.autocast("cpu", torch.bfloat16):
            torch.compile(torch.nn.Linear(8, 8), backend=backend)(torch.randn(2, 8))
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(2)
        with torch.inference_mode(), captured[0].ambient.entered():
            assert torch.get_float32_matmul_precision() == "high" and torch.get_num_threads() == before[1]
            assert torch.are_deterministic_algorithms_enabled() and torch.is_grad_enabled()
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16 and torch.is_autocast_enabled("cpu")
            assert not torch.is_inference_mode_enabled()
        assert torch.get_float32_matmul_precision() == "highest" and torch.get_num_threads() == 2
        assert not torch.are_deterministic_algorithms_enabled() and not torch.is_autocast_enabled("cpu")
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before[1])


@pytest.mark.slow
def test_a_step_that_takes_more_than_its_budget_is_told_and_planned_again_with_that_margin(monkeypatch):
    model, compiled = compiled_decoder()
    compiled.set_budget("80%")
    plan = compiled.plan
    (shapes,) = compiled._plans
    over = CountedStep(shapes, plan, plan.budget_bytes + 4096)
    found = iter([over])
    monkeypatch.setattr(compiled._counted, "take", lambda: next(found, None))
    with pytest.warns(UserWarning, match="4.00 KiB more than the budget, by the allocator's count"):
        step_of(compiled, model)

    again = compiled.plan
    assert again is not plan and again.budget_bytes == plan.budget_bytes
    assert again.margin_bytes == over.peak_bytes - plan.predicted_peak_bytes
    assert again.predicted_peak_bytes <= again.budget_bytes
    assert equal(step_of(compiled, model), reference(layers=2))


def test_one_step_alone_that_takes_more_than_its_budget_may_be_chance():
    memory = StepBudget(nn.Linear(1, 1), "100%")
    steps = CountedSteps(memory, Notices())
    plan, peaks = object.__new__(CompiledPlan), iter([10, 30, 20])
    object.__setattr__(plan, "budget_bytes", 15)
    steps._peak.end = lambda: next(peaks)
    found = []
    for _ in range(3):
        steps.begin(nn.Linear(1, 1), Call((), {}), "", plan, budget_bytes=None, why_not="")
        steps.reach()
        steps.after_backward((), None, retains=False, creates=False)
        found.append((judged := steps.take()) and judged.peak_bytes)

    assert found == [None, 10, 20]
    assert (steps.counters.steps, steps.counters.over_budget_steps, steps.counters.excess_bytes) == (3, 2, 15)
