"""Loops as people write them on a GPU, with lowtide and without: one JSON line per method.

    python benchmarks/gpu_loops.py                  on the GPU of this machine; six minutes
    python benchmarks/gpu_loops.py --part compiled
    python benchmarks/gpu_loops.py --tiny           a toy, to see that it runs; on the CUDA stand-in too

``fit``: GPT-2 medium under autocast, two micro-batches a step, clipping, AdamW. ``fit, deterministic``: half of its
layers with PyTorch's deterministic kernels, without which plain training does not repeat its own bits. ``compiled``:
eight Llama layers in bfloat16 compiled layer by layer, PyTorch's options and ``lowtide.compile`` at their peaks, with
deterministic kernels. Times are of the device, by events: medians of the second half of the steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from provenance import provenance

RESULTS = Path(__file__).parent / "results" / "gpu_loops.jsonl"
PLAIN = "plain"
PARTS = ("fit", "fit, deterministic", "compiled")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, else its products are not
    import torch
    import transformers
    from stand_in import is_cuda_stand_in

    transformers.logging.set_verbosity_error()
    out = args.out or (None if args.tiny or is_cuda_stand_in() else RESULTS)
    facts = {"benchmark": "gpu_loops", "stand_in": is_cuda_stand_in(), "gpu": torch.cuda.get_device_name()}
    lines = []
    for part in args.part or PARTS:
        torch.use_deterministic_algorithms(part != "fit")
        torch.utils.deterministic.fill_uninitialized_memory = False  # it would write what no method writes
        for line in compiled(args.tiny) if part == "compiled" else fitted(args.tiny, whole=part == "fit"):
            lines.append(facts | {"part": part} | line | provenance())
            print(json.dumps(lines[-1]), flush=True)
    if out is not None:
        before = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        run = {line["part"] for line in lines}
        kept = [line for line in before if line["part"] not in run]  # of another run, which each line says
        out.write_text("".join(json.dumps(line) + "\n" for line in sorted(lines + kept, key=_place)))
    return 0


def _place(line: dict) -> int:
    return PARTS.index(line["part"])


# ---- fit


def fitted(tiny: bool, *, whole: bool) -> Iterator[dict]:
    """GPT-2 medium; not ``whole``: half of it, and twice plain."""
    layers, width, words, rows, tokens = (2, 128, 512, 2, 64) if tiny else (24 if whole else 12, 1024, 50257, 8, 1024)
    steps = 12 if whole else 9
    case = f"gpt2, {layers} layers of {width}, 2 x {rows} x {tokens} tokens, bfloat16 autocast"
    reference: tuple[list[float], list[int]] | None = None
    methods: list[tuple[str, str | None]] = [(PLAIN, None), ("plain, again", None), ("torch checkpoint", None)]
    methods += [("lowtide.fit, 60 %", "60%"), ("lowtide.fit, 60 %, without host memory", "60%")]
    methods += [("lowtide.fit, 80 %", "80%")] if whole else []
    for name, budget in methods:
        line, losses, bits = _trained(name, budget, (layers, width, words, rows, tokens), steps)
        reference = reference or (losses, bits)
        line |= {"losses_equal": losses == reference[0], "weights_equal": bits == reference[1]}
        yield {"case": case, "method": name} | line


def _trained(
    name: str, budget: str | None, sizes: tuple[int, int, int, int, int], steps: int
) -> tuple[dict, list[float], list[int]]:
    import torch
    import transformers

    import lowtide

    layers, width, words, rows, tokens = sizes
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = transformers.GPT2Config(
            vocab_size=words, n_embd=width, n_layer=layers, n_head=width // 64, use_cache=False
        )
        model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if name == "torch checkpoint":
        model.gradient_checkpointing_enable()
    offload = lowtide.Offload(host_budget=None) if name.endswith("without host memory") else None
    fit = None if budget is None else lowtide.fit(model, budget=budget, optimizer=optimizer, offload=offload)
    ids_of = partial(torch.randint, 0, words, (rows, tokens), device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    ms, host_ms, peaks, losses = [], [], [], []
    for step in range(steps):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        began, total = time.perf_counter(), torch.zeros((), device="cuda")
        for _ in range(2):
            ids = ids_of(generator=generator)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss / 2
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end.record()
        host_ms.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
        ms.append(begin.elapsed_time(end))
        peaks.append(torch.cuda.max_memory_allocated())
        losses.append(total.item())
        if fit is not None and step in (2, 3, 4):
            fit.wait()  # so short a run would end before the plan is there
    half = slice(steps // 2 + 1, None)
    line = {"step_ms": statistics.median(ms[half]), "host_ms": statistics.median(host_ms[half]),
            "first_step_ms": ms[0], "peak_bytes": max(peaks[half]), "highest_peak_bytes": max(peaks)}  # fmt: skip
    if fit is not None:
        status = fit.status()
        line |= {"without_a_plan_ms": statistics.median(ms[1:4]), "budget_bytes": status.budget_bytes,
                 "planned_steps": status.planned_steps, "predicted_peak_bytes": fit.plan.measurable_peak_bytes,
                 "predicted_overhead": fit.plan.predicted_overhead, "counts": fit.plan.counts,
                 "reasons": list(status.reasons)}  # fmt: skip
        fit.remove()
    return line, losses, [_bits(p) for p in model.parameters()]


def _bits(tensor: Any) -> int:
    import torch

    words = tensor.detach().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    return int(words.sum(dtype=torch.int64))


# ---- compiled layers


def compiled(tiny: bool) -> Iterator[dict]:
    import torch
    from torch._functorch import config

    import lowtide

    layers, width, words, tokens = (2, 64, 512, 64) if tiny else (8, 2048, 32000, 2048)
    ids = torch.randint(0, words, (4, tokens), device="cuda")
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    (x @ x).sum().backward()  # cuBLAS takes workspaces at first, which are no part of a step
    case = f"llama, {layers} layers of {width}, 4 x {tokens} tokens, bfloat16"
    peaks: dict[str, int] = {}
    reference: list[int] = []
    ways = {"compile alone": (None, 1.0), "compile alone, again": (None, 1.0), "full checkpointing": (_checkpoint, 1.0),
            "memory budget 0.5": (None, 0.5)}  # fmt: skip
    for name, (wrap, memory_budget) in ways.items():
        torch._dynamo.reset()
        model = _llama(layers, width, words)
        for layer in model.model.layers:
            if wrap is not None:
                layer.forward = partial(wrap, layer.forward)
            layer.compile(fullgraph=True, dynamic=False)
        with config.patch(activation_memory_budget=memory_budget):
            line, bits = _measured(model, model, ids)
        reference, peaks[name] = reference or bits, line["activation_bytes"]
        yield {"case": case, "method": name} | line | {"bits_equal": bits == reference}
    torch._dynamo.reset()
    model = _llama(layers, width, words)
    run = lowtide.compile(model, budget=None)
    _step(run, ids)
    resident = run.plan.resident_bytes
    for name, other in (("compile alone", PLAIN), ("memory budget 0.5",) * 2, ("full checkpointing",) * 2):
        began = time.monotonic()
        run.set_budget(peaks[name] + resident)
        plan, planning_s = run.plan, time.monotonic() - began
        line, bits = _measured(model, run, ids)
        line |= {"predicted_activation_bytes": plan.predicted_peak_bytes - resident, "planning_s": planning_s,
                 "predicted_overhead": plan.predicted_overhead, "bits_equal": bits == reference}  # fmt: skip
        yield {"case": case, "method": f"lowtide, peak of {other}"} | line


def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def _llama(layers: int, width: int, words: int) -> Any:
    import torch
    import transformers

    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=width * 11 // 4 // 64 * 64, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def _step(run: Any, ids: Any) -> Any:
    loss = run(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


def _measured(model: Any, run: Any, ids: Any) -> tuple[dict, list[int]]:
    """Peak beyond what lives before a step, median time of seven, and the bits of loss and gradients of another."""
    import torch

    for _ in range(2):
        _step(run, ids)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _step(run, ids)
    torch.cuda.synchronize()
    peak, ms = torch.cuda.max_memory_allocated() - before, []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        _step(run, ids)
        end.record()
        torch.cuda.synchronize()
        ms.append(begin.elapsed_time(end))
    for parameter in model.parameters():
        parameter.grad.zero_()
    loss = _step(run, ids)
    bits = [_bits(loss), *(_bits(p.grad) for p in model.parameters())]
    return {"activation_bytes": peak, "step_ms": statistics.median(ms)}, bits


if __name__ == "__main__":
    sys.exit(main())
