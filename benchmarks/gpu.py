"""Methods side by side on a Llama-3.1-8B-shaped decoder in bf16 on one GPU: one JSON line per case and method.

    python benchmarks/gpu.py                 three shapes, about eight minutes on an H100 or H200
    python benchmarks/gpu.py --dry-run       the same code on CPU with a toy (the disk tier stands for host memory)

Weights are drawn at random from the configuration; nothing is downloaded. Every method of a case runs on the same
weights and batch: once for its peaks (allocated and reserved) and its gradients, then timed, interleaved, by CUDA
events. A method that runs out of memory, or that this machine does not have, is a line that says so.

Never run on a GPU so far: there are no GPU results in this repository, and none are claimed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from provenance import provenance

RESULTS = Path(__file__).parent / "results" / "gpu.jsonl"
SEED = 0
FRACTIONS = (0.5, 0.3, 0.15)
SHAPES = ((1, 8192), (2, 8192), (1, 32768))
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
TOY = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A way to run the step: ``around`` is entered for each step; ``plan`` if it is one of lowtide's."""

    name: str
    around: Callable[[], AbstractContextManager[Any]]
    plan: Any = None


def main() -> int:
    args = _arguments()
    if args.dry_run:
        shapes: Any = ((2, 64),)
    else:
        import torch

        if not torch.cuda.is_available():
            print("no CUDA device here. Use --dry-run to run the same code on CPU with a toy.", file=sys.stderr)
            return 2
        shapes = SHAPES
    deadline = time.monotonic() + args.minutes * 60
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as out:
        model = _model(dry_run=args.dry_run)
        for shape in shapes:
            for line in Case(model, shape, args, deadline).lines():
                out.write(json.dumps(line) + "\n")
                out.flush()
                print(json.dumps(line), flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on CPU, with a toy")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of every method (default 3)")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="begin no further method after this long (default 8)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def _model(*, dry_run: bool) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(**(TOY if dry_run else LLAMA_8B), use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(SEED)
    if dry_run:
        torch.set_num_threads(1)
    device = "cpu" if dry_run else "cuda"
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if dry_run else torch.bfloat16)
        try:
            model = transformers.LlamaForCausalLM(config).train()
        finally:
            torch.set_default_dtype(before)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


class Case:
    """One shape: its methods and their measurements."""

    def __init__(self, model: Any, shape: tuple[int, int], args: argparse.Namespace, deadline: float) -> None:
        import torch

        self.model, self.shape, self.args, self.deadline = model, shape, args, deadline
        self.device = next(model.parameters()).device
        generator = torch.Generator(device=self.device).manual_seed(SEED)
        ids = torch.randint(0, model.config.vocab_size, shape, device=self.device, generator=generator)
        self.batch = {"input_ids": ids, "labels": ids}
        self.tier = "disk" if args.dry_run else "host"
        self.reference: list | None = None
        self.resident_bytes = 0

    def lines(self) -> Iterator[dict]:
        """One line per method, in order of measurement."""
        from lowtide.measurement.timing import compare_times

        graph, op_costs = self._prepare()
        self.resident_bytes = graph.resident_bytes
        measured: dict[str, dict] = {}
        baselines = [
            Method("plain", nullcontext),
            Method("transformers full", partial(self._checkpointed, every_n_layers=1)),
            Method("transformers every 2nd", partial(self._checkpointed, every_n_layers=2)),
            Method("transformers offload", partial(self._checkpointed, offload=True)),
            Method("selective mm+sdpa", self._selective),
            Method("TRL OffloadActivations", self._trl),
        ]
        methods = [*baselines]
        for method in baselines:
            measured[method.name] = self._outcome(method)
        peaks = {
            f"at the peak of {name}": m["peak_bytes"]
            for name, m in measured.items()
            if m["status"] == "ok" and name != "plain"
        }
        budgets: dict[str, int | str] = {f"{f:.2f}": f"{100 * f}%" for f in FRACTIONS} | peaks
        for label, budget in budgets.items():
            alone = [("recompute", ())] if label not in peaks else []  # planning is what takes the time
            for name, offload in [*alone, ("joint", (self.tier,))]:
                method, line = self._planned(f"lowtide {name} {label}", graph, op_costs, budget, offload)
                measured[line["method"]] = line
                methods += [method] if method is not None else []
        runnable = {m.name: partial(self._step, m) for m in methods if measured[m.name]["status"] == "ok"}
        times = compare_times(runnable, rounds=self.args.rounds, device=self.device, seed=SEED) if runnable else {}
        plain_ms = times["plain"].median_ms if "plain" in times else None
        for name, line in measured.items():
            if name in times:
                line |= {"time_ms": times[name].median_ms, "time_ms_quartiles": times[name].quartiles}
                line["overhead"] = None if plain_ms is None else times[name].median_ms / plain_ms - 1
            yield self._shared() | line

    def _prepare(self) -> tuple[Any, Any]:
        import lowtide

        graph = lowtide.trace(self.model, self.batch, step=lambda model, batch: model(**batch).loss)
        return graph, lowtide.measure(graph, tiers=(self.tier,), refresh=True)

    def _planned(
        self, name: str, graph: Any, op_costs: Any, budget: int | str, offload: tuple[str, ...]
    ) -> tuple[Method | None, dict]:
        import lowtide
        from lowtide.tape.attach import applied
        from lowtide.tape.offload.open_tiers import open_tiers

        if time.monotonic() > self.deadline:
            return None, {"method": name, "status": "out of time"}
        try:
            plan = lowtide.solve(graph, op_costs, budget, offload=offload)
        except lowtide.BudgetInfeasibleError as error:
            return None, {"method": name, "status": "infeasible", "least_bytes": error.least_bytes}
        # As around a whole training: what is pinned or opened stays.
        tiers = open_tiers(plan, lowtide.Offload())
        method = Method(name, partial(applied, self.model, plan, tiers), plan)
        line = self._outcome(method) | {
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "predicted_overhead": plan.predicted_overhead,
            "counts": plan.counts,
            "solve_s": plan.solve_s,
        }
        if line["status"] == "ok":
            line["peak_error"] = plan.predicted_peak_bytes / line["peak_bytes"] - 1
        return method, line

    def _outcome(self, method: Method) -> dict:
        """Peaks, and whether loss and gradients have the bits of the first method that ran."""
        import torch

        from lowtide.measurement.allocator import peak_bytes

        print(f"{self.shape}: {method.name}", file=sys.stderr, flush=True)
        if time.monotonic() > self.deadline:
            return {"method": method.name, "status": "out of time"}
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        cuda = self.device.type == "cuda"
        losses: list[float] = []
        try:
            if cuda:
                torch.cuda.empty_cache()
            torch.manual_seed(SEED)
            activation_bytes = peak_bytes(lambda: losses.append(self._step(method)), self.device)
        except Exception as error:  # out of memory, no accelerator, a library that is not there
            oom = cuda and isinstance(error, torch.cuda.OutOfMemoryError)
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return {"method": method.name, "status": "out of memory" if oom else "not here", "reason": reason}
        found = [losses[0], *(_bits(p.grad) for p in self.model.parameters())]
        if self.reference is None:
            self.reference = found
        return {
            "method": method.name,
            "status": "ok",
            "peak_bytes": self.resident_bytes + activation_bytes,
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device) if cuda else None,
            "bitwise_equal": found == self.reference,
        }

    def _step(self, method: Method) -> float:
        with method.around():
            loss = self.model(**self.batch).loss
        loss.backward()
        return loss.item()

    @contextmanager
    def _checkpointed(self, **how: Any) -> Iterator[None]:
        self.model.activation_checkpointing_enable(**how)
        try:
            yield
        finally:
            self.model.activation_checkpointing_disable()
            self.model.disable_input_require_grads()  # its own switch leaves these hooks on

    @contextmanager
    def _selective(self) -> Iterator[None]:
        import torch
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        aten = torch.ops.aten
        kept = [
            aten.mm.default, aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
        ]  # fmt: skip
        context = partial(create_selective_checkpoint_contexts, kept)
        with self._checkpointed():
            for layer in self.model.model.layers:
                layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=context)
            yield

    @contextmanager
    def _trl(self) -> Iterator[None]:
        from trl.models.activation_offloading import OffloadActivations

        with OffloadActivations():
            yield

    def _shared(self) -> dict:
        from lowtide.device.names import device_name

        return {
            "benchmark": "gpu",
            "dry_run": self.args.dry_run,
            "batch": self.shape[0],
            "sequence": self.shape[1],
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "resident_bytes": self.resident_bytes,
            "seed": SEED,
            "rounds": self.args.rounds,
            **provenance(),
            "device": device_name(self.device),
        }


def _bits(tensor: Any) -> int:
    """A hash of the tensor's bits, since the gradients would not fit twice."""
    import torch

    whole = tensor.detach().reshape(-1).view(torch.int16)
    weights = torch.arange(1, 4097, device=tensor.device, dtype=torch.int64)
    total = 0
    for part in whole.split(1 << 24):
        padded = torch.nn.functional.pad(part, (0, -part.numel() % 4096)).view(-1, 4096)
        total += int((padded.sum(0, dtype=torch.int64) * weights).sum())
    return total


if __name__ == "__main__":
    sys.exit(main())
