"""An optimizer that steps inside backward: replays come before the weights that they read are written."""

from dataclasses import replace

import pytest
import torch
from support.watched_training import resident_bytes
from torch import nn

import lowtide
from lowtide.errors import ReplayError
from lowtide.graph.writes import ops_written_under
from lowtide.measurement.allocator import peak_bytes
from lowtide.recording.recorder import Recorder
from lowtide.simulation import simulator
from lowtide.solvers import graph_queries
from lowtide.step import optimizer_steps

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, STEPS = 64, 512, 5


def model_that_steps(write) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(part for _ in range(6) for part in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()))
    )

    def step(p: torch.Tensor) -> None:
        write(p)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    return model


@torch.no_grad()
def written(p: torch.Tensor) -> None:
    p.add_(p.grad, alpha=-1e-2)


def written_unseen(p: torch.Tensor) -> None:
    p.data.add_(p.grad, alpha=-1e-2)


def train(
    model: nn.Module, fit: lowtide.Fit | None = None, *, steps: int = STEPS
) -> tuple[list[torch.Tensor], list[int]]:
    """Losses, and the peak of each step beside what is resident."""
    losses, peaks = [], []
    for i in range(steps):
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator(torch.get_default_device()).manual_seed(i))

        def step(batch: torch.Tensor = batch) -> None:
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())

        peaks.append(peak_bytes(step))
        if fit is not None:
            fit.wait()
    return losses, peaks


def test_weights_and_losses_are_those_of_the_plain_steps_within_the_budget():
    plain, ours = model_that_steps(written), model_that_steps(written)
    losses, peaks = train(plain)
    allowed = int(0.4 * max(peaks))
    with lowtide.fit(ours, budget=resident_bytes(ours) + ROWS * WIDTH * 4 + allowed) as fit:
        found, taken = train(ours, fit)
        assert fit.status().planned_steps == STEPS - 1
        assert not ops_written_under(fit.graph) and any(op.writes for op in fit.graph.ops if op.backward)
    assert max(taken) <= 1.005 * allowed
    assert all(map(torch.equal, losses, found))
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


def test_what_no_version_counts_is_never_read_by_a_replay(monkeypatch):
    model = model_that_steps(written_unseen)
    _, peaks = train(model_that_steps(written_unseen))
    budget = resident_bytes(model) + ROWS * WIDTH * 4 + int(0.9 * max(peaks))
    with lowtide.fit(model, budget=budget) as fit:
        train(model, fit)
        reads = {s for op in fit.graph.forward_ops for s in op.reads if fit.graph.storages[s].kind == "parameter"}
        assert reads and all(fit.graph.storages[s].fixed for s in reads)
    monkeypatch.setattr(Recorder, "settle_writes", lambda self: None)
    unguarded = model_that_steps(written_unseen)
    with lowtide.fit(unguarded, budget=budget) as fit:
        train(unguarded, fit)
        assert not any(s.fixed for s in fit.graph.storages if s.kind == "parameter")


def test_what_is_made_from_a_bias_that_is_written_early_stays(monkeypatch):
    """Autograd stores no bias: a hook of the last layer may write that of the first, which replays would read."""
    plain, ours, unguarded = (model_that_steps(written) for _ in range(3))
    for model in (plain, ours, unguarded):
        first = model[1].bias

        def write_first(_: torch.Tensor, first: torch.Tensor = first) -> None:
            with torch.no_grad():
                first.mul_(0.999)

        model[-2].weight.register_post_accumulate_grad_hook(write_first)
    losses, peaks = train(plain)
    budget = resident_bytes(ours) + ROWS * WIDTH * 4 + int(0.4 * max(peaks))
    with lowtide.fit(ours, budget=budget) as fit:
        found, _ = train(ours, fit)
        assert ops_written_under(fit.graph) and fit.status().planned_steps
        graph, costs = fit.graph, fit.costs
    assert all(map(torch.equal, losses, found))
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    for module in (graph_queries, simulator):
        monkeypatch.setattr(module, "ops_written_under", lambda graph: frozenset())
    plan = lowtide.solve(replace(graph), costs, budget)  # a copy: nothing is known of it
    with lowtide.apply(unguarded, plan), pytest.raises(ReplayError, match="changed in place afterwards"):
        train(unguarded)


class OwnKernels(torch.optim.SGD):
    """Writes as a library with kernels of its own does: no dispatcher sees it, and no version counts it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.detach().numpy()[...] *= 0.999


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One operator writes all of them, and counts no version."""
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def model_whose_first_bias_is_stepped_early(make) -> nn.Module:
    """Autograd stores no bias: plain training never looks at it again."""
    model = model_that_steps(written)
    first = model[1].bias
    optimizer = make([first])

    def step_first(_: torch.Tensor) -> None:
        first.grad = torch.ones_like(first)
        optimizer.step()
        first.grad = None

    model[-2].weight.register_post_accumulate_grad_hook(step_first)
    return model


def test_a_fused_step_is_followed():
    plain, ours = (model_whose_first_bias_is_stepped_early(fused) for _ in range(2))
    losses, peaks = train(plain)
    with lowtide.fit(ours, budget=resident_bytes(ours) + ROWS * WIDTH * 4 + int(0.5 * max(peaks))) as fit:
        found, _ = train(ours, fit)
        assert fit.status().planned_steps
    assert all(map(torch.equal, losses, found))
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


@pytest.mark.parametrize("make", [fused, lambda p: OwnKernels(p, lr=1.0)], ids=["fused", "own kernels"])
def test_a_replay_after_a_step_that_no_version_counts_is_refused(monkeypatch, make):
    _, peaks = train(model_that_steps(written))
    budget = resident_bytes(model_that_steps(written)) + ROWS * WIDTH * 4 + int(0.4 * max(peaks))
    like = model_that_steps(written)  # its plan reads the bias when the others' is written already
    with lowtide.fit(like, budget=budget) as fit:
        train(like, fit)
        plan = fit.plan
    guarded, unguarded = (model_whose_first_bias_is_stepped_early(make) for _ in range(2))
    with lowtide.apply(guarded, plan), pytest.raises(ReplayError, match="changed in place afterwards"):
        train(guarded)
    monkeypatch.setattr(optimizer_steps, "written_since", lambda *given, **named: False)
    with lowtide.apply(unguarded, plan):
        train(unguarded, steps=1)
    train(once := model_whose_first_bias_is_stepped_early(make), steps=1)
    assert not all(map(torch.equal, once.parameters(), unguarded.parameters()))


def test_fused_kernels_keep_nothing_from_being_made_again(monkeypatch):
    """They count no version: only that an optimizer stepped tells that the weights have not been written unseen."""

    def stepping() -> nn.Module:
        model = model_that_steps(lambda p: None)
        for p in model.parameters():
            p._post_accumulate_grad_hooks.clear()
            optimizer = fused([p])

            def step(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        return model

    def fixed() -> int:
        model = stepping()
        with lowtide.fit(model, budget="1GiB") as fit:
            train(model, fit)
            return sum(bool(s.fixed) for s in fit.graph.storages if s.kind in ("parameter", "activation"))

    assert fixed() == 0
    monkeypatch.setattr(optimizer_steps, "written_since", lambda *given, **named: False)
    assert fixed() > 6


def test_a_step_without_a_plan_refuses_what_own_kernels_have_written(monkeypatch):
    def train_both() -> None:
        plain, ours = (model_whose_first_bias_is_stepped_early(lambda p: OwnKernels(p, lr=1.0)) for _ in range(2))
        losses, peaks = train(plain)
        budget = resident_bytes(ours) + ROWS * WIDTH * 4 + int(0.35 * max(peaks))
        with lowtide.fit(ours, budget=budget) as fit:
            fit._lifecycle.plans_by_shape.request = lambda *_, **__: None  # nobody plans
            found, _ = train(ours, fit)
        assert all(map(torch.equal, losses, found))
        assert all(map(torch.equal, plain.parameters(), ours.parameters()))

    with pytest.raises(ReplayError, match="changed in place afterwards"):
        train_both()
    monkeypatch.setattr(optimizer_steps, "written_since", lambda *given, **named: False)
    with pytest.raises(ReplayError, match="other bits"):  # of a replay that is checked: one in 17
        train_both()
