"""Steps under the online tape, and what it did in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support.training_steps import outcome
from torch import nn

from lowtide.recording.step_recording import StepRecording
from lowtide.step import module_calls
from lowtide.step.batches import call_of
from lowtide.step.seam import Seam
from lowtide.tape.online.online_calls import KnownCalls
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.online.room import ExpectedBytes
from lowtide.tracing.model_facts import device_of
from lowtide.tracing.tracer import run_step


@contextmanager
def under(tape: OnlineTape, model: nn.Module) -> Iterator[None]:
    """Everything that runs inside is one step of ``model`` under ``tape``."""
    undo = module_calls.install(model, model._call_impl)
    seam = Seam(tape)
    state = module_calls.thread_state
    try:
        tape.begin_step()
        seam.open()
        state.observer = tape
        yield
    finally:
        state.observer = None
        seam.close()
        tape.stop_observing()
        undo()


def recorded(model: nn.Module, budget_bytes: float) -> OnlineTape:
    """A tape whose step is recorded as a graph."""
    return OnlineTape(model, budget_bytes, listener=StepRecording(model, device_of(model)))


def recording_of(tape: OnlineTape) -> StepRecording:
    assert isinstance(tape.listener, StepRecording)
    return tape.listener


def online(
    model: nn.Module,
    batch: Any,
    budget_bytes: float,
    *,
    step: Any = None,
    seed: int = 7,
    make: Callable[[nn.Module, float], OnlineTape] = OnlineTape,
    copies: bool = True,
) -> tuple[dict[str, torch.Tensor | None], OnlineTape]:
    """The outcome of one step of a copy of ``model`` within ``budget_bytes`` for what it makes, and the tape."""
    model = copy.deepcopy(model) if copies else model
    tape = make(model, budget_bytes)
    torch.manual_seed(seed)
    with under(tape, model):
        if tape.listener is not None:
            call = call_of(batch)
            recording_of(tape).begin_call(model, call.args, call.kwargs)
        loss, output = run_step(model, batch, step)
        del output
        loss.backward()
    found = outcome(model, loss)
    del loss
    return found, tape


class Steps:
    """Steps of copies of one model within one budget, of which each knows what those before have shown."""

    def __init__(self, model: nn.Module, budget_bytes: float) -> None:
        self.model, self.budget_bytes = model, budget_bytes
        self.expected, self.known_calls = ExpectedBytes(), KnownCalls()

    def run(self, x: torch.Tensor) -> tuple[dict[str, torch.Tensor | None], OnlineTape]:
        def make(model: nn.Module, budget_bytes: float) -> OnlineTape:
            return OnlineTape(model, budget_bytes, self.expected, self.known_calls)

        return online(self.model, x, self.budget_bytes, make=make)


def layers(num: int = 6, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(num)]
    model = nn.Sequential(*made)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model
