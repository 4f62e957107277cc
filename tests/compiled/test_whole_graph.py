"""``lowtide.compile`` of the model as one graph: the set that is saved is solved for the peak of the whole step."""

import pytest
import torch
from support.compiled_layers import IDS, decoder, equal, step_of
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


def measured_bytes(compiled):
    return compiled.plan.resident_bytes + peak_bytes(lambda: compiled(IDS).backward())


def test_a_whole_graphs_peak_is_solved_for_and_is_as_read():
    expected = decoder(layers=2, width=64)
    expected.compile(fullgraph=True, dynamic=False)
    model = decoder(layers=2, width=64)
    compiled = lowtide.compile(model, layers=["*"], budget="70%")
    assert equal(step_of(compiled, model), step_of(expected, expected))  # before there is a plan

    plan = compiled.plan

    assert list(plan.layers) == [""] and plan.layers[""] not in ("plain", "least", "run again")
    assert equal(step_of(compiled, model), step_of(expected, expected))
    assert measured_bytes(compiled) == pytest.approx(plan.predicted_peak_bytes, rel=0.005)
    # Solved for this budget: less than the leanest would do, nearly all that may be taken is.
    asked = plan.budget_bytes - plan.resident_bytes
    assert 0.93 * asked < plan.predicted_peak_bytes - plan.resident_bytes <= asked


@pytest.mark.slow
def test_a_whole_graph_goes_far_below_what_it_stores_and_no_further_than_its_least():
    model = decoder(width=64)
    compiled = lowtide.compile(model, layers=["*"])
    expected = step_of(compiled, model)
    assert compiled._session.ran[1].name == "least"  # running it again stores less, and peaks like the plain graph
    plain_bytes = compiled.plan.plain_peak_bytes - compiled.plan.resident_bytes

    with pytest.raises(lowtide.BudgetInfeasibleError) as infeasible:
        compiled.set_budget(compiled.plan.resident_bytes + 1)
    compiled.set_budget(infeasible.value.least_bytes)

    assert compiled.plan.predicted_peak_bytes - compiled.plan.resident_bytes < 0.55 * plain_bytes
    assert equal(step_of(compiled, model), expected)
    assert measured_bytes(compiled) == pytest.approx(compiled.plan.predicted_peak_bytes, rel=0.005)


class WithScores(nn.Module):
    """Returns its loss and what it comes from, as models of transformers do; nobody asks the latter's gradient."""

    def __init__(self):
        super().__init__()
        self.inner = decoder(layers=2, width=64)

    def forward(self, ids):
        scores = self.inner.head(self.inner.blocks[1](self.inner.blocks[0](self.inner.embed(ids))))
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten()), scores


@pytest.mark.slow
def test_zeros_for_outputs_nobody_asks_the_gradient_of_count_in_backward_alone():
    model = WithScores()
    compiled = lowtide.compile(model, layers=["*"], budget="70%")
    compiled(IDS)[0].backward()

    plan = compiled.plan
    measured = plan.resident_bytes + peak_bytes(lambda: compiled(IDS)[0].backward())

    assert plan.margin_bytes == 0
    assert measured == pytest.approx(plan.predicted_peak_bytes, rel=0.005)


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.inner(x)


def test_a_model_that_is_no_one_graph_is_refused_as_the_model():
    with pytest.raises(lowtide.errors.UnsupportedModelError, match="^the model cannot be compiled as one graph: "):
        lowtide.compile(Breaking(), layers=["*"])(torch.randn(2, 8))
