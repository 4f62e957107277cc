"""Elapsed time of a decoder's step with tensors on disk, and with recomputing only: JSON lines.

    python benchmarks/offload.py              4 layers, hidden 256, batch 4 x 256; a few minutes
    python benchmarks/offload.py --quick      a toy, to see that it runs

Budgets are shares of the plain step's activations, and one that recomputing alone cannot reach: halfway between the
least peak found without the disk and with it. All methods run interleaved in one process, in another order each round.
Time is elapsed time, since waiting for a disk takes no processor time; ratios are to the plain step of the same round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from provenance import provenance

RESULTS = Path(__file__).parent / "results" / "offload_cpu.jsonl"
SEED = 0
FRACTIONS = ("50%", "36%", "25%")
WAYS = {"recompute": {}, "disk": {"offload": ("disk",)}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of every method (default 5)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a toy model, one round")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    lines = Bench(args).lines()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"wrote {args.out}", file=sys.stderr)
    return 0


@dataclass
class Method:
    """One way to run the step; without a plan the plain one."""

    budget: str
    way: str
    plan: object = None
    tiers: object = None
    status: str = "ok"
    seconds: list[float] = field(default_factory=list)


class Bench:
    """One model and its methods."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        layers, hidden, tokens = (2, 64, 64) if args.quick else (args.layers, args.hidden, 256)
        self.rounds = 1 if args.quick else args.rounds
        heads = max(hidden // 64, 2)
        config = transformers.LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, intermediate_size=hidden * 11 // 4, vocab_size=512,
            num_attention_heads=heads, num_key_value_heads=heads // 2, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        torch.manual_seed(SEED)
        self.model = transformers.LlamaForCausalLM(config).train()
        ids = torch.randint(0, 512, (4, tokens))
        self.batch = {"input_ids": ids, "labels": ids}
        self.shape = {"layers": layers, "hidden": hidden, "batch": [4, tokens], "dtype": "float32"}
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def lines(self) -> list[dict]:
        """Plan, measure, and return one line per method."""
        import lowtide

        # The loss alone comes back: a caller that held the output would keep the logits through backward.
        graph = lowtide.trace(self.model, self.batch, step=lambda model, batch: model(**batch).loss)
        costs = lowtide.measure(graph, tiers=("disk",), refresh=True)
        methods = self._methods(graph, costs)
        reference = self._outcome(methods[0])
        found = {id(m): self._outcome(m) if m is not methods[0] else reference for m in methods if m.status == "ok"}
        chance = random.Random(SEED)
        runnable = [m for m in methods if m.status == "ok"]
        for done in range(self.rounds):
            for method in chance.sample(runnable, len(runnable)):
                start = time.perf_counter()
                self._run(method)
                method.seconds.append(time.perf_counter() - start)
            print(f"round {done + 1} of {self.rounds}", file=sys.stderr, flush=True)
        shared = self._shared(graph, costs)
        return [shared | self._line(m, graph, found.get(id(m)), reference, methods[0]) for m in methods]

    def _methods(self, graph, costs) -> list[Method]:
        import lowtide
        from lowtide.tape.offload.open_tiers import open_tiers

        least = {way: self._least(graph, costs, options) for way, options in WAYS.items()}
        budgets: list[tuple[str, int | str]] = [(f, f) for f in FRACTIONS]
        if least["disk"] < least["recompute"]:
            budgets.append(("beyond recomputing", (least["recompute"] + least["disk"]) // 2))
        methods = [Method("", "plain")]
        for name, budget in budgets:
            for way, options in WAYS.items():
                try:
                    plan = lowtide.solve(graph, costs, budget, **options)
                except lowtide.BudgetInfeasibleError:
                    methods.append(Method(name, way, status="no plan"))
                    continue
                methods.append(Method(name, way, plan, open_tiers(plan, lowtide.Offload())))
        return methods

    def _least(self, graph, costs, options: dict) -> int:
        import lowtide

        try:
            lowtide.solve(graph, costs, 1, **options)
        except lowtide.BudgetInfeasibleError as error:
            return error.least_bytes
        raise SystemExit("a plan for one byte: something is wrong")

    def _run(self, method: Method) -> float:
        from lowtide.tape.attach import applied

        inside = nullcontext() if method.plan is None else applied(self.model, method.plan, method.tiers)
        with inside:
            loss = self.model(**self.batch).loss
        loss.backward()
        return loss.item()

    def _outcome(self, method: Method) -> tuple[int, dict]:
        """Activation bytes, and the gradients by name."""
        import torch

        from lowtide.measurement.allocator import peak_bytes

        for parameter in self.model.parameters():
            parameter.grad.zero_()
        torch.manual_seed(SEED)
        peak = peak_bytes(lambda: self._run(method))
        return peak, {f"gradient of {n}": p.grad.clone() for n, p in self.model.named_parameters()}

    def _line(self, method: Method, graph, outcome, reference, plain: Method) -> dict:
        from lowtide.step.bits import same_bits

        line: dict = {"budget": method.budget, "way": method.way, "status": method.status}
        if outcome is None:
            return line
        peak, gradients = outcome
        differing = [n for n, g in gradients.items() if not same_bits(g, reference[1][n])]
        ratios = [ours / theirs for ours, theirs in zip(method.seconds, plain.seconds, strict=True)]
        line |= {
            "activation_bytes": peak,
            "fraction": peak / reference[0],
            "elapsed_ms": 1e3 * statistics.median(method.seconds),
            "elapsed_ratio": statistics.median(ratios),
            "elapsed_ratio_quartiles": _quartiles(ratios),
            "bitwise_equal": not differing,
        }
        if method.plan is not None:
            plan = method.plan
            line |= {
                "predicted_activation_bytes": plan.predicted_peak_bytes - plan.resident_bytes,
                "predicted_overhead": plan.predicted_overhead,
                "gap": plan.gap,
                "moved_bytes": plan.bytes_by_action["disk_offload"],
                "solve_s": plan.solve_s,
            }
        return line

    def _shared(self, graph, costs) -> dict:
        from lowtide.scratch_file import file_system

        links = {
            tier: [link.store_bytes_per_s, link.fetch_bytes_per_s, link.latency_ms]
            for tier, link in costs.links.items()
        }
        return {
            "benchmark": "offload_cpu", "case": f"{self.shape['layers']} layers, hidden {self.shape['hidden']}",
            **self.shape, "links": links, "file_system": file_system(tempfile.gettempdir()), "rounds": self.rounds,
            "resident_bytes": graph.resident_bytes, "seed": SEED, **provenance(),
        }  # fmt: skip


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


if __name__ == "__main__":
    sys.exit(main())
