"""The joint graph of a layer is traced once, and copies of it are used up instead of it."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._functorch import config
from torch._functorch._aot_autograd import graph_compile

from lowtide.compiled.joint_trace import JointTrace


class Add(torch.nn.Module):
    def forward(self, a, b):
        return (a + b).relu()


@pytest.fixture
def traces(monkeypatch):
    """What AOTAutograd is made to trace, and how often it did."""
    found = SimpleNamespace(count=0, of_subclasses=None)

    def trace(flat_fn, *, fw_metadata):
        found.count += 1
        module = fx.symbolic_trace(Add())
        module.graph.output_node().meta["desc"] = "sum"
        fw_metadata.streams = [found.count]
        return module, ([1], [2]), (["a"], ["b"]), found.of_subclasses

    monkeypatch.setattr(graph_compile, "aot_dispatch_autograd_graph", trace)
    return found


def traced(trace):
    """One compilation, which uses the graph up."""
    metadata = SimpleNamespace(streams=None)
    with trace.reused():
        module, inputs, descriptions, of_subclasses = graph_compile.aot_dispatch_autograd_graph(
            None, fw_metadata=metadata
        )
    names = [node.name for node in module.graph.nodes]
    meta = module.graph.output_node().meta["desc"]
    result = module(torch.tensor(1), torch.tensor(-3))
    module.graph.erase_node(module.graph.output_node())
    inputs[0].clear()
    return names, meta, result, inputs[1], descriptions, of_subclasses, metadata.streams


def test_a_graph_is_traced_once_and_each_compilation_has_its_own(traces):
    trace = JointTrace()

    first, *later = [traced(trace) for _ in range(3)]

    assert traces.count == 1 and later == [first, first]
    assert graph_compile.aot_dispatch_autograd_graph(None, fw_metadata=SimpleNamespace()), "as before"
    assert traces.count == 2


def test_subclasses_and_numbered_random_states_are_traced_each_time(traces):
    traces.of_subclasses = object()
    trace = JointTrace()
    for _ in range(2):
        traced(trace)
    assert traces.count == 2
    traces.of_subclasses = None
    with config.patch(functionalize_rng_ops=True):
        for _ in range(2):
            traced(trace)
    assert traces.count == 4
