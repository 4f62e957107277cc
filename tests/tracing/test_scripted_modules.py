"""Scripted modules (TorchScript) inside a model: each call is one op, once TorchScript has optimized its code."""

import copy
import time

import pytest
import torch
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.recording import step_recording
from lowtide.recording.watched_times import costs_of
from lowtide.step import whole_modules

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.5))

    def forward(self, x):
        return torch.tanh(x) * self.scale + torch.sigmoid(x)


class Mixed(nn.Module):
    """Scripted and other parts by turns. ``forces``: the loss has a derivative in it, as a force field's."""

    def __init__(self, *, scripted: bool, forces: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forces = forces
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        gates = [Gate() for _ in range(4)]
        self.gates = nn.ModuleList(torch.jit.script(g) for g in gates) if scripted else nn.ModuleList(gates)

    def forward(self, x):
        if self.forces:
            x = x.requires_grad_()
        h = x
        for linear, gate in zip(self.linears, self.gates, strict=True):
            h = gate(linear(h))
        if not self.forces:
            return h.square().mean()
        (force,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return force.square().mean()


def losses_and_weights(model, fit=None, steps=6):
    """Of an ordinary loop; and each step's peak beyond what was there."""
    optimizer, losses, peaks = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    x = torch.randn(256, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(1))

    def step():
        loss = model(x.detach())
        loss.backward()
        losses.append(loss.item())

    for _ in range(steps):
        peaks.append(peak_bytes(step))
        optimizer.step()
        optimizer.zero_grad()
        if fit is not None:
            fit.wait()
    return (losses, [p.detach().clone() for p in model.parameters()]), peaks


def same(a, b):
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


@pytest.fixture
def optimized():
    """Any code that is scripted here has been: else the first plain steps would have other bits than later ones."""
    losses_and_weights(Mixed(scripted=True), steps=3)
    losses_and_weights(Mixed(scripted=True, forces=True), steps=3)


@pytest.mark.parametrize("forces", [False, True], ids=["", "forces"])
def test_real_steps_with_scripted_parts_are_planned_and_keep_their_bits(optimized, forces):
    expected, plain_peaks = losses_and_weights(Mixed(scripted=True, forces=forces))
    model = Mixed(scripted=True, forces=forces)
    with lowtide.fit(model, budget="60%") as fit:
        fitted, peaks = losses_and_weights(model, fit)
        status, plan = fit.status(), fit.plan

    assert same(fitted, expected)
    assert status.in_force and status.planned_steps >= 3
    assert plan.predicted_peak_bytes - plan.start_bytes == pytest.approx(peaks[-1], rel=0.01)
    assert peaks[-1] < 0.8 * plain_peaks[-1]
    assert status.opaque_calls.startswith("opaque calls made ")
    assert any(r.startswith("each call of scripted code (TorchScript) is one op") for r in status.reasons)
    assert "gates.0, gates.1, gates.2, ..." in " ".join(status.reasons)


def test_a_batch_is_rehearsed_with_scripted_parts(optimized):
    expected, _ = losses_and_weights(Mixed(scripted=True), steps=3)
    model = Mixed(scripted=True)
    batch = torch.randn(256, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    with lowtide.fit(model, batch, budget="60%") as fit:
        fitted, _ = losses_and_weights(model, steps=3)
        assert fit.status().planned_steps == 3 and fit.plan.counts["recompute"] > 0
        found = fit.verify(batch)

    assert same(fitted, expected)
    assert found.gradients_bitwise_equal and found.measured_peak_bytes <= 1.01 * found.predicted_peak_bytes


def fresh_gate():
    """Scripted code that has never run: each class of scripted modules has its own."""
    namespace = {"nn": nn, "torch": torch}

    class Fresh(nn.Module):
        def forward(self, x):
            return torch.tanh(x) * torch.sigmoid(x)

    del namespace
    return torch.jit.script(Fresh())


def test_nothing_is_learned_from_a_call_before_torchscript_has_optimized_its_code():
    model = nn.Sequential(nn.Linear(64, 64), fresh_gate(), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    with lowtide.fit(model, budget="70%") as fit:
        why = []
        for _ in range(3):
            model(x).square().mean().backward()
            why.append(fit.status().why_not)
            model.zero_grad()
            fit.wait()
        status = fit.status()

    assert "TorchScript optimizes scripted code" in why[0]
    assert status.planned_steps == 1
    assert not any("when it runs again" in reason for reason in status.reasons)


def test_what_its_compiler_takes_for_new_shapes_is_no_time_of_a_call(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64), fresh_gate(), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    run, known = whole_modules.ObservedModuleCall.run, []
    monkeypatch.setattr(
        step_recording, "costs_of", lambda graph, times: known.append((graph, costs_of(graph, times))) or known[-1][1]
    )

    def compiling(call):
        time.sleep(0.5)
        return run(call)

    monkeypatch.setattr(whole_modules.ObservedModuleCall, "run", compiling)
    with lowtide.fit(model, budget="70%") as fit:
        for _ in range(3):
            model(x).square().mean().backward()
            model.zero_grad()
            fit.wait()
        assert fit.status().planned_steps == 1

    ((graph, costs),) = known
    (ms,) = [ms for op, ms in zip(graph.ops, costs.op_ms) if op.name.startswith("function.") and not op.backward]
    assert 0 < ms < 250


@pytest.mark.own_errors
def test_a_run_for_its_time_that_fails_ends_no_step(monkeypatch):
    def failing(call):
        raise RuntimeError("no run without optimization")

    monkeypatch.setattr(whole_modules.ObservedModuleCall, "uncompiled", failing)
    model = nn.Sequential(nn.Linear(64, 64), fresh_gate(), nn.Linear(64, 64))
    with lowtide.fit(model, budget="70%") as fit:
        for _ in range(3):
            model(torch.randn(256, 64)).square().mean().backward()
        assert fit.status().steps == 3
    assert all(p.grad is not None for p in model.parameters())


def test_without_that_guard_its_results_are_saved_for_good(monkeypatch):
    monkeypatch.setattr(whole_modules, "_is_settled", lambda module: True)
    model = nn.Sequential(nn.Linear(64, 64), fresh_gate(), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    with lowtide.fit(model, budget="70%") as fit:
        for _ in range(2):
            model(x).square().mean().backward()
            model.zero_grad()
        assert any("gives other bits when it runs again" in reason for reason in fit.status().reasons)


def test_a_model_that_is_scripted_as_a_whole_runs_as_it_is(optimized):
    plain = nn.Sequential(nn.Linear(64, 64), Gate())
    model, x = torch.jit.script(copy.deepcopy(plain)), torch.randn(16, 64)
    with lowtide.fit(model, budget="1GiB") as fit:
        for _ in range(3):
            model(x).square().mean().backward()
        assert fit.status().steps == 3
    plain(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
