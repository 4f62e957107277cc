"""Small training steps, plans with given drops and replays, and outcomes compared bit by bit."""

from __future__ import annotations

import copy
import gc
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._device
from torch import nn

import lowtide
from lowtide import BudgetInfeasibleError
from lowtide.device import generators
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, Plan
from lowtide.simulation.simulator import Timeline
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.search_context import SearchContext
from lowtide.step import module_calls
from lowtide.step.bits import same_bits
from lowtide.tape.recipes import Recipe
from lowtide.tracing.tracer import run_step


def drop_everything(graph: StepGraph) -> Plan:
    """Every storage that may be recomputed is: the plan with the most ways to go wrong."""
    costs = Costs(op_ms=(1.0,) * len(graph.ops))
    everything = Candidate(complete_actions(graph, sorted(graph.stored)))
    return build_plan(SearchContext(graph, costs), everything, method="full")


def build_for_drops(graph: StepGraph, chosen: Callable[[str], bool]) -> Plan:
    """Everything stored is dropped that an op of a module with a chosen path makes."""

    def path(storage: int) -> str:
        op = graph.storages[storage].op
        return "" if op is None else graph.frames[graph.ops[op].frame].path

    actions = complete_actions(graph, [s for s in sorted(graph.stored) if chosen(path(s))])
    costs = Costs(op_ms=(1.0,) * len(graph.ops))
    return build_plan(SearchContext(graph, costs), Candidate(actions), method="full")


def harshest(model: nn.Module, batch: Any, step: Any = None) -> Plan:
    """Trace, and drop everything; fails if nothing can be dropped."""
    plan = drop_everything(lowtide.trace(model, batch, step=step))
    assert plan.counts[RECOMPUTE], "nothing to recompute: the step is no test"
    return plan


def outcome(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Copies of the loss, every gradient and every buffer, by name."""
    found: dict[str, torch.Tensor | None] = {"loss": loss.detach().clone()}
    for name, p in model.named_parameters():
        found[f"gradient of {name}"] = None if p.grad is None else p.grad.detach().clone()
    for name, b in model.named_buffers():
        found[f"buffer {name}"] = b.detach().clone()
    return found


def plain(model: nn.Module, batch: Any, step: Any = None, seed: int = 7) -> dict[str, torch.Tensor | None]:
    """One plain step of a copy of ``model``."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    loss, _ = run_step(model, batch, step)
    loss.backward()
    return outcome(model, loss)


def planned(
    model: nn.Module, batch: Any, plan: Plan, step: Any = None, seed: int = 7
) -> dict[str, torch.Tensor | None]:
    """The same step of another copy under ``plan``; fails if nothing was dropped."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    with lowtide.apply(model, plan) as applied:
        loss, _ = run_step(model, batch, step)
    loss.backward()
    assert applied.counts.dropped, "the tape dropped nothing: the step is no test"
    return outcome(model, loss)


def differing(a: dict[str, torch.Tensor | None], b: dict[str, torch.Tensor | None]) -> list[str]:
    """Names whose bits differ."""
    assert a.keys() == b.keys()

    def same(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
        if x is None or y is None:
            return x is y
        if x.layout is not torch.strided:
            return x.layout is y.layout and torch.equal(x.to_dense(), y.to_dense())
        return same_bits(x, y)

    return [name for name in a if not same(a[name], b[name])]


@contextmanager
def replays() -> Iterator[list[Recipe]]:
    """Every replay that runs inside, in order."""
    seen: list[Recipe] = []
    original = Recipe.replay

    def replay(self: Recipe, **how: Any) -> None:
        seen.append(self)
        original(self, **how)

    Recipe.replay = replay
    try:
        yield seen
    finally:
        Recipe.replay = original


def is_clean(model: nn.Module) -> bool:
    """Whether no mode, hook, watcher or attached call is left."""
    of_functions = torch.overrides._get_current_function_mode_stack()
    return (
        torch._C._len_torch_dispatch_stack() == 0
        # A default device is a mode, too.
        and all(isinstance(mode, torch.utils._device.DeviceContext) for mode in of_functions)
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch._C._autograd._saved_tensors_hooks_is_enabled()
        and module_calls.thread_state.observer is None
        and all(m._compiled_call_impl is None for m in model.modules())
    )


def state_of(model: nn.Module) -> list[Any]:
    """All that planning must not change: parameters, gradients, buffers, modes, hooks, attached calls, generators."""
    of_default_device = generators.state_of(torch.get_default_device())
    found: list[Any] = [of_default_device, torch.get_rng_state(), random.getstate(), np.random.get_state()]
    for path, module in model.named_modules():
        hooks = [len(h) for name, h in vars(module).items() if name.endswith("_hooks")]
        found += [path, type(module), id(module), module.training, hooks, module._compiled_call_impl]
    for name, p in model.named_parameters():
        hooks = [len(h or ()) for h in (p._backward_hooks, p._post_accumulate_grad_hooks)]
        grad = None if p.grad is None else (id(p.grad), p.grad.clone())
        found += [name, id(p), type(p), p.requires_grad, p.data_ptr(), p.detach().clone(), grad, hooks]
    for name, b in model.named_buffers():
        found += [name, id(b), b.detach().clone()]
    return [*found, list(model.state_dict())]


def same_state(a: Any, b: Any) -> bool:
    """Equality of what ``state_of`` gives, tensors and arrays by value."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(same_state, a, b))
    return a == b


def live_tensors() -> int:
    """Tensors that exist after a full collection."""
    gc.collect()
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


class Net(nn.Module):
    """Any forward as a module over a stack of tiny linears: ``Net(lambda self, x: ...)``."""

    def __init__(self, forward: Callable[..., Any], layers: int = 3, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def mlp(depth: int = 4, width: int = 16) -> nn.Sequential:
    """Linear and GELU, ``depth`` times."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers)


def tight(model: nn.Module, batch: Any, **options: Any) -> lowtide.Fit:
    """A fit at the least budget that is feasible."""
    with pytest.raises(BudgetInfeasibleError) as error:
        lowtide.fit(model, batch, budget=1, **options)
    return lowtide.fit(model, batch, budget=error.value.least_bytes, **options)


def deep(width: int = 32, depth: int = 3) -> nn.Module:
    """Norms, dropout and an in-place activation, wide enough for plans to differ."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2), nn.Tanh()]
    return nn.Sequential(*layers)


def run(script: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def counted(graph: StepGraph, actions: dict[int, str], counts: dict[int, int]) -> Plan:
    costs = Costs(op_ms=(1.0,) * len(graph.ops))
    return build_plan(SearchContext(graph, costs), Candidate(actions, replays=counts), method="full")


def drop_all(graph: StepGraph, count: int) -> Plan:
    actions = complete_actions(graph, sorted(graph.stored))
    return counted(graph, actions, {s: count for s, action in actions.items() if action == RECOMPUTE})


def ran(line: Timeline) -> list[int]:
    return [r.op for r in line.replays]
