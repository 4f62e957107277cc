"""Overhead per op of the tape and of PyTorch's own checkpointing: microseconds of thread CPU time, JSON lines.

    python benchmarks/overhead.py            one or two minutes
    python benchmarks/overhead.py --quick    a test that it runs

A step of many tiny kernels is timed under each method in turns. Forward and backward are timed separately, each as the
difference to the plain step just before and just after:

- ``forward_us``: added per forward op.
- ``backward_us``: added per replayed op, without the time of the replayed ops themselves. For the tape that time is
  measured by running the same ops alone between two steps; for checkpointing it is the plain forward pass.

Methods: an empty dispatch mode; the tape with nothing to recompute; the tape with everything replayed; steps of a fit
that has no plan, within a budget that is never short (what is learned in its first step is known); non-reentrant
``torch.utils.checkpoint`` around the whole model; the same with a selective policy that saves matmuls.

Two models: ``chain`` (sin and mul alternate, one tensor each) and ``decoder`` (a tiny Llama: views, casts, attention).

Then whole fitted steps of eight layers, of which the plan drops in none, one or all (``dropping_layers.py``).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decoder import MALLOC
from dropping_layers import dropping_layers
from provenance import provenance
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide.gc_control import gc_disabled
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.search_context import SearchContext
from lowtide.tape.recipes import Recipe

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "overhead_cpu.jsonl"
CHAINS = (1_000, 10_000, 100_000)


class Empty(TorchDispatchMode):
    """A dispatch mode that does nothing: the least that any mode costs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in the tape: PyTorch's wrapper would cost microseconds more

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


class Count(Empty):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.ops += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class Chain(nn.Module):
    """``length`` ops on one small tensor; autograd stores something at each."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length // 2):
            x = x.sin() * self.weight
        return x.sum()


@dataclass(frozen=True)
class Method:
    """One way to run the step.

    Attributes:
        around: What forward runs in.
        call: Wraps the model's call.
        replays: How many ops run again in backward.
        own: Runs just those ops.
    """

    name: str
    around: Callable[[], AbstractContextManager]
    call: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lambda forward: forward()
    replays: int = 0
    own: Callable[[], object] | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of every method (default 15)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="small models, two rounds, nothing written")
    args = parser.parse_args()
    if os.environ.get("MALLOC_MMAP_MAX_") != "0":  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC["fixed"]})
    torch.set_num_threads(1)
    lines = []
    for name, model, inputs in cases(args.quick):
        print(name, file=sys.stderr, flush=True)
        lines += [line(name, samples) for samples in compare(model, inputs, 2 if args.quick else args.rounds)]
    lines += [long_chain(length) for length in CHAINS[: 1 if args.quick else None]]
    lines += dropping_layers(2 if args.quick else args.rounds)
    text = "".join(json.dumps(found | provenance()) + "\n" for found in lines)
    print(text, end="")
    if not args.quick:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    return 0


def cases(quick: bool) -> Iterator[tuple[str, nn.Module, dict[str, torch.Tensor]]]:
    import transformers

    torch.manual_seed(0)
    yield "chain", Chain(100 if quick else 1_000), {"x": torch.randn(8)}
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2 if quick else 8, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    ids = torch.randint(0, 64, (1, 8))
    yield "decoder", transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Samples:
    """Microseconds of one method and of the plain steps around it, one entry per round.

    Attributes:
        ops: Forward ops. ``replayed``: ops that backward runs again.
        own_us: What the replayed ops take by themselves.
    """

    method: str
    ops: int
    replayed: int
    plain_forward_us: tuple[float, ...]
    plain_backward_us: tuple[float, ...]
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    own_us: tuple[float, ...]


def compare(model: nn.Module, inputs: dict, rounds: int) -> list[Samples]:
    """Time every method but the plain step, which runs just before and just after each."""
    forward = partial(loss_of, model, inputs)
    with Count() as count:
        forward()
    plain, *others = methods(model, inputs, count.ops)
    rows: dict[str, list[tuple[float, ...]]] = {method.name: [] for method in others}
    for done in range(rounds + 1):
        for method in others:
            before = timed(plain, forward)
            spent = timed(method, forward)
            after = timed(plain, forward)
            forward_us, backward_us = (before[0] + after[0]) / 2, (before[1] + after[1]) / 2
            if done:
                own_us = forward_us if method.own is None else thread_us(method.own)
                rows[method.name].append((forward_us, backward_us, *spent, own_us))
    return [Samples(method.name, count.ops, method.replays, *zip(*rows[method.name], strict=True)) for method in others]


def line(case: str, samples: Samples) -> dict:
    """Medians of the differences to the plain step."""
    forward = difference_us(samples.plain_forward_us, samples.forward_us) / samples.ops
    found = {
        "benchmark": "overhead_cpu", "case": case, "method": samples.method, "ops": samples.ops,
        "replayed": samples.replayed, "plain_us": statistics.median(samples.plain_forward_us) / samples.ops,
        "forward_us": forward,
    }  # fmt: skip
    if samples.replayed:
        expected = [x + y for x, y in zip(samples.plain_backward_us, samples.own_us, strict=True)]
        found["own_us"] = statistics.median(samples.own_us) / samples.replayed
        found["backward_us"] = difference_us(expected, samples.backward_us) / samples.replayed
    else:
        found["backward_us_per_op"] = difference_us(samples.plain_backward_us, samples.backward_us) / samples.ops
    return found


def difference_us(expected: Sequence[float], measured: Sequence[float]) -> float:
    return statistics.median(b - a for a, b in zip(expected, measured, strict=True))


def methods(model: nn.Module, inputs: dict, ops: int) -> Iterator[Method]:
    graph = lowtide.trace(model, inputs, step=lambda m, batch: as_loss(m(**batch)))
    costs = lowtide.Costs((1.0,) * len(graph.ops))
    context = SearchContext(graph, costs)
    kept = build_plan(context, Candidate(complete_actions(graph, ())), method="none")
    actions = complete_actions(graph, graph.stored)
    all_of_it = build_plan(context, Candidate(actions), method="all")
    replays = len(simulate_actions(graph, costs, actions).replays)
    aten = torch.ops.aten

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in (aten.mm.default, aten.addmm.default) else (
            CheckpointPolicy.PREFER_RECOMPUTE
        )  # fmt: skip

    yield Method("plain", nullcontext)
    yield Method("empty dispatch mode", Empty)
    yield Method("lowtide, keep all", partial(lowtide.apply, model, kept))
    again = replayed(model, inputs, all_of_it)
    assert len(again) == replays
    yield Method(
        "lowtide, all replayed", partial(lowtide.apply, model, all_of_it), replays=replays, own=partial(run, again)
    )
    yield without_a_plan(model, inputs)
    yield Method("checkpoint", nullcontext, partial(checkpoint, use_reentrant=False), replays=ops)
    selective = partial(create_selective_checkpoint_contexts, policy)
    yield Method(
        "selective checkpoint", nullcontext, partial(checkpoint, use_reentrant=False, context_fn=selective), replays=ops
    )


def without_a_plan(model: nn.Module, inputs: dict) -> Method:
    """Steps of a copy of ``model`` whose plan never comes."""
    copied = copy.deepcopy(model)
    fit = lowtide.fit(copied, budget="1TiB")
    fit._lifecycle.plans_by_shape.plan_for = lambda shape: None  # type: ignore[method-assign]
    return Method("lowtide, without a plan", nullcontext, lambda _: loss_of(copied, inputs))


def replayed(model: nn.Module, inputs: dict, plan: lowtide.Plan) -> list[tuple[Any, tuple, dict]]:
    """The ops that backward runs again under ``plan``, in order: operator and arguments."""
    found = []

    class Collect(Empty):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if func in collecting:  # not a view that the tape makes of an argument
                found.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    collecting: list[Any] = []
    original = Recipe.replay

    def replay(self: Recipe, **how: Any) -> None:
        collecting.append(self.op.func)
        original(self, **how)
        collecting.clear()

    with lowtide.apply(model, plan):
        loss = loss_of(model, inputs)
    Recipe.replay = replay  # type: ignore[method-assign]
    try:
        with Collect():
            loss.backward()
    finally:
        Recipe.replay = original  # type: ignore[method-assign]
    return found


def run(calls: list[tuple[Any, tuple, dict]]) -> None:
    with torch.no_grad():
        for func, args, kwargs in calls:
            func(*args, **kwargs)


def thread_us(function: Callable[[], object]) -> float:
    with gc_disabled():
        start = time.thread_time()
        function()
        return (time.thread_time() - start) * 1e6


def loss_of(model: nn.Module, inputs: dict) -> torch.Tensor:
    return as_loss(model(**inputs))


def as_loss(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def timed(method: Method, forward: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Microseconds of forward and of backward in this thread, in which a CPU's backward runs too."""
    with gc_disabled():
        with method.around():
            start = time.thread_time()
            loss = method.call(forward)
            middle = time.thread_time()
        again = time.thread_time()
        loss.backward()
        end = time.thread_time()
    return (middle - start) * 1e6, (end - again) * 1e6


def long_chain(length: int) -> dict:
    """The tape on a chain of ``length`` ops: neither time per op nor memory per recipe should grow with it."""
    model, x = Chain(length), torch.randn(8)
    graph = lowtide.trace(model, {"x": x}, step=lambda m, batch: m(**batch))
    costs = lowtide.Costs((1.0,) * len(graph.ops))
    everything = Candidate(complete_actions(graph, graph.stored))
    plan = build_plan(SearchContext(graph, costs), everything, method="all")
    again = replayed(model, {"x": x}, plan)
    plain, taped = Method("plain", nullcontext), Method("taped", partial(lowtide.apply, model, plan))
    spent = [min(timed(method, partial(model, x=x)) for _ in range(3)) for method in (plain, taped)]
    own_us = min(thread_us(partial(run, again)) for _ in range(3))
    (plain_f, plain_b), (mine_f, mine_b) = spent
    return {
        "benchmark": "overhead_cpu", "case": f"chain of {length}", "method": "lowtide, all replayed", "ops": length,
        "replayed": len(again), "forward_us": (mine_f - plain_f) / length, "own_us": own_us / len(again),
        "backward_us": (mine_b - plain_b - own_us) / len(again),
        "bytes_per_recipe": python_bytes(model, x, plan) / len(again),
    }  # fmt: skip


def python_bytes(model: nn.Module, x: torch.Tensor, plan: lowtide.Plan) -> int:
    """Bytes of Python objects that the tape holds between forward and backward."""
    with lowtide.apply(model, plan):
        tracemalloc.start()
        loss = model(x=x)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del loss
    return held


if __name__ == "__main__":
    sys.exit(main())
