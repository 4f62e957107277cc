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
from lowtide.simulation import simulator
from lowtide.solvers import graph_queries
from lowtide.tracing.recorder import Recorder

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


def train(model: nn.Module, fit: lowtide.Fit | None = None) -> tuple[list[torch.Tensor], list[int]]:
    """Losses, and the peak of each step beside what is resident."""
    losses, peaks = [], []
    for i in range(STEPS):
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i))

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
