"""What the demo measures of a case: methods side by side on one step, and training with and without a plan."""

import copy
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import lowtide
from lowtide.demo.cases import Case
from lowtide.reports.progress import counting
from lowtide.settings import checkpointing_names
from lowtide.settings.carried_out import settings_kept
from lowtide.side_by_side import PLAIN, Row, SideBySide, Way, exact_or_least
from lowtide.step.bits import same_bits

FULL, AS_FULL = "transformers, full", "lowtide, its peak"
_LEAST_STEPS = 6  # of training


@dataclass(frozen=True)
class Table:
    """Rows, and how the plans behind them came about."""

    rows: tuple[Row, ...]
    rounds: int
    plain_ms: float
    trace_s: float
    measure_s: float
    solve_s: float


@dataclass(frozen=True)
class Training:
    """What training a plain and a planned copy of the model showed.

    Attributes:
        shapes: Input shapes in the order met; each has a plan.
        losses_bitwise_equal: Every loss of the planned run against the plain run's.
        weights_bitwise_equal: Every parameter after the last step.
    """

    budget_bytes: int
    steps: int
    shapes: tuple[tuple[int, ...], ...]
    plain_losses: tuple[float, ...]
    planned_losses: tuple[float, ...]
    losses_bitwise_equal: bool
    weights_bitwise_equal: bool


def shape_of(batch: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """Rows and padded length of a batch."""
    return tuple(batch["input_ids"].shape)


@contextmanager
def fully_checkpointed(model: nn.Module) -> Iterator[None]:
    """Inside, transformers checkpoints every layer."""
    with settings_kept(model):
        checkpointing_names.enable(model)
        yield


def measure_table(case: Case, seconds: float) -> Table:
    """Plan for each budget of the case and for the peak of full checkpointing, and measure all methods.

    Args:
        seconds: As many interleaved rounds of timing as fit, one at least.
    """
    begin = time.perf_counter()
    graph = lowtide.trace(case.model, case.batch, step=case.step, accumulate=2)
    traced = time.perf_counter()
    costs = lowtide.measure(graph)
    measured = time.perf_counter()
    step = SideBySide(case.model, case.batch, case.step, graph)
    full = Way(FULL, around=partial(fully_checkpointed, case.model))
    start = time.perf_counter()
    budgets = {f"lowtide {budget}": budget for budget in case.budgets} | {AS_FULL: step.peak_bytes(full)}
    each_s = time.perf_counter() - start
    plans = {name: exact_or_least(graph, costs, budget) for name, budget in budgets.items()}
    ways = [Way(PLAIN), full, *(Way(name, plan) for name, plan in plans.items())]
    round_s = each_s * len(ways)
    rounds = affordable(seconds - 2 * round_s, round_s, least=1, most=7)  # two for peaks and bits
    with counting("timing, rounds") as on_round:
        rows = step.rows(ways, rounds=rounds, warmup=0, progress=on_round)
    solve_s = sum(plan.solve_s for plan in plans.values())
    return Table(tuple(rows), rounds, rows[0].time_ms, traced - begin, measured - traced, solve_s)


def train_both(case: Case, budget: int | str, seconds: float) -> Training:
    """Train two copies with AdamW, from the same weights and random states, as many steps as fit into ``seconds``.

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
    by_shape = {shape_of(batch): batch for batch in case.training}
    longest = max(by_shape.values(), key=lambda batch: batch["input_ids"].numel())
    losses: dict[nn.Module, list[torch.Tensor]] = {plain: [], planned: []}
    with lowtide.fit(planned, longest, step=case.step, budget=budget, optimizer=optimizers[planned]) as fit:
        for batch in by_shape.values():
            if batch is not longest:
                fit.add(batch)
        with counting("training, steps") as progress:
            count, i = case.training_steps, 0
            while i < count:
                start = time.perf_counter()
                for model in (plain, planned):
                    torch.manual_seed(i)
                    with fit.step_region() if model is planned else nullcontext():
                        loss = case.step(model, case.training[i % len(case.training)])
                    loss.backward()
                    optimizers[model].step()
                    optimizers[model].zero_grad()
                    losses[model].append(loss.detach())
                i += 1
                if i == 1:
                    count = affordable(seconds, time.perf_counter() - start, least=min(_LEAST_STEPS, count), most=count)
                progress(i, count)
    return Training(
        budget_bytes=fit.plan.budget_bytes or 0,
        steps=count,
        shapes=tuple(by_shape),
        plain_losses=tuple(loss.item() for loss in losses[plain]),
        planned_losses=tuple(loss.item() for loss in losses[planned]),
        losses_bitwise_equal=same_tensors(losses[plain], losses[planned]),
        weights_bitwise_equal=same_tensors(plain.parameters(), planned.parameters()),
    )


def same_tensors(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> bool:
    """The same bits in each pair."""
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def affordable(seconds: float, each_s: float, *, least: int, most: int) -> int:
    """How many rounds of ``each_s`` fit into ``seconds``, within limits: a slow machine measures less, not longer."""
    return max(least, min(most, int(seconds / max(each_s, 1e-6))))
