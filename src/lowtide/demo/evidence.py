"""What the demo measures of a case: methods side by side on one step, and training with and without a plan."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import lowtide
from lowtide.demo.cases import Case
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.measurement.allocator import peak_bytes
from lowtide.measurement.timing import compare_times
from lowtide.plan import Plan
from lowtide.reports.progress import counting
from lowtide.tracing.restore import same_bits

PLAIN, FULL, AS_FULL = "plain", "transformers, full", "lowtide, its peak"
_LEAST_STEPS = 6  # of training


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        peak_bytes: Measured, absolute: what lives before the step included.
        fraction: Measured activation memory / the plain step's.
        cpu_time: Process CPU time / the plain step's, medians of interleaved rounds.
        bitwise_equal: Loss and every gradient against the plain step's.
        budget_bytes, predicted_peak_bytes, predicted_overhead: Of the plan; None for the others.
    """

    method: str
    peak_bytes: int
    fraction: float
    cpu_time: float
    bitwise_equal: bool
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_overhead: float | None = None


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


def run_method(case: Case, method: Callable[[], AbstractContextManager]) -> torch.Tensor:
    """Zero the gradients, seed, and run one step, its forward pass inside ``method()``; return the loss."""
    case.model.zero_grad(set_to_none=False)
    torch.manual_seed(0)
    with method():
        loss = case.step(case.model, case.batch)
    loss.backward()
    return loss.detach()


@contextmanager
def fully_checkpointed(model: nn.Module) -> Iterator[None]:
    """Inside, transformers checkpoints every layer."""
    model.activation_checkpointing_enable()
    try:
        yield
    finally:
        model.activation_checkpointing_disable()
        model.disable_input_require_grads()  # its own switch leaves these hooks on


def outcome(case: Case, method: Callable[[], AbstractContextManager]) -> tuple[int, list[torch.Tensor]]:
    """One run: activation memory in bytes, and clones of the loss and of every gradient."""
    found: list[torch.Tensor] = []
    parameters = list(case.model.parameters())
    activation_bytes = peak_bytes(lambda: found.append(run_method(case, method)), parameters[0].device)
    return activation_bytes, found + [p.grad.clone() for p in parameters if p.grad is not None]


def measure_table(case: Case, seconds: float) -> Table:
    """Plan for each budget of the case and for the peak of full checkpointing, and measure all methods.

    Args:
        seconds: As many interleaved rounds of timing as fit, one at least.
    """
    begin = time.perf_counter()
    graph = lowtide.trace(case.model, case.batch, step=case.step)
    traced = time.perf_counter()
    costs = lowtide.measure(graph)
    measured = time.perf_counter()
    methods: dict[str, Callable[[], AbstractContextManager]]
    methods = {PLAIN: nullcontext, FULL: partial(fully_checkpointed, case.model)}
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    start = time.perf_counter()
    plain_bytes, reference = outcome(case, methods[PLAIN])
    full_bytes, full = outcome(case, methods[FULL])
    each_s = (time.perf_counter() - start) / 2
    measurements = {PLAIN: (plain_bytes, True), FULL: (full_bytes, same_tensors(full, reference))}
    del full
    plans = {f"lowtide {budget}": plan_within(graph, costs, budget) for budget in case.budgets}
    plans[AS_FULL] = plan_within(graph, costs, graph.resident_bytes + full_bytes)
    for name, plan in plans.items():
        methods[name] = partial(lowtide.apply, case.model, plan)
        activation_bytes, found = outcome(case, methods[name])
        measurements[name] = activation_bytes, same_tensors(found, reference)
    del reference, found
    rounds = affordable(seconds - each_s * len(plans), each_s * len(methods), least=1, most=7)
    calls: dict[str, Callable[[], object]]
    calls = {name: partial(run_method, case, method) for name, method in methods.items()}
    with counting("timing, rounds") as on_round:
        times = compare_times(calls, rounds=rounds, warmup=0, on_round=on_round)
    plain_ms = times[PLAIN].median_ms
    rows = []
    for name, (activation_bytes, equal) in measurements.items():
        chosen = plans.get(name)
        rows.append(Row(
            method=name,
            peak_bytes=graph.resident_bytes + activation_bytes,
            fraction=activation_bytes / plain_bytes,
            cpu_time=times[name].median_ms / plain_ms,
            bitwise_equal=equal,
            budget_bytes=chosen.budget_bytes if chosen else None,
            predicted_peak_bytes=chosen.predicted_peak_bytes if chosen else None,
            predicted_overhead=chosen.predicted_overhead if chosen else None,
        ))  # fmt: skip
    solve_s = sum(plan.solve_s for plan in plans.values())
    return Table(tuple(rows), rounds, plain_ms, traced - begin, measured - traced, solve_s)


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


def plan_within(graph: StepGraph, costs: Costs, budget: int | str) -> Plan:
    """The exact plan for ``budget``, or for the least peak there is where that is more."""
    try:
        return lowtide.solve(graph, costs, budget)
    except lowtide.BudgetInfeasibleError as error:
        return lowtide.solve(graph, costs, error.least_bytes)


def same_tensors(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> bool:
    """The same bits in each pair."""
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def affordable(seconds: float, each_s: float, *, least: int, most: int) -> int:
    """How many rounds of ``each_s`` fit into ``seconds``, within limits: a slow machine measures less, not longer."""
    return max(least, min(most, int(seconds / max(each_s, 1e-6))))
