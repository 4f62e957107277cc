"""Models with compiled parts: the compiled code runs, is taken as one op, and gradients are what they were."""

import copy

import pytest
import torch
from support.training_steps import differing, outcome
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import lowtide
from lowtide.plan import RECOMPUTE
from lowtide.simulation.simulator import simulate
from lowtide.tracing import module_calls


def counting(runs: list[str]):
    """A backend that runs what it is given, and notes each run."""

    def compiler(name):
        def compile_graph(graph, inputs):
            def run(*args):
                runs.append(name)
                return graph.forward(*args)

            return make_boxed_func(run)

        return compile_graph

    return aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))


class Block(nn.Module):
    """A module of our own: Dynamo leaves containers of PyTorch's alone."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def block(width: int = 32) -> Block:
    return Block(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width), nn.Tanh())


def by_method(runs: list[str]) -> nn.Module:
    model = nn.Sequential(*(block() for _ in range(4)))
    model[1].compile(backend=counting(runs))
    return model


def by_wrapper(runs: list[str]) -> nn.Module:
    model = nn.Sequential(*(block() for _ in range(4)))
    model[1] = torch.compile(model[1], backend=counting(runs))
    return model


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train(model: nn.Module, x: torch.Tensor, steps: int = 3) -> list[dict]:
    torch.manual_seed(3)
    found = []
    for _ in range(steps):
        loss = step(model, x)
        loss.backward()
        found.append(outcome(model, loss))
        model.zero_grad(set_to_none=True)
    return found


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("make", [by_method, by_wrapper])
def test_a_compiled_part_runs_compiled_and_the_step_is_bitwise_the_same(make):
    runs: list[str] = []
    torch.manual_seed(0)
    model, x = make(runs), torch.randn(512, 32)
    plain = train(model, x)
    runs.clear()

    fit = lowtide.fit(model, x, budget="80%", step=step)
    assert fit.plan.counts[RECOMPUTE] > 0
    runs.clear()
    ours = train(model, x)

    assert runs == ["forward", "backward"] * 3
    assert [differing(a, b) for a, b in zip(plain, ours, strict=True)] == [[], [], []]
    fit.remove()
    assert differing(train(model, x)[0], plain[0]) == []
    assert module_calls.is_compiled(model[1]) and not any(
        module_calls.is_lowtide_call(m._compiled_call_impl) for m in model.modules()
    )


@pytest.mark.parametrize("make", [by_method, by_wrapper])
def test_a_compiled_part_is_one_op_and_saved_whole(make):
    runs: list[str] = []
    model, x = make(runs), torch.randn(512, 32)

    graph = lowtide.trace(model, x, step=step)
    again = lowtide.trace(model, x, step=step)

    inside = [op for op in graph.ops if graph.scope(op).startswith("1") and not op.backward]
    assert [op.name for op in inside] == ["lowtide.compiled.region"]
    made = [graph.storages[s] for s in inside[0].makes]
    assert {s.fixed for s in made} == {"made by compiled code"} and sum(s.bytes for s in made) >= 2 * 512 * 64 * 4
    assert sum(op.name == "lowtide.compiled.region" and op.backward for op in graph.ops) == 1
    assert [op.name for op in again.ops] == [op.name for op in graph.ops]
    # What its backward runs is no op of its own, and would count twice in the peak.
    names = [op.name for op in graph.ops]
    assert names.count("aten.gelu_backward.default") == names.count("aten.gelu.default") > 0


def test_the_peak_of_a_step_with_a_compiled_part_is_predicted():
    model, x = by_method([]), torch.randn(512, 32)
    graph = lowtide.trace(model, x, step=step)
    costs = lowtide.measure(graph)
    for budget in ("100%", "75%"):
        plan = lowtide.solve(graph, costs, budget)
        seen = lowtide.verify(model, x, plan, step=step, rounds=0)
        assert seen.equal and seen.mismatched_ops == 0
        assert seen.measured_peak_bytes <= 1.02 * simulate(graph, costs, plan).peak_bytes
        assert seen.measured_peak_bytes >= 0.9 * simulate(graph, costs, plan).peak_bytes


def test_buffers_that_compiled_code_moves_move_once():
    runs: list[str] = []
    model = nn.Sequential(block(), Block(nn.Linear(32, 32), nn.BatchNorm1d(32)), block(), block())
    model[1].compile(backend=counting(runs))
    x = torch.randn(512, 32)
    before = copy.deepcopy(dict(model.named_buffers()))

    fit = lowtide.fit(model, x, budget="50%", step=step)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    step(model, x).backward()

    assert model[1].layers[1].num_batches_tracked == 1
    fit.remove()


def test_a_model_that_is_compiled_whole_runs_compiled_and_unchanged():
    runs: list[str] = []
    torch.manual_seed(0)
    model, x = Block(block(), block()), torch.randn(512, 32)
    model.compile(backend=counting(runs))
    plain = train(model, x)

    fit = lowtide.fit(model, x, budget="100%", step=step)
    runs.clear()
    ours = train(model, x)

    assert [differing(a, b) for a, b in zip(plain, ours, strict=True)] == [[], [], []] and runs == [
        "forward",
        "backward",
    ] * 3
    assert "compiled" in fit.report(measure=False)
    fit.remove()
