"""Methods side by side on a Llama-architecture decoder, CPU, one thread: one JSON line per case and method.

    python benchmarks/decoder.py                     both vocabularies, both malloc modes; about half an hour
    python benchmarks/decoder.py --quick             a toy, to see that it runs

Each malloc mode is a process of its own, because glibc reads its settings at start:

- ``default``: what a user gets. A plain step pays page faults for its large peak that lean plans avoid, so measured
  overhead lies below predicted.
- ``fixed``: memory is kept by the process (``MALLOC_MMAP_MAX_=0``, no trimming). For comparing with predictions.

Within a process all methods run interleaved on the same weights. Time is process CPU time, as a ratio to the plain step
just before and just after; peaks are the allocator's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paired_times import paired_times
from provenance import provenance

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "decoder_cpu.jsonl"
SEED = 0
MALLOC = {
    "default": {},
    "fixed": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"},
}
FRACTIONS = (0.50, 0.36, 0.25)


def main() -> int:
    args = _arguments()
    if args.malloc:
        run_cases(args)
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    fresh = args.out.with_suffix(".partial")
    with fresh.open("w") as lines:
        for mode in MALLOC:
            if _run_in_mode(mode, lines) != 0:
                print(f"malloc mode {mode} failed; {args.out} is unchanged.", file=sys.stderr)
                return 1
    fresh.replace(args.out)
    print(f"wrote {args.out}", file=sys.stderr)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of every method (default 7)")
    parser.add_argument("--cases", type=int, nargs="+", default=[4096, 512], help="vocabularies")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a toy model, one round")
    parser.add_argument("--malloc", choices=tuple(MALLOC), help="one mode, in this process, lines to stdout")
    return parser.parse_args()


def _run_in_mode(mode: str, lines) -> int:
    environment = {**os.environ, **MALLOC[mode], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, *sys.argv[1:], "--malloc", mode]
    return subprocess.run(command, env=environment, stdout=lines, check=False).returncode


@dataclass(frozen=True)
class Method:
    """A way to run the step: ``on`` sets the model up, ``off`` undoes that; ``plan`` if it is one of lowtide's."""

    name: str
    on: Callable[[], None]
    off: Callable[[], None]
    plan: object = None


def run_cases(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    for vocabulary in args.cases:
        for line in Bench(vocabulary, args).lines():
            print(json.dumps(line), flush=True)


class Bench:
    """One case: a model and the measurements of its methods."""

    def __init__(self, vocabulary: int, args: argparse.Namespace) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        layers, hidden, inner, heads, tokens = (2, 64, 176, 4, 64) if args.quick else (8, 512, 1408, 8, 512)
        self.args, self.vocabulary, self.shape = args, vocabulary, (4, tokens)
        config = transformers.LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
            num_key_value_heads=heads // 2, vocab_size=vocabulary, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        torch.manual_seed(SEED)
        self.model = transformers.LlamaForCausalLM(config).train()
        ids = torch.randint(0, vocabulary, self.shape)
        self.batch = {"input_ids": ids, "labels": ids}
        self.reference: list | None = None
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def lines(self) -> list[dict]:
        """Plan, measure, and return one line per method."""
        from lowtide.measurement.timing import Times, time_ms

        self._say("plan")
        graph, op_costs, seconds = self._prepare()
        baselines = [
            Method("none", _nothing, _nothing),
            Method("transformers full", partial(self._checkpoint, 1), self._off),
            Method("transformers every 2nd", partial(self._checkpoint, 2), self._off),
            Method("SAC mm+sdpa", self._selective, self._off),
        ]
        outcomes = {method.name: self._outcome(method) for method in baselines}  # "none" first: the reference
        full_bytes = outcomes["transformers full"][0]
        ours = self._planned(graph, op_costs, graph.resident_bytes + full_bytes)
        outcomes |= {method.name: self._outcome(method) for method in ours if method.plan is not None}
        runnable = [method for method in [*baselines, *ours] if method.name in outcomes]
        others = {m.name: partial(time_ms, partial(self._run, m)) for m in runnable if m.name != "none"}
        plain, times, ratios = paired_times(
            partial(time_ms, partial(self._run, baselines[0])),
            others,
            rounds=1 if self.args.quick else self.args.rounds,
            on_round=lambda done, total: self._say(f"round {done} of {total}"),
            seed=SEED,
        )
        times["none"] = plain
        one = Times.of([ms / plain.median_ms for ms in plain.samples_ms])
        ratios["none"] = one
        shared = self._shared() | seconds
        return [
            shared | self._line(method, graph, outcomes.get(method.name), times, ratios, outcomes["none"][0])
            for method in [*baselines, *ours]
        ]

    def _prepare(self):
        """Trace the step and measure its costs, with the seconds that both took."""
        import time

        import lowtide

        start = time.perf_counter()
        # The loss alone comes back: a caller that held the output would keep the logits through backward.
        graph = lowtide.trace(self.model, self.batch, step=lambda model, batch: model(**batch).loss)
        traced = time.perf_counter()
        op_costs = lowtide.measure(graph)
        measured = time.perf_counter()
        return graph, op_costs, {"trace_s": traced - start, "measure_s": measured - traced}

    def _planned(self, graph, op_costs, full_peak_bytes: int) -> list[Method]:
        import lowtide

        budgets = {f"lowtide {fraction:.2f}": f"{100 * fraction}%" for fraction in FRACTIONS}
        budgets["lowtide at full's peak"] = full_peak_bytes
        methods = []
        for name, budget in budgets.items():
            try:
                plan = lowtide.solve(graph, op_costs, budget)
            except lowtide.BudgetInfeasibleError:
                plan = None
            methods.append(Method(name, _nothing, _nothing, plan))
        keep_all = lowtide.solve(graph, op_costs, method="none")
        return [*methods, Method("lowtide, keep all", _nothing, _nothing, keep_all)]

    def _run(self, method: Method) -> float:
        import lowtide

        method.on()
        try:
            if method.plan is None:
                loss = self.model(**self.batch).loss
            else:
                with lowtide.apply(self.model, method.plan):
                    loss = self.model(**self.batch).loss
            loss.backward()
        finally:
            method.off()
        return loss.item()

    def _outcome(self, method: Method):
        """Activation bytes, and whether loss and gradients are the plain step's to the last bit."""
        import torch

        from lowtide.measurement.allocator import peak_bytes
        from lowtide.step.bits import same_bits

        self._say(method.name)
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        torch.manual_seed(SEED)
        losses = []
        activation_bytes = peak_bytes(lambda: losses.append(self._run(method)))
        found = [torch.tensor(losses), *(p.grad for p in self.model.parameters())]
        if self.reference is None:
            self.reference = [tensor.clone() for tensor in found]
        return activation_bytes, all(same_bits(a, b) for a, b in zip(found, self.reference, strict=True))

    def _line(self, method: Method, graph, outcome, times: dict, ratios: dict, plain_bytes: int) -> dict:
        line: dict = {"method": method.name}
        if outcome is None:
            return line | {"status": "infeasible"}
        activation_bytes, equal = outcome
        spent, ratio = times[method.name], ratios[method.name]
        line |= {
            "status": "ok" if equal else "gradients differ",
            "bitwise_equal": equal,
            "resident_bytes": graph.resident_bytes,
            "peak_bytes": graph.resident_bytes + activation_bytes,
            "activation_bytes": activation_bytes,
            "fraction": activation_bytes / plain_bytes,
            "time_ms": spent.median_ms,
            "time_ms_quartiles": spent.quartiles,
            "time_ratio": ratio.median_ms,
            "time_ratio_quartiles": ratio.quartiles,
        }
        plan = method.plan
        if plan is None:
            return line
        gap = None if plan.bound_ms is None else plan.gap
        line |= {
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "predicted_overhead": plan.predicted_overhead,
            "solve_s": plan.solve_s,
            "bound_ms": plan.bound_ms,
            "gap": gap,
            "plan_status": plan.status,
        }
        if plan.budget_bytes is not None and line["peak_bytes"] > plan.budget_bytes:
            line["status"] = "over budget"
        return line

    def _shared(self) -> dict:
        return {
            "benchmark": "decoder_cpu",
            "case": f"vocabulary {self.vocabulary}",
            "vocabulary": self.vocabulary,
            "batch": self.shape,
            "layers": self.model.config.num_hidden_layers,
            "hidden": self.model.config.hidden_size,
            "dtype": "float32",
            "malloc": self.args.malloc,
            "seed": SEED,
            "rounds": 1 if self.args.quick else self.args.rounds,
            **provenance(),
        }

    def _checkpoint(self, every_n_layers: int) -> None:
        self.model.activation_checkpointing_enable(every_n_layers=every_n_layers)

    def _selective(self) -> None:
        import torch
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        aten = torch.ops.aten
        kept = [aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
        context = partial(create_selective_checkpoint_contexts, kept)
        self.model.activation_checkpointing_enable()
        for layer in self.model.model.layers:
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=context)

    def _off(self) -> None:
        self.model.activation_checkpointing_disable()
        self.model.disable_input_require_grads()  # its own switch leaves these hooks on

    def _say(self, what: str) -> None:
        print(f"malloc {self.args.malloc}, vocabulary {self.vocabulary}: {what}", file=sys.stderr, flush=True)


def _nothing() -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
