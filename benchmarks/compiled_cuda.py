"""A compiled decoder on PyTorch's CUDA build, by PyTorch's options and by lowtide: counted peaks and launches.

    .venv-cuda/bin/python benchmarks/compiled_cuda.py              all cases; half an hour
    .venv-cuda/bin/python benchmarks/compiled_cuda.py --quick      a toy, to see that it runs
    .venv-cuda/bin/python benchmarks/compiled_cuda.py --case bf16 layers

Eight layers of 1024, 4 x 512 tokens, in bfloat16 and under autocast, compiled layer by layer and as one graph. It runs
on the stand-in for a GPU, or on a GPU. On a stand-in kernels do nothing and tensors hold no values: peaks are those of
PyTorch's own caching allocator, launches are counted, and there are no times. So that a plan has something to choose
by, kernels there have the times of an H100 of lowtide's table, by the shapes in their code. No variant is proven:
``tests/cuda/test_compiled.py`` compares bits on smaller models. lowtide gets the peaks of PyTorch's options as budgets.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from compiled import _checkpoint
from provenance import provenance
from stand_in import counted, is_cuda_stand_in

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "compiled_cuda.jsonl"
CASES = [(dtype, how) for dtype in ("bf16", "autocast") for how in ("layers", "whole")]
MEMORY_BUDGETS = (0.7, 0.5, 0.3, 0.1)
AT_PEAK_OF = ("selective", "memory budget 0.5", "memory budget 0.1", "full checkpointing")
PLAIN = "compile alone"
PRICED_AS = "h100"
SETTINGS = {
    "STANDIN_VALUES": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="two layers of 64, one method of each side")
    parser.add_argument("--case", nargs=2, metavar=("DTYPE", "HOW"), help="one case, in this process, lines to stdout")
    args = parser.parse_args()
    if args.case:
        for line in Case(*args.case, quick=args.quick).lines():
            print(json.dumps(line), flush=True)
        return 0
    found = b""
    for dtype, how in CASES[:1] if args.quick else CASES:
        command = [sys.executable, __file__, *(["--quick"] if args.quick else []), "--case", dtype, how]
        with tempfile.TemporaryDirectory() as empty:
            environment = {**os.environ, **SETTINGS, "LOWTIDE_CACHE_DIR": empty}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            return done.returncode
        found += done.stdout
    args.out.write_bytes(found)
    print(f"wrote {args.out}", file=sys.stderr)
    return 0


class Case:
    """One way to compile, in one precision."""

    def __init__(self, dtype: str, how: str, *, quick: bool) -> None:
        import torch

        self.dtype, self.how, self.quick = dtype, how, quick
        self.layers, self.width, self.tokens, self.words = (2, 64, 64, 512) if quick else (8, 1024, 512, 8192)
        self.ids = torch.randint(0, self.words, (4, self.tokens), device="cuda")
        x = torch.ones(8, 8, device="cuda", requires_grad=True)
        (x @ x).sum().backward()  # cuBLAS takes workspaces at first, which are no part of a step
        if is_cuda_stand_in():
            _price_by_table()

    def lines(self) -> Iterator[dict]:
        facts = {
            "benchmark": "compiled_cuda",
            "case": f"decoder, {self.layers} layers of {self.width}, 4 x {self.tokens} tokens", "dtype": self.dtype,
            "how": self.how, "stand_in": is_cuda_stand_in(),
        }  # fmt: skip
        peaks: dict[str, int] = {}
        for line in self._found(peaks):
            peaks[line["method"]] = line["activation_bytes"]
            yield facts | line | {"fraction": line["activation_bytes"] / peaks[PLAIN]} | provenance()

    def _found(self, peaks: dict[str, int]) -> Iterator[dict]:
        """PyTorch's options, and lowtide at the ``peaks`` that they had."""
        for name, way in self._ways().items():
            yield self._pytorchs(name, *way)
        yield from self._lowtides({f"lowtide, peak of {n}": peaks[n] for n in AT_PEAK_OF if n in peaks})

    def _ways(self) -> dict[str, tuple[Callable | None, float]]:
        """PyTorch's options: how each layer's call is wrapped, and the compiler's budget."""
        ways: dict[str, tuple[Callable | None, float]] = {PLAIN: (None, 1.0), "full checkpointing": (_checkpoint, 1.0)}
        if self.quick:
            return ways
        ways["selective"] = (_selectively, 1.0)
        return ways | {f"memory budget {budget}": (None, budget) for budget in MEMORY_BUDGETS}

    def _pytorchs(self, name: str, wrap: Callable | None, budget: float) -> dict:
        import torch
        from torch._functorch import config

        print(self.dtype, self.how, name, file=sys.stderr, flush=True)
        torch._dynamo.reset()
        model = self._model()
        run = model
        for layer in model.model.layers:
            if wrap is not None:
                layer.forward = partial(wrap, layer.forward)
            if self.how == "layers":
                layer.compile(fullgraph=True, dynamic=False)
        if self.how == "whole":
            run = torch.compile(model, dynamic=False)
        with config.patch(activation_memory_budget=budget):
            self._step(run)
        return {"method": name, **self._counted(run)}

    def _lowtides(self, budgets: dict[str, int]) -> Iterator[dict]:
        import torch

        import lowtide

        torch._dynamo.reset()
        model = self._model()
        compiled = lowtide.compile(model, budget=None, layers=["*"] if self.how == "whole" else None)
        self._step(compiled)
        resident = compiled.plan.resident_bytes
        for name, activations in budgets.items():
            print(self.dtype, self.how, name, file=sys.stderr, flush=True)
            line = {"method": name, "budget_bytes": activations}
            try:
                compiled.set_budget(activations + resident)
            except lowtide.BudgetInfeasibleError as error:
                yield line | {"status": "infeasible", "activation_bytes": error.least_bytes - resident}
                continue
            plan = compiled.plan
            line |= {
                "predicted_activation_bytes": plan.predicted_peak_bytes - resident,
                "variants": {v.name: v.layers for v in plan.variants},
            }
            yield line | self._counted(compiled)

    def _model(self):
        import torch
        import transformers

        gc.collect()
        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=self.words, hidden_size=self.width, intermediate_size=self.width * 11 // 4 // 64 * 64,
            num_hidden_layers=self.layers, num_attention_heads=max(1, self.width // 64), use_cache=False,
            num_key_value_heads=max(1, self.width // 64), max_position_embeddings=4096,
        )  # fmt: skip
        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float32
        model = transformers.LlamaForCausalLM(config).to("cuda", dtype).train()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return model

    def _step(self, run) -> None:
        import torch

        with torch.autocast("cuda", torch.bfloat16, enabled=self.dtype == "autocast"):
            loss = run(input_ids=self.ids, labels=self.ids).loss
        loss.backward()

    def _counted(self, run) -> dict:
        """Peak beyond what lives before a step, and launches, of a step after another."""
        import torch

        self._step(run)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, launches = torch.cuda.memory_allocated(), counted().launches if is_cuda_stand_in() else 0
        self._step(run)
        found = {"status": "ok", "activation_bytes": torch.cuda.max_memory_allocated() - before}
        return found | ({"launches": counted().launches - launches} if is_cuda_stand_in() else {})


def _selectively(function, *args, **kwargs):
    import torch
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten.bmm.default]
    kept += [aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default]
    kept += [aten._scaled_dot_product_cudnn_attention.default]
    return _checkpoint(function, *args, context_fn=partial(create_selective_checkpoint_contexts, kept), **kwargs)


def _price_by_table() -> None:
    """Kernels of a stand-in take no time, and have no values to compare."""
    from cuda_standin import compiled_values
    from lowtide.compiled import proof
    from lowtide.device import values_off

    values_off.times_of = PRICED_AS
    proof.same_bits = lambda one, other: one.shape == other.shape
    compiled_values.measure_nothing()


if __name__ == "__main__":
    sys.exit(main())
