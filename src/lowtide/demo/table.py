"""Methods side by side on one step of a case: peak, time, and whether the gradients are the plain step's."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

import lowtide
from lowtide.demo.case import Case
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.measurement.allocator import peak_bytes
from lowtide.measurement.timing import compare_times
from lowtide.plan import Plan
from lowtide.tracing.restore import same_bits

PLAIN, FULL, AS_FULL = "plain", "transformers, full", "lowtide, its peak"


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


class StepProgress(Protocol):
    """Counts the steps that are run."""

    def expect(self, count: int) -> None:
        """``count`` more steps will run."""

    def done(self) -> None:
        """One more has run."""


class Methods:
    """Every method as one call on the same weights, from the same random state, with gradients zeroed in place."""

    def __init__(self, case: Case, on_step: Callable[[], None]) -> None:
        self._case, self._on_step = case, on_step
        self.calls: dict[str, Callable[[], torch.Tensor]] = {PLAIN: self._step, FULL: self._fully_checkpointed}
        for parameter in case.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def add(self, plans: dict[str, Plan]) -> None:
        """Plans by the name of their method."""
        for name, plan in plans.items():
            self.calls[name] = partial(self._planned, plan)

    def prepare(self) -> None:
        """Before each measurement."""
        for parameter in self._case.model.parameters():
            parameter.grad.zero_()
        torch.manual_seed(0)

    def timed(self, name: str) -> Callable[[], None]:
        """The call as a training loop pays for it, preparation included."""

        def call() -> None:
            self.prepare()
            self.calls[name]()
            self._on_step()

        return call

    def _step(self) -> torch.Tensor:
        loss = self._case.step(self._case.model, self._case.batch)
        loss.backward()
        return loss.detach()

    def _fully_checkpointed(self) -> torch.Tensor:
        model = self._case.model
        model.activation_checkpointing_enable()
        try:
            return self._step()
        finally:
            model.activation_checkpointing_disable()
            model.disable_input_require_grads()  # its own switch leaves these hooks on

    def _planned(self, plan: Plan) -> torch.Tensor:
        with lowtide.apply(self._case.model, plan):
            loss = self._case.step(self._case.model, self._case.batch)
        loss.backward()
        return loss.detach()

    def outcome(self, name: str) -> tuple[int, dict[str, torch.Tensor]]:
        """One run: activation memory in bytes, and clones of the loss and of every gradient."""
        self.prepare()
        losses: list[torch.Tensor] = []
        activation_bytes = peak_bytes(
            lambda: losses.append(self.calls[name]()), next(self._case.model.parameters()).device
        )
        self._on_step()
        found = {n: p.grad.clone() for n, p in self._case.model.named_parameters()}
        return activation_bytes, {"loss": losses[0], **found}


def measure_table(case: Case, seconds: float, steps: StepProgress) -> Table:
    """Plan for each budget of the case and for the peak of full checkpointing, and measure all methods.

    Args:
        seconds: As many interleaved rounds of timing as fit, one at least.
        steps: Progress: told how many steps there will be, and of each one done.
    """
    begin = time.perf_counter()
    graph = lowtide.trace(case.model, case.batch, step=case.step)
    traced = time.perf_counter()
    costs = lowtide.measure(graph)
    measured = time.perf_counter()

    methods = Methods(case, steps.done)
    steps.expect(2)
    start = time.perf_counter()
    plain_bytes, reference = methods.outcome(PLAIN)
    full_bytes, full = methods.outcome(FULL)
    each_s = (time.perf_counter() - start) / 2
    outcomes = {PLAIN: (plain_bytes, True), FULL: (full_bytes, same_outcome(full, reference))}
    del full
    budgets: dict[str, int | str] = {f"lowtide {budget}": budget for budget in case.budgets}
    plans = {name: plan_within(graph, costs, budget) for name, budget in budgets.items()}
    plans[AS_FULL] = plan_within(graph, costs, graph.resident_bytes + full_bytes)
    methods.add(plans)

    rounds = affordable(seconds - each_s * len(plans), each_s * len(methods.calls), least=1, most=7)
    steps.expect(len(plans) + len(methods.calls) * rounds)
    for name in plans:
        activation_bytes, found = methods.outcome(name)
        outcomes[name] = activation_bytes, same_outcome(found, reference)
    del reference
    times = compare_times({name: methods.timed(name) for name in methods.calls}, rounds=rounds, warmup=0)
    plain_ms = times[PLAIN].median_ms
    rows = [
        Row(
            method=name,
            peak_bytes=graph.resident_bytes + activation_bytes,
            fraction=activation_bytes / plain_bytes,
            cpu_time=times[name].median_ms / plain_ms,
            bitwise_equal=equal,
            budget_bytes=plans[name].budget_bytes if name in plans else None,
            predicted_peak_bytes=plans[name].predicted_peak_bytes if name in plans else None,
            predicted_overhead=plans[name].predicted_overhead if name in plans else None,
        )
        for name, (activation_bytes, equal) in outcomes.items()
    ]
    solve_s = sum(plan.solve_s for plan in plans.values())
    return Table(tuple(rows), rounds, plain_ms, traced - begin, measured - traced, solve_s)


def plan_within(graph: StepGraph, costs: Costs, budget: int | str) -> Plan:
    """The exact plan for ``budget``, or for the least peak there is where that is more."""
    try:
        return lowtide.solve(graph, costs, budget)
    except lowtide.BudgetInfeasibleError as error:
        return lowtide.solve(graph, costs, error.least_bytes)


def same_outcome(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """The same names with the same bits."""
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def affordable(seconds: float, each_s: float, *, least: int, most: int) -> int:
    """How many rounds of ``each_s`` fit into ``seconds``, within limits: a slow machine measures less, not longer."""
    return max(least, min(most, int(seconds / max(each_s, 1e-6))))
