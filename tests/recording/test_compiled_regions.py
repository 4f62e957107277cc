"""Models with compiled parts: the compiled code runs, is taken as one op, and gradients are what they were."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.training_steps import differing, outcome
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.plan import RECOMPUTE
from lowtide.simulation.simulator import simulate
from lowtide.step import module_calls


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
    with torch._dynamo.config.patch(recompile_limit=64):  # blocks of all tests share one code object
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
def test_a_compiled_part_is_one_op_that_may_run_again(make):
    runs: list[str] = []
    model, x = make(runs), torch.randn(512, 32)

    graph = lowtide.trace(model, x, step=step)
    again = lowtide.trace(model, x, step=step)

    inside = [op for op in graph.ops if graph.scope(op).startswith("1") and not op.backward]
    assert len(inside) == 1 and inside[0].name.startswith("function.")
    made = [graph.storages[s] for s in inside[0].makes]
    assert {s.fixed for s in made} == {""} and sum(s.bytes for s in made) >= 2 * 512 * 64 * 4
    assert sum(op.name == f"{inside[0].name}.backward" for op in graph.ops) == 1
    assert [op.name for op in again.ops] == [op.name for op in graph.ops]
    # What its backward runs is no op of its own, and would count twice in the peak.
    names = [op.name for op in graph.ops]
    assert names.count("aten.gelu_backward.default") == names.count("aten.gelu.default") > 0


def all_compiled(runs: list[str]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(4)))
    for layer in model:
        layer.compile(backend=counting(runs))
    return model


def measured(model: nn.Module, x: torch.Tensor, steps: int) -> tuple[list[dict], list[int]]:
    """Outcomes and peaks of steps; gradients are there before."""
    torch.manual_seed(3)
    found, peaks = [], []

    def once() -> None:
        loss = step(model, x)
        loss.backward()
        found.append(outcome(model, loss))
        model.zero_grad(set_to_none=False)

    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(steps):
        peaks.append(peak_bytes(once))
    return found, peaks


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_layers_run_again_within_a_budget_and_bitwise(autocast):
    runs: list[str] = []
    x = torch.randn(512, 32)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast):
        plain, peaks = measured(all_compiled(runs), x, 4)
        model = all_compiled(runs)
        resident = 2 * sum(p.nbytes for p in model.parameters()) + x.nbytes
        with lowtide.fit(model, budget=resident + int(0.6 * max(peaks))) as fit:
            first, _ = measured(model, x, 1)
            fit.wait()
            runs.clear()
            ours, ours_peaks = measured(model, x, 4)
            predicted = fit.plan.predicted_peak_bytes - resident
            assert fit.status().planned_steps == 4

    assert differing(plain[0], first[0]) == []
    assert [differing(a, b) for a, b in zip(plain, ours, strict=True)] == [[]] * 4
    assert runs.count("forward") > 4 * 4 and runs.count("backward") == 4 * 4
    # The first step under a plan proves it.
    assert 0.99 * predicted <= max(ours_peaks[1:]) <= 1.005 * predicted < 0.65 * max(peaks)


@pytest.mark.thorough
def test_code_that_compiles_anew_in_mid_run_keeps_its_bits():
    """Other lengths, and a compiler that has forgotten everything: between two steps, and between two halves of one."""
    rows = (512, 512, 384, 512, 384)

    def steps(model: nn.Module, after: Callable[[int], None]) -> list[dict]:
        torch.manual_seed(3)
        found = []
        for i, n in enumerate(rows):
            loss = step(model, torch.full((n, 32), 0.1).cumsum(0))
            if i == 3:
                torch.compiler.reset()
            loss.backward()
            found.append(outcome(model, loss))
            model.zero_grad(set_to_none=True)
            after(i)
        return found

    runs: list[str] = []
    plain = steps(all_compiled(runs), lambda i: None)
    model = all_compiled(runs)
    with lowtide.fit(model, budget="60%") as fit:
        ours = steps(model, lambda i: fit.wait())
        assert fit.status().planned_steps >= 2
    assert [differing(a, b) for a, b in zip(plain, ours, strict=True)] == [[]] * len(rows)


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
