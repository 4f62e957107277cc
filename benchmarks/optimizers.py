"""Optimizer states, foreseen before the first step, beside what one real step leaves and what the allocator counts.

    python optimizers.py           on the device that is here: a CPU, or CUDA's stand-in

Needs torchao, bitsandbytes, galore-torch, apollo-torch, lion-pytorch and lomo-optim; what is missing is named. Lines of
the other device stay. On the stand-in what a library runs on the device itself fails (cuSOLVER for GaLore), and steps
that torchao compiles run uncompiled: no benchmark of kernels would end there.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from transformers import LlamaConfig, LlamaForCausalLM

from lowtide.measurement.allocator import measuring, peak_bytes
from lowtide.step.optimizer_state import UnknownStateError, existing_state_bytes, optimizer_bytes

RESULTS = Path(__file__).parent / "results" / "optimizers.jsonl"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKAGES = ("torchao", "bitsandbytes", "galore-torch", "apollo-torch", "lion-pytorch", "lomo-optim")
CONFIG = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
GALORE = {"rank": 32, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
APOLLO = {**GALORE, "proj": "random", "scale_type": "channel", "scale": 1}
MINI = {**APOLLO, "rank": 1, "scale_type": "tensor", "scale": 128}
Make = Callable[[torch.nn.Module], Any]


def of(module: str, name: str, **settings: Any) -> Make:
    return lambda model: getattr(importlib.import_module(module), name)(model.parameters(), **settings)


def projected(module: str, name: str, of_group: dict[str, Any]) -> Make:
    """The matrices of the layers in a group with ``of_group``, as the library's page has it."""

    def make(model: torch.nn.Module) -> Any:
        low = [p for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n]
        rest = [p for n, p in model.named_parameters() if p.dim() != 2 or ".layers." not in n]
        groups = [{"params": rest}, {"params": low, **of_group}]
        return getattr(importlib.import_module(module), name)(groups)

    return make


def _muon(model: torch.nn.Module) -> Any:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])


def _lomo(model: torch.nn.Module) -> Any:
    return importlib.import_module("lomo_optim").Lomo(model, lr=1e-3)


OPTIMIZERS: dict[str, Make] = {
    "SGD": of("torch.optim", "SGD"),
    "SGD, momentum": of("torch.optim", "SGD", momentum=0.9),
    "Adam": of("torch.optim", "Adam"),
    "AdamW": of("torch.optim", "AdamW"),
    "AdamW, for-loop": of("torch.optim", "AdamW", foreach=False),
    "AdamW, foreach": of("torch.optim", "AdamW", foreach=True),
    "AdamW, fused": of("torch.optim", "AdamW", fused=True),
    "AdamW, capturable": of("torch.optim", "AdamW", capturable=True),
    "AdamW, amsgrad": of("torch.optim", "AdamW", amsgrad=True),
    "RMSprop, momentum": of("torch.optim", "RMSprop", momentum=0.9),
    "Adagrad": of("torch.optim", "Adagrad"),
    "Adafactor": of("torch.optim", "Adafactor"),
    "Adafactor (transformers)": of("transformers", "Adafactor"),
    "Muon": _muon,
    "Lion (lion-pytorch)": of("lion_pytorch", "Lion"),
    "AdamW8bit (torchao)": of("torchao.optim", "AdamW8bit"),
    "AdamW4bit (torchao)": of("torchao.optim", "AdamW4bit"),
    "AdamWFp8 (torchao)": of("torchao.optim", "AdamWFp8"),
    "AdamW8bit (bitsandbytes)": of("bitsandbytes.optim", "AdamW8bit"),
    "PagedAdamW8bit (bitsandbytes)": of("bitsandbytes.optim", "PagedAdamW8bit"),
    "PagedAdamW32bit (bitsandbytes)": of("bitsandbytes.optim", "PagedAdamW32bit"),
    "Lion8bit (bitsandbytes)": of("bitsandbytes.optim", "Lion8bit"),
    "GaLoreAdamW (galore-torch)": projected("galore_torch", "GaLoreAdamW", GALORE),
    "GaLoreAdafactor (galore-torch)": projected("galore_torch", "GaLoreAdafactor", GALORE),
    "APOLLO (apollo-torch)": projected("apollo_torch", "APOLLOAdamW", APOLLO),
    "APOLLO-Mini (apollo-torch)": projected("apollo_torch", "APOLLOAdamW", MINI),
    "LOMO (lomo-optim)": _lomo,
}


def compare(make: Make) -> dict[str, Any]:
    """Bytes foreseen, bytes that lowtide counts after one step, bytes that the allocator counts."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(DEVICE)
    gc.collect()
    before = allocated()
    optimizer = make(model)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    made_at_once = allocated() - before if DEVICE == "cuda" else existing_state_bytes(optimizer)
    for p in parameters:
        p.grad = torch.randn_like(p)
    try:
        state, step = optimizer_bytes(optimizer, parameters)
    except UnknownStateError as error:
        return {"error": str(error)}
    gc.collect()
    if DEVICE == "cuda":
        before = allocated()
        optimizer.step()
        gc.collect()
        counted = allocated() - before + made_at_once
    else:
        with measuring("cpu") as counter:
            optimizer.step()
            gc.collect()
        assert counter is not None
        counted = counter.left + made_at_once
    kept = existing_state_bytes(optimizer)
    return {
        "foreseen_bytes": state,
        "after_one_step_bytes": kept,
        "counted_bytes": counted,
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "foreseen_step_bytes": step,
        "counted_step_bytes": peak_bytes(optimizer.step, DEVICE),
    }


def allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def lines() -> Iterator[dict[str, Any]]:
    for name, make in OPTIMIZERS.items():
        try:
            found = compare(make)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(name, found, flush=True)
        yield {"benchmark": "optimizers", "on": DEVICE, "optimizer": name, **found}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.compiler.set_stance("force_eager")
        # What cuBLAS keeps is taken before anything is counted.
        torch.mm(torch.ones(8, 8, device=DEVICE), torch.ones(8, 8, device=DEVICE))
    shared = provenance() | {"packages": {name: found for name in PACKAGES if (found := version(name))}}
    before = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    other = [line for line in before if line["on"] != DEVICE]
    found = other + [line | shared for line in lines()]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in sorted(found, key=lambda line: line["on"])))


if __name__ == "__main__":
    main()
