"""Predicted against measured plain steps on this machine: ``lowtide calibrate``, then eight small models in two dtypes.

    python benchmarks/estimate.py [--calibrate] [--only NAME]

One JSON line for each model and dtype, then one with the median and the worst error. Milliseconds are the process's own
on one thread, the median of several steps; gradients are there beforehand, as in every step but the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from provenance import HERE, provenance

import lowtide
from lowtide.estimation.calibration import calibrate
from lowtide.estimation.device_table import calibration_path
from lowtide.measurement.timing import Times, time_ms

RESULTS = HERE / "results" / "estimate_cpu.jsonl"
ROUNDS = 7


def models() -> Iterator[tuple[str, Callable[[], torch.nn.Module], Callable[[], Any]]]:
    """Name, what makes the model, what makes its batch."""
    import transformers as t

    def tokens(vocabulary: int, *shape: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, vocabulary, shape)
        return {"input_ids": ids, "labels": ids}

    llama = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
                 num_key_value_heads=2, vocab_size=4096, use_cache=False)  # fmt: skip
    yield "decoder", lambda: t.AutoModelForCausalLM.from_config(t.LlamaConfig(**llama)), lambda: tokens(4096, 2, 192)
    bert = t.BertConfig(hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536,
                        vocab_size=8192)  # fmt: skip
    yield "bert", lambda: t.AutoModelForMaskedLM.from_config(bert), lambda: tokens(8192, 4, 96)
    vit = t.ViTConfig(hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536,
                      image_size=128, num_labels=10)  # fmt: skip
    images = lambda n, side: {"pixel_values": torch.randn(n, 3, side, side), "labels": torch.zeros(n, dtype=torch.long)}  # noqa: E731
    yield "vit", lambda: t.AutoModelForImageClassification.from_config(vit), lambda: images(6, 128)
    resnet = t.ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2],
                            layer_type="basic", num_labels=10)  # fmt: skip
    yield "resnet", lambda: t.AutoModelForImageClassification.from_config(resnet), lambda: images(4, 96)
    mixtral = t.MixtralConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
                              num_key_value_heads=2, vocab_size=2048, num_local_experts=4, use_cache=False)  # fmt: skip
    yield "mixture of experts", lambda: t.AutoModelForCausalLM.from_config(mixtral), lambda: tokens(2048, 2, 128)
    t5 = t.T5Config(
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_layers=3,
        num_heads=4,
        vocab_size=4096,
        use_cache=False,
        decoder_start_token_id=0,
    )
    yield "t5", lambda: t.T5ForConditionalGeneration(t5), lambda: tokens(4096, 2, 128)
    mamba = t.MambaConfig(hidden_size=192, num_hidden_layers=3, vocab_size=2048, use_cache=False)
    yield "mamba", lambda: t.AutoModelForCausalLM.from_config(mamba), lambda: tokens(2048, 2, 48)
    layers = [part for _ in range(6) for part in (torch.nn.Linear(768, 768), torch.nn.GELU(), torch.nn.LayerNorm(768))]
    yield "mlp", lambda: torch.nn.Sequential(*layers), lambda: (torch.randn(256, 768),)


def compared(name: str, make: Callable[[], torch.nn.Module], batch_of: Callable[[], Any], dtype: torch.dtype) -> dict:
    """One line."""
    torch.manual_seed(0)
    model, batch = make().train().to(dtype), batch_of()

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    batch = {k: cast(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(map(cast, batch))

    def step() -> None:
        out = model(**batch) if isinstance(batch, dict) else model(*batch)
        (out.loss if hasattr(out, "loss") else out.float().square().mean()).backward()

    for _ in range(3):
        step()
    measured = Times.of([time_ms(step) for _ in range(ROUNDS)])
    graph = lowtide.trace(model, batch)
    costs = lowtide.estimate(graph, device="here")
    return {
        "case": name,
        "dtype": str(dtype).removeprefix("torch."),
        "ops": len(graph.ops),
        "measured_ms": round(measured.median_ms, 2),
        "quartiles_ms": [round(q, 2) for q in measured.quartiles],
        "predicted_ms": round(costs.plain_step_ms, 2),
        "error": round(costs.plain_step_ms / measured.median_ms - 1, 3),
        **provenance(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibrate", action="store_true", help="measure this machine first, even if it was")
    parser.add_argument("--only", metavar="NAME", help="this model alone; nothing is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.calibrate or not calibration_path().exists():
        calibrate()
    lines = []
    for name, make, batch_of in models():
        for dtype in (torch.float32, torch.bfloat16):
            if args.only in (None, name):
                lines.append(compared(name, make, batch_of, dtype))
                print(json.dumps(lines[-1]), flush=True)
    errors = [abs(line["error"]) for line in lines]
    total = {"case": "all", "median_error": round(statistics.median(errors), 3), "worst_error": max(errors)}
    print(json.dumps(total), file=sys.stderr)
    if args.only is None:
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**total, **provenance()}]))


if __name__ == "__main__":
    main()
