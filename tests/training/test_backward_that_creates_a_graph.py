"""Losses with gradients in them (gradient penalties, forces): planned as they run, with the peak that is predicted."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.watched_training import Layered, batch_of, resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.recording import recorder
from lowtide.simulation.simulator import simulate
from lowtide.step.bits import same_bits
from lowtide.tape import replay, tape
from lowtide.tape.program import program_of
from lowtide.tape.recipes import Recipe
from lowtide.tape.tape import Tape
from lowtide.training.planned_step import PlannedStep, shapes_of_graph

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 512


class Energies(nn.Sequential):
    """Gives the energy of each row; with ``forces``, how much it falls with each input, which is part of the loss."""

    def __init__(self, *, forces: bool) -> None:
        sizes = [64, 256, 256, 256]
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.SiLU())]
        super().__init__(*layers, nn.Linear(256, 1))
        self.forces = forces

    def forward(self, x):
        if not self.forces:
            return super().forward(x)
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def train(model: nn.Module) -> int:
    """One step. Returns the allocator's peak, without the batch."""
    batch = torch.randn(ROWS, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(1))

    def step() -> None:
        if model.forces:
            loss = model(batch).square().mean()
        else:  # a gradient penalty
            x = batch.requires_grad_()
            energy = model(x)
            (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            loss = energy.mean() + (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()

    model.zero_grad(set_to_none=False)
    return peak_bytes(step)


def fitted(forces: bool, share: float):
    """A model, what its plain step takes, and a fit of it with a plan for ``share`` of that."""
    torch.manual_seed(0)
    model = Energies(forces=forces)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    train(model)  # on some CPUs the first step of a process has other bits than all later ones
    allowed = int(share * train(model))
    plain = [p.grad.clone() for p in model.parameters()]
    fit = lowtide.fit(model, budget=2 * resident_bytes(model) + ROWS * 64 * 4 + allowed)
    return model, plain, allowed, fit


@pytest.mark.parametrize("share", [0.9, 0.5])
@pytest.mark.parametrize("forces", [False, True], ids=["penalty", "forces"])
def test_steps_are_planned_within_the_budget(forces, share):
    model, plain, allowed, fit = fitted(forces, share)
    with fit:
        for planned in (False, True, True):
            assert train(model) <= 1.005 * allowed
            assert fit.status().in_force == planned
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
            fit.wait()
        assert fit.plan.counts["recompute"] > 0


def test_masks_that_are_made_again_may_be_dropped_inputs():
    """Dropout writes its mask in place on a CPU; what is made of the mask in the first backward is dropped as well."""
    torch.manual_seed(0)
    model = Layered()

    def step():
        torch.manual_seed(1)
        x = batch_of().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.norm(dim=-1).mean().backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad()
        return gradients

    plain = step()
    with lowtide.fit(model, budget=2 * resident_bytes(model) + 900_000) as fit:
        step()
        fit.wait()
        found = step()
        assert fit.status().in_force and fit.plan.counts["recompute"] > 10
    assert plain.count(None) == found.count(None) == 1  # of the last bias
    assert all(same_bits(a, b) for a, b in zip(plain, found, strict=True) if b is not None)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (replay, "_disable_current_modes", nullcontext),
        (recorder, "is_autograds_own", lambda func: False),
        (tape, "is_autograds_own", lambda func: False),
    ],
    ids=["the tape sees replays", "copies are recorded", "the tape sees copies"],
)
def test_each_rule_is_needed_for_the_peak(owner, name, broken, monkeypatch):
    monkeypatch.setattr(owner, name, broken)
    model, _, allowed, fit = fitted(True, 0.5)
    with fit:
        train(model)
        fit.wait()
        assert train(model) > 1.005 * allowed


def test_replays_are_counted_over_all_backward_passes(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.SiLU(), nn.LayerNorm(64))))
    batch = torch.randn(ROWS, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    replayed = []
    replay_of = Recipe.replay
    monkeypatch.setattr(Recipe, "replay", lambda self, **how: (replayed.append(self.op), replay_of(self, **how))[1])

    def step() -> None:
        output = model(batch)
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        model.zero_grad()

    before = resident_bytes(model) + batch.nbytes
    with lowtide.fit(model, budget=before + int(0.6 * peak_bytes(step))) as fit:
        step()
        fit.wait()
        replayed.clear()
        step()
        assert fit.plan.passes == 2
        assert [op.number for op in replayed] == [r.op for r in simulate(fit.graph, fit.costs, fit.plan).replays]


class Critic(nn.Module):
    """Residual blocks: layers that repeat."""

    forces = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )
        self.last = nn.Linear(64, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_plan_that_drops_in_the_model_alone_is_there_when_backward_saves_again(guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(PlannedStep, "needs_whole_step", property(lambda self: self.tape.program.root.has_actions))
    torch.manual_seed(0)
    model = Critic()
    train(model)
    with lowtide.fit(model, budget="1GiB") as fit:
        train(model)
        fit.wait()
        plan = lowtide.solve(fit.graph, fit.costs, method="full")
    replays = {d.storage: 99 for d in plan.decisions if d.action == "recompute"}
    decisions = tuple(replace(d, replays=replays.get(d.storage, 1)) for d in plan.decisions)
    plan = replace(plan, decisions=decisions)
    step = PlannedStep(plan, fit.graph, fit.costs, shapes_of_graph(fit.graph), Tape(program_of(plan), model))
    with lowtide.fit(model, budget="1GiB") as fit:
        fit._lifecycle.put(step)
        train(model)
        peak = train(model)
        assert fit.status().in_force and not step.tape.program.root.has_actions
    before = 2 * resident_bytes(model) + ROWS * 64 * 4
    assert (before + peak == simulate(step.graph, step.costs, plan).peak_bytes) == guarded


class Scaled(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(32)), function

    def forward(self, x):
        return self.function(x * self.scale)


FORMULAS_THAT_ASK_FOR_MODES = {
    "prod": lambda y: (1 + y * 0.01).prod(),
    "cumprod": lambda y: y.cumprod(-1),
    "det": lambda y: torch.linalg.det(y[:, :, :16] @ y[:, :, :16].mT + 5 * torch.eye(16, device=y.device)),
}


@pytest.mark.parametrize("name", FORMULAS_THAT_ASK_FOR_MODES)
def test_formulas_that_ask_for_modes_have_the_bits_of_plain_steps(name):
    model = Scaled(FORMULAS_THAT_ASK_FOR_MODES[name])

    def step():
        torch.manual_seed(0)
        x = torch.randn(4, 16, 32, requires_grad=True)
        output = model(x)
        (gradient,) = torch.autograd.grad((output * torch.rand(output.shape)).sum(), x, create_graph=True)
        model.zero_grad()
        (gradient * torch.rand(gradient.shape)).sum().backward()
        return gradient.detach(), model.scale.grad

    step()  # on some CPUs the first step of a process has other bits than all later ones
    plain = step()
    with lowtide.fit(model, budget="90%") as fit:
        for _ in range(4):
            assert all(map(same_bits, plain, step()))
            fit.wait()
        assert fit.status().planned_steps
