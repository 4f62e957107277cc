"""Host time of a training step where kernels take none: what PyTorch's own Python and C++ need, and what a method adds.

    .venv-cuda/bin/python benchmarks/host_time.py            CUDA's build of PyTorch on the CUDA stand-in; no GPU

The process starts itself again with the values of the stand-in off. Kernels are launched and do nothing, and proofs by
value are off (``lowtide.device.values_off``), so that no number of a step means anything but its host time, its peak
and its launches. Time is processor time of the process, backward's thread included, garbage collection off; methods
run in turns. What the driver of a GPU needs for a launch is not in it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "STANDIN_VALUES": "0",
    "STANDIN_MEMORY": "600000",  # MiB: all methods' models at once
    "LOWTIDE_WITHOUT_VALUES": "h100",
}
TESTED = {"2 x 256": (2, 256, 512, 4, 512)}
RESULTS = Path(__file__).parent / "results" / "host_time.jsonl"
# Layers, width, vocabulary, batch, tokens.
SIZES = {"16 x 2048": (16, 2048, 32000, 4, 512), "8 x 1024": (8, 1024, 8192, 4, 512)}
BUDGETS = {"lowtide, 60 %": 0.6, "lowtide, 35 %": 0.35, "lowtide, all kept": 1.0}
SPARE_BYTES = 1 << 30  # for a budget of all activations
UNPLANNED = 0.5  # of the plain step's activations
UNPLANNED_STEPS = 3
SAVED = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")


def main() -> int:
    arguments = _arguments()
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    warnings.simplefilter("ignore")
    from stand_in import is_cuda_stand_in

    if not is_cuda_stand_in():
        print("this runs on the CUDA stand-in alone: make test-cuda makes .venv-cuda, which has it.", file=sys.stderr)
        return 2
    lines = []
    for case in arguments.sizes:
        for line in HostTime(case, arguments.rounds).lines():
            lines.append(line)
            print(json.dumps(line), flush=True)
    if arguments.out is not None:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=SIZES | TESTED, default=list(SIZES), help="which models")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of every method (default 9)")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"default: {RESULTS.name} among the results")
    return parser.parse_args()


class HostTime:
    """One model, made once for each method."""

    def __init__(self, case: str, rounds: int) -> None:
        import torch

        self.case, self.rounds = case, rounds
        self.layers, self.width, self.vocabulary, self.batch, self.tokens = (SIZES | TESTED)[case]
        ids = torch.zeros(self.batch, self.tokens, dtype=torch.long, device="cuda")
        positions = torch.arange(self.tokens, device="cuda").unsqueeze(0)  # else transformers looks at their values
        self.inputs = {"input_ids": ids, "labels": ids, "position_ids": positions}
        self.models: dict[str, Any] = {}
        self.fits: dict[str, Any] = {}

    def lines(self) -> list[dict]:
        """One for each method."""
        import torch

        plain = self.models["plain"] = self._model()
        self.models["checkpoint, every layer"] = self._checkpointed()
        self.models["torch SAC, products kept"] = self._selective()
        self.models |= {name: self._model() for name in BUDGETS}  # all before a budget, which is for all that is there
        self.online = self._model()
        for model in self.models.values():
            self._step(model)
        ops = self._ops_of(plain)
        base = torch.cuda.memory_allocated()
        activations = self._peak(plain) - base
        for name, share in BUDGETS.items():
            self._fit(name, share, activations)
        found = {name: self._facts(name, model) for name, model in self.models.items()}
        took = self._timed(activations)
        median = {name: statistics.median(samples) for name, samples in took.items()}
        for name, samples in took.items():
            line = found.setdefault(name, {})
            line |= {"host_ms": median[name], "host_ms_quartiles": statistics.quantiles(samples, n=4)[::2]}
            line["more_us_per_op"] = 1e3 * (median[name] - median["plain"]) / ops
        return [self._shared(ops) | {"method": name} | found[name] for name in took]

    # -- methods ------------------------------------------------------------------------------------------------

    def _model(self) -> Any:
        import torch
        import transformers

        config = transformers.LlamaConfig(
            hidden_size=self.width, num_hidden_layers=self.layers, num_attention_heads=self.width // 64,
            num_key_value_heads=max(1, self.width // 256), intermediate_size=self.width * 11 // 4,
            vocab_size=self.vocabulary, max_position_embeddings=8192, use_cache=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        model = model.to_empty(device="cuda")
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        return model

    def _checkpointed(self) -> Any:
        model = self._model()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def _selective(self) -> Any:
        import torch
        from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

        kept = {getattr(torch.ops.aten, name).default for name in SAVED}

        def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        model = self._model()
        for layer in model.model.layers:
            forward = layer.forward
            layer.forward = functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
        return model

    def _fit(self, name: str, share: float, activations: int) -> None:
        """A plan for ``share`` of the plain step's activations, made of a batch."""
        import torch

        import lowtide

        gc.collect()
        budget = torch.cuda.memory_allocated() + int(share * activations) + (share == 1.0) * SPARE_BYTES
        no_host = lowtide.Offload(host_budget=None)
        self.fits[name] = lowtide.fit(self.models[name], self.inputs, budget=budget, time_limit_s=20, offload=no_host)

    # -- what is measured -----------------------------------------------------------------------------------------

    def _step(self, model: Any) -> None:
        model(**self.inputs).loss.backward()

    def _ops_of(self, model: Any) -> int:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Counting(TorchDispatchMode):
            ops = 0

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.ops += 1
                return func(*args, **(kwargs or {}))

        with Counting() as counting:
            self._step(model)
        return counting.ops

    def _peak(self, model: Any) -> int:
        import torch

        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        self._step(model)
        return torch.cuda.max_memory_allocated()

    def _facts(self, name: str, model: Any) -> dict:
        """Activations at the peak, launches and waits of a warm step; and what a plan says of it."""
        import torch
        from stand_in import counted

        for _ in range(3):  # a plan's ops are proven at their birth
            self._step(model)
        before = torch.cuda.memory_allocated()
        peak = self._peak(model)
        start = counted()
        self._step(model)
        end = counted()
        facts = {
            "activation_bytes": peak - before,
            "launches": end.launches - start.launches,
            "waits": end.waits - start.waits,
        }
        if (fit := self.fits.get(name)) is not None:
            status = fit.status()
            facts |= {
                "counts": fit.plan.counts,
                "in_force": status.in_force,
                "predicted": fit.plan.predicted_peak_bytes,
            }
            if not status.in_force:
                raise SystemExit(f"{name}: {status}")
        return facts

    def _timed(self, activations: int) -> dict[str, list[float]]:
        """Milliseconds of each method, in turns."""
        took: dict[str, list[float]] = {name: [] for name in self.models}
        gc.collect()
        gc.freeze()
        gc.disable()
        for _ in range(self.rounds):
            for name, model in self.models.items():
                took[name].append(_process_ms(functools.partial(self._step, model)))
            for number, ms in enumerate(self._unplanned_ms(activations), 1):
                took.setdefault(f"lowtide, unplanned step {number}", []).append(ms)
            gc.collect()
        gc.enable()
        return took

    def _unplanned_ms(self, activations: int) -> list[float]:
        """Of the first steps of a fit without a batch, while its plan is being made."""
        import torch

        import lowtide

        budget = torch.cuda.memory_allocated() + int(UNPLANNED * activations)
        with lowtide.fit(self.online, budget=budget, offload=lowtide.Offload(host_budget=None)) as fit:
            fit._lifecycle.plans_by_shape.plan_for = lambda shape: None  # however soon it is made
            taken = [_process_ms(functools.partial(self._step, self.online)) for _ in range(UNPLANNED_STEPS)]
            status = fit.status()
        if status.planned_steps:
            raise SystemExit(f"a step that was to be unplanned ran under a plan: {status}")
        return taken

    def _shared(self, ops: int) -> dict:
        from provenance import provenance

        return {
            "benchmark": "host_time", "case": self.case, "layers": self.layers, "width": self.width,
            "vocabulary": self.vocabulary, "batch": self.batch, "sequence": self.tokens, "dtype": "bfloat16",
            "plain_ops": ops, "standin": True, "rounds": self.rounds, **provenance(),
        }  # fmt: skip


def _process_ms(step: Callable[[], None]) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.process_time()
    step()
    torch.cuda.synchronize()
    return (time.process_time() - start) * 1e3


if __name__ == "__main__":
    sys.exit(main())
