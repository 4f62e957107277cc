"""Adapters on frozen weights in few bits: their training, plain and within a budget."""

from collections.abc import Callable

import torch
from step_probe import resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import measuring

STEPS, PLANNED = 4, 2  # the first two steps watch; then the plan is waited for


def train(model: nn.Module, budget: int | None = None) -> tuple[list[float], list[torch.Tensor], list[int], list[int]]:
    """Losses, trained weights, and of each step its peak and what was there before it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    fit = None if budget is None else lowtide.fit(model, budget=budget, optimizer=optimizer)
    losses, peaks, before = [], [], []
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        tokens = torch.randint(3, 90, (4, 64), generator=generator)
        state = [t for values in optimizer.state.values() for t in values.values()]
        there = resident_bytes(model, (tokens, state))
        with measuring("cpu") as counter:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        before.append(there)
        peaks.append(there + counter.peak)
        if fit is not None and step + 1 == STEPS - PLANNED:
            fit.wait(120)
    if fit is not None:
        assert fit.status().planned_steps == PLANNED
        assert fit.plan.counts["recompute"] > 0
        fit.remove()
    return losses, [p.detach().clone() for p in trained], peaks, before


def assert_same_within(make: Callable[[], nn.Module], share: float = 0.5) -> None:
    """Training is bitwise the plain one within a share of what the plain steps make."""
    model = make()
    begin = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    losses, trained, peaks, before = train(model)
    budget = max(before) + int(share * (max(peaks) - max(before)))
    planned_losses, planned_trained, planned_peaks, _ = train(make(), budget)

    assert planned_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(planned_trained, trained, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(begin, trained, strict=True))
    assert max(planned_peaks[-PLANNED:]) <= budget < min(peaks)
