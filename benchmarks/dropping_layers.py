"""What a plan costs that drops in one layer of eight, beside one that drops in all: process time of fitted steps.

Asked of it: at most an eighth of what dropping in every layer costs, and 2 % of the plain step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from functools import partial

import torch
from paired_times import paired_times
from torch import nn

import lowtide
from lowtide.gc_control import gc_disabled
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.search_context import SearchContext
from lowtide.step import backward_entry
from lowtide.tape.program import program_of
from lowtide.tape.tape import Tape
from lowtide.training.planned_step import PlannedStep, shapes_of_graph

LAYERS = 8
DROPPING = {"keeps everything": 0, f"drops in 1 of {LAYERS} layers": 1, "drops in every layer": LAYERS}
SIZES = ((16, 8, 60), (256, 32, 8), (256, 256, 2))  # width, rows, steps timed at once


class Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def dropping_layers(rounds: int) -> Iterator[dict]:
    """Lines of every size and method: ``step_ratio`` to the plain step, and what was ``asked``."""
    for width, rows, steps in SIZES:
        torch.manual_seed(0)
        model, x = Blocks(width), torch.randn(rows, width)
        models = {name: copy.deepcopy(model) for name in DROPPING}  # a fit does not hold its model
        for p in (p for each in (model, *models.values()) for p in each.parameters()):
            p.grad = torch.zeros_like(p)  # each step adds to them: one kind of step, and one plan
        fits = {name: _fitted(models[name], x, num) for name, num in DROPPING.items()}
        methods = {name: partial(_fitted_ms, fit, x, steps) for name, fit in fits.items()}
        found = paired_times(partial(_step_ms, model, x, steps), methods, rounds=rounds, seed=0, methods_per_baseline=1)
        every = found.ratios["drops in every layer"].median_ms - 1
        asked = {f"drops in 1 of {LAYERS} layers": 1 + every / LAYERS + 0.02}
        for name, fit in fits.items():
            if not fit.status().in_force:
                raise RuntimeError(f"the plan that {name} was not in force: {fit.status()}")
            ratios = found.ratios[name]
            yield {
                "benchmark": "overhead_cpu", "case": f"{LAYERS} layers, {rows} x {width}", "method": f"fit, {name}",
                "plain_us": 1e3 * found.baseline.median_ms, "step_ratio": ratios.median_ms,
                "step_ratio_quartiles": ratios.quartiles, "asked_ratio": asked.get(name),
            }  # fmt: skip
            fit.remove()


def _fitted(model: nn.Module, x: torch.Tensor, num_layers: int) -> lowtide.Fit:
    """A fit with a plan that drops all that the last ``num_layers`` layers store."""
    fit = lowtide.fit(model, x, step=_loss, method="none")
    for reference in [r for r in backward_entry._observers if r() is fit._call]:
        backward_entry._forget(reference)  # it would also be told of every other model's backward
    if num_layers:
        graph = fit.graph
        paths = tuple(f"layers.{n}" for n in range(LAYERS - num_layers, LAYERS))
        makers = {s: graph.storages[s].op for s in sorted(graph.stored)}
        where = {s: graph.frames[graph.ops[op].frame].path for s, op in makers.items() if op is not None}
        chosen = [s for s, path in where.items() if path.startswith(paths)]
        candidate = Candidate(complete_actions(graph, chosen))
        plan = build_plan(SearchContext(graph, fit.costs), candidate, method="layers")
        tape = Tape(program_of(plan), model)
        fit._lifecycle.put(PlannedStep(plan, graph, fit.costs, shapes_of_graph(graph), tape))
    return fit


def _fitted_ms(fit: lowtide.Fit, x: torch.Tensor, steps: int) -> float:
    undo = backward_entry.observe(fit._call)
    try:
        return _step_ms(fit.model, x, steps)
    finally:
        undo()


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _step_ms(model: nn.Module, x: torch.Tensor, steps: int) -> float:
    """Process time of one step, the mean of ``steps``."""
    _loss(model, x).backward()
    with gc_disabled():
        start = time.process_time()
        for _ in range(steps):
            _loss(model, x).backward()
        return (time.process_time() - start) / steps * 1e3
