"""Where the record of a step ends: with its last backward, whatever that leaves of the graph."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.graph.step_graph import NEW_GRADIENT
from lowtide.recording.graph_builder import GraphBuilder
from lowtide.recording.recorder import Recorder

pytestmark = pytest.mark.usefixtures("one_thread")


def recorded(count: int = 3):
    """The graph of a step whose ``backward(inputs=...)`` passes most nodes by, in a loop with an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.Tanh())))
    last = list(model[-2].parameters())
    optimizer = torch.optim.SGD(last, lr=1e-2)
    with lowtide.fit(model, budget="1GiB") as fit:
        for i in range(count):
            x = torch.randn(64, 32, generator=torch.Generator(torch.get_default_device()).manual_seed(i))
            loss = model(x).square().mean()
            loss.backward(inputs=last)
            optimizer.step()
            optimizer.zero_grad()
            if fit.status().steps:
                fit.wait()
        return fit.graph


def test_gradients_that_zero_grad_frees_later_are_made_in_backward_and_stay():
    graph = recorded()
    assert sum(s.kind == NEW_GRADIENT for s in graph.storages) == 2
    assert graph.before["gradients"] == 0 and not any("add_" in op.name for op in graph.forward_ops)


def test_without_the_end_the_optimizer_is_part_of_the_step(monkeypatch):
    monkeypatch.setattr(GraphBuilder, "cut", lambda self, mark: None)
    assert not any(s.kind == NEW_GRADIENT for s in recorded().storages)


def test_what_the_optimizer_writes_after_the_last_backward_keeps_nothing_from_being_made_again(monkeypatch):
    graph = recorded()
    assert not any(s.fixed for s in graph.storages if s.kind in ("parameter", "activation"))
    assert graph.written_parameters == ()
    monkeypatch.setattr(GraphBuilder, "unfix", lambda self, storage: None)
    assert sum(s.fixed == "written during the step" for s in recorded().storages if s.kind == "parameter") == 2
    monkeypatch.setattr(Recorder, "cut", lambda self: None)
    assert recorded().written_parameters == ("6.weight", "6.bias")
