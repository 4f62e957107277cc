"""Two copies of a model trained side by side, plainly and under a plan: the losses must agree to the last bit."""

import copy
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

import lowtide
from lowtide.demo.case import Case, shape_of
from lowtide.demo.table import StepProgress, affordable
from lowtide.tracing.restore import same_bits

_BARS = "▁▂▃▄▅▆▇█"
_LEAST_STEPS = 20


class PausableProgress(StepProgress, Protocol):
    """Progress that can leave the terminal to somebody else for a while."""

    def paused(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Training:
    """What both runs showed.

    Attributes:
        shapes: Input shapes in the order met; the planned run made a plan for each.
        losses_bitwise_equal: Every loss of the planned run against the plain run's.
        weights_bitwise_equal: Every parameter after the last step.
    """

    budget_bytes: int | None
    steps: int
    shapes: tuple[tuple[int, ...], ...]
    plain_losses: tuple[float, ...]
    planned_losses: tuple[float, ...]
    losses_bitwise_equal: bool
    weights_bitwise_equal: bool


def train_both(case: Case, budget: int | str, seconds: float, steps: PausableProgress) -> Training:
    """Train with AdamW from the same weights and random states, as many steps as fit into ``seconds``.

    Args:
        budget: As for ``fit``, AdamW's state included.
    """
    planned, plain = case.model, copy.deepcopy(case.model)
    optimizers = {
        model: torch.optim.AdamW(model.parameters(), lr=case.learning_rate, weight_decay=0.0)
        for model in (plain, planned)
    }
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    longest = max(case.training, key=lambda batch: batch["input_ids"].numel())
    with steps.paused():
        fit = lowtide.fit(planned, longest, step=case.step, budget=budget, optimizer=optimizers[planned])
    losses: dict[nn.Module, list[torch.Tensor]] = {plain: [], planned: []}
    shapes = {shape_of(longest): None}
    count, i, known = case.training_steps, 0, False
    steps.expect(2 * count)
    try:
        while i < count:
            start = time.perf_counter()
            batch = case.training[i % len(case.training)]
            new = shape_of(batch) not in shapes
            shapes[shape_of(batch)] = None
            for model in (plain, planned):
                torch.manual_seed(i)
                # A shape not met before is planned for inside the call, with a progress display of its own.
                with steps.paused() if new and model is planned else nullcontext():
                    with fit.step_region() if model is planned else nullcontext():
                        loss = case.step(model, batch)
                loss.backward()
                optimizers[model].step()
                optimizers[model].zero_grad()
                losses[model].append(loss.detach())
                steps.done()
            i += 1
            if not new and not known:  # the first pair of steps that did not plan says how many are affordable
                known, each_s = True, time.perf_counter() - start
                count = affordable(seconds, each_s, least=min(_LEAST_STEPS, count), most=count)
                steps.expect(2 * (count - case.training_steps))
    finally:
        fit.remove()
    return Training(
        budget_bytes=fit.plan.budget_bytes,
        steps=count,
        shapes=tuple(shapes),
        plain_losses=tuple(loss.item() for loss in losses[plain]),
        planned_losses=tuple(loss.item() for loss in losses[planned]),
        losses_bitwise_equal=_all_same(losses[plain], losses[planned]),
        weights_bitwise_equal=_all_same(plain.parameters(), planned.parameters()),
    )


def _all_same(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def sparkline(values: tuple[float, ...]) -> str:
    """One character a value, lowest to highest."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
