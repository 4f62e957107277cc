"""``lowtide.compile(dynamic=True)``: compiled once, planned for the largest, and what is smaller runs by that plan."""

import pytest
import torch
from support.compiled_layers import decoder, equal, step_of
from torch import nn

import lowtide
from lowtide.compiled import captured_layer, layer_calls, samples
from lowtide.compiled.compiled_model import _many_shapes
from lowtide.compiled.generated_code import UnreadableCodeError
from lowtide.compiled.input_shapes import InputShapes, shapes_of
from lowtide.compiled.partitioner import BudgetedChoices, ChoicesFoundError
from lowtide.compiled.sizes import Sizes
from lowtide.measurement.allocator import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.randint(0, 64, (4, 48), generator=torch.Generator("cpu").manual_seed(0)).to(torch.get_default_device())


def references(lengths, **options):
    """Steps of the layers that PyTorch compiles alone, once for all lengths."""
    model = decoder(layers=2, **options)
    with _many_shapes(dynamic=True):
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=True)
        return {length: step_of(model, model, IDS[:, :length]) for length in lengths}


@pytest.fixture
def compilations(monkeypatch):
    """What Inductor has made code of, by the names that are saved."""
    made, compile_layer = [], captured_layer.CapturedLayer._compile

    def counting(captured, partitioner, lowered, *, reuse):
        if not isinstance(partitioner, BudgetedChoices):  # which asks PyTorch, and makes no code
            made.append(partitioner.saved)
        return compile_layer(captured, partitioner, lowered, reuse=reuse)

    monkeypatch.setattr(captured_layer.CapturedLayer, "_compile", counting)
    return made


@pytest.mark.slow
def test_a_plan_for_the_longest_serves_the_shorter_and_a_longer_step_is_planned(compilations):
    expected = references([23, 17, 5, 41])
    model = decoder(layers=2)
    compiled = lowtide.compile(model, budget="60%", dynamic=True)
    assert equal(step_of(compiled, model, IDS[:, :23]), expected[23])
    first = compiled.plan
    assert set(first.layers.values()) != {"plain"}
    before = len(compilations)
    for length in (23, 17, 5, 17):
        assert equal(step_of(compiled, model, IDS[:, :length]), expected[length]), length
        assert compiled.plan is first and compiled.reason == ""
        taken = first.resident_bytes + peak_bytes(lambda size=length: compiled(IDS[:, :size]).backward())
        assert taken <= first.predicted_peak_bytes
    status = compiled.status()
    assert (status.planned_steps, status.steps, status.plans) == (8, 9, 1) and len(compilations) == before

    assert equal(step_of(compiled, model, IDS[:, :41]), expected[41])
    longer = compiled.plan
    taken = longer.resident_bytes + peak_bytes(lambda: compiled(IDS[:, :41]).backward())
    assert taken == pytest.approx(longer.predicted_peak_bytes, rel=0.005) and taken <= longer.predicted_peak_bytes
    assert longer.predicted_peak_bytes > first.predicted_peak_bytes
    assert compilations.count(None) == 1 and len(compilations) == len(set(compilations)), "once for all lengths"
    compiled(IDS[:, :33]).backward()
    assert compiled.plan is longer


@pytest.mark.slow
def test_dropout_keeps_its_mask_at_other_lengths():
    model = decoder(layers=2, dropout=0.3)
    plain = lowtide.compile(decoder(layers=2, dropout=0.3), dynamic=True)
    compiled = lowtide.compile(model, budget="70%", dynamic=True)
    for length in (41, 23):
        for run, of in ((plain, plain._model), (compiled, model)):
            step_of(run, of, IDS[:, :length])
        assert equal(step_of(compiled, model, IDS[:, :length]), step_of(plain, plain._model, IDS[:, :length]))
    assert compiled.status().plans == 1 and set(compiled.plan.layers.values()) != {"plain"}


@pytest.mark.slow
def test_what_has_other_bits_at_a_length_does_not_serve_it(monkeypatch):
    model = decoder(layers=2)
    compiled = lowtide.compile(model, budget="60%", dynamic=True)
    step_of(compiled, model, IDS[:, :23])
    assert set(compiled.plan.layers.values()) != {"plain"}
    answers, prove = [["output 0 has other bits"]], layer_calls.why_not_equal
    monkeypatch.setattr(
        layer_calls, "why_not_equal", lambda *given, **most: answers.pop() if answers else prove(*given, **most)
    )
    with pytest.warns(UserWarning, match=r"does not serve these sizes by a plan for larger: output 0 has other bits"):
        step_of(compiled, model, IDS[:, :17])
    step_of(compiled, model, IDS[:, :17])  # watched
    expected = references([17])[17]
    assert equal(step_of(compiled, model, IDS[:, :17]), expected)
    assert compiled.reason == "" and compiled.status().plans == 2


def test_a_plan_covers_inputs_that_are_the_same_but_smaller():
    large = InputShapes("pattern", (4, 32))
    assert large.covers(InputShapes("pattern", (4, 20))) and large.covers(InputShapes("pattern", (2, 2)))
    assert not large.covers(InputShapes("pattern", (4, 33))) and not large.covers(InputShapes("another", (4, 20)))
    assert not large.covers(InputShapes("pattern", (4, 1))), "the compiler treats a size of 1 by itself"


def test_without_dynamic_every_length_is_a_set_of_its_own():
    compiled = lowtide.compile(decoder(layers=2), budget="60%")
    short, long = (shapes_of((IDS[:, :n],), {}, compiled._model) for n in (20, 32))
    compiled._plans[long] = object()
    assert compiled._planned_as(short) == short
    compiled._dynamic = True
    assert compiled._planned_as(short) == long


class Small(nn.Module):
    """One product and one kernel."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).tanh()


def captured(module, *inputs):
    found = []

    def backend(graph, given):
        found.append(captured_layer.CapturedLayer(graph, given, dynamic=True))
        found[0].variant("plain", None, kernels=False)
        return graph

    with _many_shapes(dynamic=True):
        torch.compile(module, backend=backend, dynamic=True)(*inputs)
    return found[0]


@pytest.mark.thorough
def test_bytes_are_those_of_the_sizes_that_are_asked_for():
    x = torch.randn(4, 24, 8, requires_grad=True)
    layer = captured(Small(), x)
    positions = {i: n for i, n in enumerate(layer._symbols)}
    assert len(positions) == 2

    def at(length):
        inputs = [x[:, :1].expand(4, length, 8) if t.dim() == 3 else t for t in map(given, range(len(layer._fakes)))]
        for place, number in zip(layer._symbols, (4, length), strict=True):
            inputs[place] = number
        return layer.at(inputs)

    def given(i):
        return layer.parameters.get(i, x)

    small, large = (at(length).variant("plain", None, kernels=False).memory for length in (8, 32))
    assert large.forward_end_bytes == 4 * small.forward_end_bytes > 0
    assert len({at(8).key, at(32).key, layer.key}) == 3


def test_a_size_that_depends_on_values_has_no_bytes():
    size = torch.fx.experimental.symbolic_shapes.ShapeEnv().create_unbacked_symint()
    with pytest.raises(lowtide.UnsupportedModelError, match=r"depends on values \(u0\)"):
        Sizes().of(size)


@pytest.mark.thorough
def test_conditions_that_dynamo_no_longer_checks_belong_to_all_that_is_compiled_since():
    layer = captured(Small(), torch.randn(4, 24, 8, requires_grad=True))
    sizes = [f for f in layer._fakes if isinstance(f, torch.SymInt)]
    rows = sizes[layer.sizes.numbers.index(4)]
    assert layer._context.fake_mode.shape_env.frozen
    with layer._new_conditions() as first:
        assert rows < 100
    with layer._new_conditions() as second:
        assert rows < 100  # known by now
    assert [str(c) for c in first] == [str(c) for c in second] and len(first) == 1
    assert layer.sizes.meet(first[0]) and not Sizes(layer.sizes.symbols, (100, 100)).meet(first[0])
    with pytest.raises(UnreadableCodeError, match="one size only"), layer._new_conditions():
        assert rows == 4
    assert layer.sizes.of(rows) == 4 and not rows.node.expr.is_number, "other variants serve other sizes"

    layer._code.made[None].holds_for = tuple(first)
    layer.sizes = Sizes(layer.sizes.symbols, (100, 100))
    with pytest.raises(UnreadableCodeError, match="holds for other sizes"):
        layer.variant("plain", None, kernels=False)


@pytest.mark.thorough
def test_what_pytorch_would_save_is_not_asked_where_that_would_be_for_one_size(monkeypatch):
    layer = captured(Small(), torch.randn(4, 24, 8, requires_grad=True))
    sizes = [f for f in layer._fakes if isinstance(f, torch.SymInt)]
    rows = sizes[layer.sizes.numbers.index(4)]

    def fixing_the_size(*args, **options):
        assert rows == 4
        raise ChoicesFoundError

    monkeypatch.setattr(layer, "_compile", fixing_the_size)
    assert layer.pytorchs_sets() == [] and not rows.node.expr.is_number


def test_a_sample_has_the_strides_of_the_input():
    part = torch.arange(48).reshape(4, 12)[:, :8]
    made = samples.Sample.of(part).tensor()
    assert made.stride() == part.stride() and torch.equal(made, part)
