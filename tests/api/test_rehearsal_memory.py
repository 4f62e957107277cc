"""Rehearsals of lowtide's own that run out of memory are done again smaller, or told by name."""

import pytest
import torch
from support.training_steps import differing, mlp, outcome, plain
from torch import nn

import lowtide
from lowtide.errors import RehearsalMemoryError
from lowtide.tracing.tracer import run_step

X = torch.randn(64, 64)


class Device(nn.Module):
    """A model that runs out of memory at chosen calls, or on more than ``most_rows``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 64)
        self.most_rows, self.calls, self.fails_at = 10**9, 0, range(0)

    def forward(self, x):
        self.calls += 1
        x = self.body(x)
        if len(x) > self.most_rows or self.calls in self.fails_at:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 20.00 KiB\nmore of it")
        return x


def with_gradients(model):
    """Its step adds to gradients, so what it stores sets the peak."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def step_of(model):
    torch.manual_seed(7)
    loss, _ = run_step(model, X, None)
    loss.backward()
    return outcome(model, loss)


def test_verify_compares_on_fewer_rows():
    model = with_gradients(Device())
    plan = lowtide.solve(graph := lowtide.trace(model, X), lowtide.measure(graph), budget="50%")
    model.most_rows = 20

    found = lowtide.verify(model, X, plan, rounds=0)

    assert found.equal and found.dropped_ops
    assert found.note == "the plain step does not fit: compared on 16 of 64 rows, at the least that they need"


def test_verify_compares_on_fewer_rows_where_their_ops_cannot_be_timed(monkeypatch):
    model = Device()
    plan = lowtide.solve(graph := lowtide.trace(model, X), lowtide.measure(graph), budget="50%")
    model.most_rows, refusals = 40, iter(["memory ran out while ops were timed: out of memory"])

    def measure(graph):
        for refusal in refusals:
            raise RehearsalMemoryError(refusal)
        return lowtide.measure(graph)

    monkeypatch.setattr("lowtide.verifier.measure", measure)

    assert lowtide.verify(model, X, plan, rounds=0).note.startswith("the plain step does not fit: compared on 16 of 64")


def test_verify_that_fits_no_row_is_told_with_the_way_out():
    model = Device()
    plan = lowtide.solve(graph := lowtide.trace(model, X), lowtide.measure(graph), budget="50%")
    model.most_rows = 0

    with pytest.raises(RehearsalMemoryError) as error:
        lowtide.verify(model, X, plan, rounds=0)
    assert str(error.value) == (
        "memory ran out while the plain and the planned step were compared on 1 of 64 rows: "
        "out of memory. Tried to allocate 20.00 KiB\nMake room on the device, or verify on a smaller batch."
    )


def test_a_rehearsed_plan_that_does_not_fit_gets_a_smaller_budget():
    model = Device()
    expected = plain(model, X)
    first = lowtide.fit(Device(), X, budget="60%").plan
    model.calls, model.fails_at = 0, (2,)  # the trace is the first call

    with lowtide.fit(model, X, budget="60%") as fit:
        assert fit.plan.predicted_peak_bytes < first.predicted_peak_bytes
        (reason,) = fit.warnings
        assert reason.startswith("memory ran out in a rehearsal within ") and "the budget is" in reason
        assert differing(expected, step_of(model)) == [] and fit.status().planned_steps == 1


def test_after_the_last_rehearsal_without_memory_the_plan_is_the_one_solved_last():
    model = Device()
    expected = plain(model, X)
    model.calls, model.fails_at = 0, (2, 3, 4)

    with lowtide.fit(with_gradients(model), X, budget="90%") as fit:
        shrunk = [reason for reason in fit.warnings if reason.startswith("memory ran out in a rehearsal")]
        assert len(shrunk) == 3
        assert fit.plan.predicted_peak_bytes <= fit.status().budget_bytes
        assert fit.plan.counts["recompute"] and not fit._lifecycle.latest.tape.program.proven_ops
        assert differing(expected, step_of(model)) == [] and fit.status().planned_steps == 1
        assert fit._lifecycle.latest.tape.program.proven_ops


def test_a_trace_that_does_not_fit_leaves_the_real_steps_to_be_watched():
    model = Device()
    expected = plain(model, X)
    model.calls, model.fails_at = 0, (1,)

    with lowtide.fit(model, X, budget="60%") as fit:
        (reason,) = fit.warnings
        assert reason == (
            "not rehearsed, planned from real steps instead: memory ran out while this batch was rehearsed: "
            "out of memory. Tried to allocate 20.00 KiB"
        )
        assert differing(expected, step_of(model)) == []
        model.zero_grad()
        fit.wait(60)
        assert differing(expected, step_of(model)) == [] and fit.status().in_force
        model.calls, model.fails_at = 0, (1,)
        with pytest.raises(RehearsalMemoryError, match="memory ran out while this batch was rehearsed"):
            fit.add(X[:32])
