"""Methods side by side on one step of a case: peak, time, and whether the gradients are the plain step's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

import lowtide
from lowtide.demo.case import Case
from lowtide.meters import compare_times, peak_bytes
from lowtide.plan import Plan
from lowtide.tracing.state import same_bits

PLAIN, FULL = "plain", "transformers, full"


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


class Steps(Protocol):
    """Who watches the progress."""

    def expect(self, count: int) -> None:
        """``count`` more steps will run."""

    def done(self) -> None:
        """One more has run."""


class Methods:
    """Every method as one call on the same weights, from the same random state, with gradients zeroed in place."""

    def __init__(self, case: Case, plans: dict[str, Plan], on_step: Callable[[], None]) -> None:
        self._case, self._on_step = case, on_step
        self.calls: dict[str, Callable[[], torch.Tensor]] = {PLAIN: self._step, FULL: self._fully_checkpointed}
        for name, plan in plans.items():
            self.calls[name] = lambda plan=plan: self._planned(plan)
        for parameter in case.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

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
            return self._step()

    def outcome(self, name: str) -> tuple[int, dict[str, torch.Tensor]]:
        """One run: activation memory in bytes, and clones of the loss and of every gradient."""
        self.prepare()
        losses: list[torch.Tensor] = []
        activation_bytes = peak_bytes(lambda: losses.append(self.calls[name]()), next(self._case.model.parameters()).device)
        self._on_step()
        found = {n: p.grad.clone() for n, p in self._case.model.named_parameters()}
        return activation_bytes, {"loss": losses[0], **found}


def measure_table(case: Case, seconds: float, steps: Steps) -> Table:
    """Plan for every budget of the case and measure all methods, as many rounds as fit into ``seconds``.

    Args:
        steps: Progress: told how many steps there will be, and of each one done.
    """
    begin = time.perf_counter()
    graph = lowtide.trace(case.model, case.batch, step=case.step)
    traced = time.perf_counter()
    costs = lowtide.measure(graph)
    measured = time.perf_counter()
    plans = {f"lowtide {budget}": lowtide.solve(graph, costs, budget) for budget in case.budgets}
    methods = Methods(case, plans, steps.done)

    start = time.perf_counter()
    outcomes: dict[str, tuple[int, bool]] = {}
    plain_bytes, reference = methods.outcome(PLAIN)
    outcomes[PLAIN] = plain_bytes, True
    rounds = affordable(seconds, (time.perf_counter() - start) * len(methods.calls), least=3, most=9) - 1
    steps.expect(len(methods.calls) * (rounds + 1) - 1)
    for name in methods.calls:
        if name != PLAIN:
            activation_bytes, found = methods.outcome(name)
            outcomes[name] = activation_bytes, same_outcome(found, reference)
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


def same_outcome(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """The same names with the same bits."""
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def affordable(seconds: float, each_s: float, *, least: int, most: int) -> int:
    """How many rounds of ``each_s`` fit into ``seconds``, within limits: a slow machine measures less, not longer."""
    return max(least, min(most, int(seconds / max(each_s, 1e-6))))
