"""One architecture compared with plain training, bitwise: loss, all gradients, all buffers.

Variants: float32; bfloat16 autocast; dropout on; LoRA through PEFT on frozen weights. Plans of each:

- everything that may be recomputed is;
- the exact method under limits (``QUICKLY``), at the tightest budget that it finds, and at half of the activation
  memory where the tightest is below;
- published methods: layers checkpointed whole, and PyTorch's knapsack at half the stored bytes.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

import lowtide
from lowtide.gc_control import gc_disabled
from lowtide.solvers import tuning
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.peak_report import bottleneck
from lowtide.solvers.search_context import Limits, SearchContext
from zoo import architectures
from zoo.batches import loss_of

VARIANTS = ("float32", "bfloat16 autocast", "dropout", "LoRA")
# A plan that is not the fastest is as good a test.
QUICKLY = Limits(time_limit_s=0.3, node_limit=5, gap=0.1, multi_segment=False)
# A fifth of what local search may simulate otherwise.
_OF_A_SEARCH = "ROUNDING_EVENTS", "LEAST_PEAK_EVENTS", "LEAST_PEAK_START_EVENTS", "SAVE_WHAT_FITS_EVENTS"
FEW_EVENTS = {name: getattr(tuning, name) // 5 for name in _OF_A_SEARCH}


def examine(
    task: str, kind: str, variants: Sequence[str] = VARIANTS, *, searched: bool = True, published: bool = False
) -> Iterator[dict]:
    """One line for each of ``variants``; a single one where the architecture cannot be built.

    Args:
        searched: With plans of the exact method.
        published: With plans of published methods.
    """
    for variant in variants:
        start = time.perf_counter()
        try:
            architecture = architectures.build(task, kind, dropout=0.1 if variant == "dropout" else None)
        except architectures.CannotBuild as error:
            yield {"variant": variant, "status": "not built", "reason": str(error)}
            return
        line = {"variant": variant, "class": architecture.name, "inputs": sorted(architecture.batch)}
        try:
            model, step = prepare(architecture, variant)
            check_repeatable(model, architecture.batch, step)
        except Exception as error:  # the model's own, without lowtide
            yield line | {"status": "not built", "reason": _first_line(error)}
            if variant == VARIANTS[0]:
                return
            continue
        try:
            line |= compare(model, architecture.batch, step, searched=searched, published=published)
        except lowtide.UnsupportedModelError as error:
            line |= {"status": "refused", "reason": _first_line(error)}
        except Exception as error:
            line |= {"status": "failed", "reason": f"{type(error).__name__}: {_first_line(error)}"}
        yield line | {"seconds": round(time.perf_counter() - start, 1)}


def prepare(architecture: architectures.Architecture, variant: str) -> tuple[nn.Module, Callable]:
    """The model of the variant, and its step."""
    model = with_lora(architecture.model) if variant == "LoRA" else architecture.model

    def step(model: nn.Module, batch: dict) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=variant == "bfloat16 autocast"):
            return loss_of(model(**batch))

    return model, step


def with_lora(model: nn.Module) -> nn.Module:
    """LoRA adapters on frozen weights: on all linear layers with dropout, or on those that PEFT accepts."""
    import peft

    refused: Exception | None = None
    for targets, dropout in (("all-linear", 0.1), ("all-linear", 0.0), (["in_proj", "x_proj"], 0.1)):
        config = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=dropout)
        try:
            return peft.get_peft_model(copy.deepcopy(model), config).train()
        except (ValueError, TypeError) as error:
            refused = refused or error
    assert refused is not None
    raise refused


def check_repeatable(model: nn.Module, batch: dict, step: Callable) -> None:
    """Run the step twice without lowtide from one state; raise ValueError if the results differ."""
    found = []
    buffers = [b.detach().clone() for b in model.buffers()]
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        torch.manual_seed(0)
        loss = step(model, batch)
        if loss is None:
            raise ValueError("it returns no loss for this batch")
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
        model.zero_grad(set_to_none=True)
    (one, ones), (two, twos) = found
    same = torch.equal(one, two) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ones, twos, strict=True)
    )
    if not same and torch.isfinite(one):
        raise ValueError("two plain steps from one state differ")
    if not torch.isfinite(one):
        raise ValueError(f"its loss is {one.item()}")


def compare(model: nn.Module, batch: dict, step: Callable, *, searched: bool, published: bool) -> dict[str, Any]:
    """The fields of a line that say what was compared and how it ended."""
    graph = lowtide.trace(model, batch, step=step, accumulate=2)
    costs = plausible_costs(graph)
    plans = plans_without_search(graph, costs, published=published)
    obstacle = {}
    if searched:
        with gc_disabled():
            found, obstacle = plans_searched(graph, costs)
        plans |= found
    seen = {name: lowtide.verify(model, batch, plan, step=step, rounds=0) for name, plan in plans.items()}
    differing = {name: list(proof.differing)[:3] for name, proof in seen.items() if not proof.equal}
    return {
        "status": "differs" if differing else "equal",
        "differing": differing,
        "plans": {name: round(plan.predicted_fraction, 4) for name, plan in plans.items()},
        "peaks": {name: [v.predicted_peak_bytes, v.measured_peak_bytes] for name, v in seen.items()},
        **obstacle,
        "ops": len(graph.ops),
        "dropped_ops": max(proof.dropped_ops for proof in seen.values()),
        "mismatched_ops": sum(proof.mismatched_ops for proof in seen.values()),
        "plain_peak_bytes": plans["all replayed"].plain_peak_bytes,
    }


def plans_without_search(graph: lowtide.StepGraph, costs: lowtide.Costs, *, published: bool) -> dict[str, lowtide.Plan]:
    """Plans of methods that take no budget, by name."""
    everything = Candidate(complete_actions(graph, graph.stored))
    plans = {"all replayed": build_plan(SearchContext(graph, costs), everything, method="all")}
    if published:
        with contextlib.suppress(ValueError):  # no layer repeats
            plans["full"] = lowtide.solve(graph, costs, method="full")
        plans["knapsack 0.5"] = lowtide.solve(graph, costs, method="knapsack", ratio=0.5)
    return plans


def plans_searched(
    graph: lowtide.StepGraph, costs: lowtide.Costs
) -> tuple[dict[str, lowtide.Plan], dict[str, float | str]]:
    """The exact method's plans at its tightest budget and at half; if half cannot be reached, facts that say why."""
    context = SearchContext(graph, costs, QUICKLY)
    search = ExactSearch(context)
    with patch.multiple(tuning, **FEW_EVENTS):
        least, span_bytes = search.min_peak, context.plain.peak_bytes - graph.resident_bytes
        half_bytes = graph.resident_bytes + span_bytes // 2
        half = search.within(half_bytes) if least.peak_bytes <= half_bytes else None
    candidates = {"least": Candidate(least.actions, "feasible", replays=least.replays)}
    obstacle: dict[str, float | str] = {}
    if half is not None:
        candidates["half"] = half
    else:
        obstacle = {
            "floor": round((bound_peak(graph) - graph.resident_bytes) / span_bytes, 4),
            "in_the_way": bottleneck(graph, candidates["least"], least.timeline),
        }
    plans = {name: build_plan(context, candidate, method="exact") for name, candidate in candidates.items()}
    return plans, obstacle


def plausible_costs(graph: lowtide.StepGraph) -> lowtide.Costs:
    """Costs made from bytes, so that plans are the same on every machine; matmuls weigh ten times more."""
    heavy = ("mm", "conv", "attention", "linear", "scan")
    size = [s.bytes for s in graph.storages]
    moved = [sum(size[s] for s in {*op.reads, *op.makes}) for op in graph.ops]
    weight = [10 if any(part in op.name for part in heavy) else 1 for op in graph.ops]
    return lowtide.Costs(tuple(0.002 + count * times / 1e6 for count, times in zip(moved, weight, strict=True)))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
