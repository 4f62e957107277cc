"""A step that makes its gradients and one that adds to them: either graph from the other, with the allocator's peak."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.graph.costs import Costs
from lowtide.graph.gradients import (
    gradient_bytes_at,
    with_gone_in_step,
    with_gradients_before,
    with_gradients_made,
    with_part_of_gradients,
)
from lowtide.graph.json_format import load, save
from lowtide.graph.step_graph import NEW_GRADIENT, RUN
from lowtide.measurement.allocator import peak_bytes
from lowtide.simulation.simulator import simulate_actions


class Tied(nn.Module):
    """One weight gets its gradient in two parts, and one layer runs twice."""

    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(256, 32), nn.Linear(32, 32), nn.Linear(32, 256)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.inner(self.inner(self.embedding(ids)).relu()))


MODELS = {
    "wide": (lambda: nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()), torch.randn(32, 64)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        torch.randn(2, 3, 16, 16),
    ),
    "tied": (Tied, torch.arange(128).reshape(4, 32)),
}


@pytest.fixture(params=MODELS)
def traced(request):
    """A model, its batch, and the graphs of both steps as they were recorded."""
    build, batch = MODELS[request.param]
    torch.manual_seed(0)
    model = build()
    making = lowtide.trace(model, batch)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model, batch, making, lowtide.trace(model, batch)


def costs_of(graph):
    return Costs((1.0,) * len(graph.ops))


def plain_peak(graph):
    return simulate_actions(graph, costs_of(graph), {}).peak_bytes


def first_of_backward(graph):
    """The event after the last op before backward."""
    runs = [at for at, (kind, number) in enumerate(graph.events) if kind == RUN and not graph.ops[number].backward]
    return runs[-1] + 1


def test_either_graph_gives_the_other(traced):
    _, _, making, adding = traced

    kinds = [{s.kind for s in graph.storages} for graph in (making, adding)]
    assert NEW_GRADIENT in kinds[0] - kinds[1]
    assert making.resident == adding.resident
    assert making.start_bytes == making.resident_bytes - making.resident["gradients"]
    assert adding.start_bytes == adding.resident_bytes
    assert plain_peak(with_gradients_before(making)) == plain_peak(adding)
    assert plain_peak(with_gradients_made(adding)) == plain_peak(making)
    assert with_gradients_before(adding) is adding and with_gradients_made(making) is making


def test_all_gradients_are_there_when_the_step_ends(traced):
    _, _, making, adding = traced
    assert gradient_bytes_at(making, 0) == 0 and gradient_bytes_at(adding, 0) == adding.resident["gradients"]
    for graph in (making, adding, with_gradients_before(making), with_gradients_made(adding)):
        assert gradient_bytes_at(graph, len(graph.events) - 1) == graph.resident["gradients"]


@pytest.mark.usefixtures("one_thread")
def test_training_without_accumulation_takes_less_as_the_allocator_counts(traced):
    model, batch, making, adding = traced

    def step():
        output = model(batch)
        loss = output.float().square().mean()
        loss.backward()
        return output, loss

    model.zero_grad()
    step()
    model.zero_grad()
    made, added = peak_bytes(step), peak_bytes(step)

    assert plain_peak(making) - making.start_bytes == pytest.approx(made, rel=1e-3, abs=64)
    assert plain_peak(adding) - adding.start_bytes == pytest.approx(added, rel=1e-3, abs=64)
    assert plain_peak(making) < plain_peak(adding)


def test_a_rank_that_keeps_a_part_of_each_gradient(traced):
    _, _, making, adding = traced
    whole = making.resident["gradients"]

    quarter = with_part_of_gradients(making, whole // 4)

    assert sum(s.bytes for s in quarter.storages if s.kind == NEW_GRADIENT) == whole // 4
    assert quarter.resident_bytes == making.resident_bytes - whole + whole // 4
    assert quarter.start_bytes == making.start_bytes
    assert plain_peak(quarter) <= plain_peak(adding) - whole + whole // 4
    assert with_part_of_gradients(making, whole) is making


def test_gradients_that_go_before_backward_are_there_in_forward_alone(traced, tmp_path):
    _, _, making, adding = traced
    sizes = [s.bytes for s in making.storages if s.kind == NEW_GRADIENT]

    going = with_gone_in_step(making, sizes)

    assert going.before_bytes == adding.start_bytes > going.start_bytes == making.start_bytes
    assert going.resident == making.resident and going.gone_bytes == sum(sizes)
    plain, without = ([*simulate_actions(g, costs_of(g), {}).live_bytes] for g in (going, making))
    first, last = making.events.index((RUN, 0)), first_of_backward(making)
    assert plain[first:last] == [live + sum(sizes) for live in without[first:last]]
    assert plain[last + len(sizes) :] == without[last:]
    assert with_gradients_before(going).resident == adding.resident
    assert plain_peak(with_gradients_before(going)) == plain_peak(adding)
    assert with_gradients_made(going) == making
    save(going, tmp_path / "graph.json")
    assert load(tmp_path / "graph.json") == going


def test_a_replay_of_the_first_op_does_not_bring_back_gradients_that_went():
    build, batch = MODELS["tied"]
    making, size = lowtide.trace(build(), batch), 1 << 20
    first = making.ops[0].makes[0]
    assert first in making.stored
    actions = {first: "recompute"}

    going, without = (simulate_actions(g, costs_of(g), actions) for g in (with_gone_in_step(making, [size]), making))

    assert going.replays and [r.op for r in going.replays] == [r.op for r in without.replays]
    assert [r.peak_bytes for r in going.replays] == [r.peak_bytes for r in without.replays]
    assert going.live_bytes[-1] == without.live_bytes[-1]
