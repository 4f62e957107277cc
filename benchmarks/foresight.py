"""Peaks foreseen without memory beside peaks measured on real tensors, on this CPU, plain and under plans.

    cd benchmarks
    python foresight.py             the cases that have no line yet; a quarter of an hour of one core for all
    python foresight.py --again     all of them
    python foresight.py --only t5   one architecture, printed and not written

One JSON line for each architecture, shape, precision and plan, written as it is found: a run that ends early is gone on
with by the next one. The plan is made from the hollow trace of a model on ``meta``, and carried out on a real one.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from provenance import HERE, provenance

import lowtide
from lowtide.graph.costs import Costs

RESULTS = HERE / "results" / "foresight_cpu.jsonl"
PRECISIONS = ("float32", "bfloat16 autocast", "bfloat16")
PLANS = ("none", "full", "60%", "35%")
KEYS = ("architecture", "shape", "precision", "plan")


@dataclass(frozen=True)
class Architecture:
    """What makes the model, and its batch of so many rows of such a length or side."""

    name: str
    make: Callable[[], torch.nn.Module]
    batch: Callable[[int, int], Any]
    shapes: tuple[tuple[int, int], ...]


def architectures() -> Iterator[Architecture]:
    import transformers as t

    def tokens(vocabulary: int) -> Callable[[int, int], dict[str, torch.Tensor]]:
        def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
            return {"input_ids": ids, "labels": ids}

        return batch

    def images(rows: int, side: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.zeros(rows, dtype=torch.long)}

    shapes = ((2, 64), (3, 128))
    llama = t.LlamaConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
                          num_key_value_heads=2, vocab_size=1024, use_cache=False)  # fmt: skip
    yield Architecture("llama", lambda: t.LlamaForCausalLM(llama), tokens(1024), shapes)
    eager = t.Qwen2Config(hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
                          num_key_value_heads=2, vocab_size=1024, use_cache=False,
                          attn_implementation="eager")  # fmt: skip
    yield Architecture("qwen2, eager attention", lambda: t.Qwen2ForCausalLM(eager), tokens(1024), shapes)
    gpt2 = t.GPT2Config(n_embd=128, n_layer=3, n_head=4, vocab_size=1024, use_cache=False)
    yield Architecture("gpt2", lambda: t.GPT2LMHeadModel(gpt2), tokens(1024), shapes)
    bert = t.BertConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
                        vocab_size=1024)  # fmt: skip
    yield Architecture("bert", lambda: t.BertForMaskedLM(bert), tokens(1024), shapes)
    t5 = t.T5Config(d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4, vocab_size=1024, use_cache=False,
                    decoder_start_token_id=0)  # fmt: skip
    yield Architecture("t5", lambda: t.T5ForConditionalGeneration(t5), tokens(1024), shapes)
    vit = t.ViTConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
                      image_size=64, patch_size=8, num_labels=10)  # fmt: skip
    yield Architecture("vit", lambda: t.ViTForImageClassification(vit), images, ((2, 64), (5, 64)))
    resnet = t.ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2],
                            layer_type="basic", num_labels=10)  # fmt: skip
    yield Architecture("resnet", lambda: t.ResNetForImageClassification(resnet), images, ((2, 64), (4, 96)))
    mixtral = t.MixtralConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                              num_key_value_heads=2, vocab_size=1024, num_local_experts=4, use_cache=False)  # fmt: skip
    yield Architecture("mixture of experts", lambda: t.MixtralForCausalLM(mixtral), tokens(1024), shapes)


def found(kind: Architecture, shape: tuple[int, int], precision: str, done: list[tuple]) -> Iterator[dict]:
    """The lines of one step, without those that are ``done``."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32

    def step(model: torch.nn.Module, batch: dict) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16 autocast"):
            return model(**batch).loss

    wanted = [p for p in PLANS if (kind.name, list(shape), precision, p) not in done]
    if not wanted:
        return
    batch = kind.batch(*shape)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    with torch.device("meta"):
        absent = kind.make().to(dtype).train()
    graph = lowtide.trace(absent, batch, step=step, device="cpu")
    size = [s.bytes for s in graph.storages]
    costs = Costs(tuple(0.01 + sum(size[s] for s in {*o.reads, *o.makes}) / 2e9 for o in graph.ops))
    torch.manual_seed(0)
    model = kind.make().to(dtype).train()
    for name in wanted:
        line: dict[str, Any] = dict(zip(KEYS, (kind.name, list(shape), precision, name)))
        try:
            budget = {"budget": name} if "%" in name else {"method": name}
            plan = lowtide.solve(graph, costs, **budget)
        except (lowtide.BudgetInfeasibleError, ValueError) as error:
            yield {**line, "status": str(error).splitlines()[0]}
            continue
        proof = lowtide.verify(model, batch, plan, step=step, rounds=0)
        measured = proof.plain_peak_bytes if name == "none" else proof.measured_peak_bytes
        predicted = plan.predicted_peak_bytes
        yield {
            **line,
            "status": "ok" if proof.equal else "differs",
            "predicted_peak_bytes": predicted,
            "measured_peak_bytes": measured,
            "resident_bytes": graph.resident_bytes,
            "error": round(predicted / measured - 1, 6),
            "assumed": graph.provenance.get("assumed", "").splitlines(),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="forget the lines that are there")
    parser.add_argument("--only", help="an architecture")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if args.again:
        RESULTS.unlink(missing_ok=True)
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = [] if args.only else [tuple(line[key] for key in KEYS) for line in lines]
    shared = provenance()
    cases = [
        (kind, kind.shapes[which], precision)
        for which in (0, 1)
        for kind in architectures()
        for precision in PRECISIONS
        if args.only in (None, kind.name)
    ]
    for kind, shape, precision in cases:
        for line in found(kind, shape, precision, done):
            text = json.dumps({"benchmark": "foresight_cpu", **line, **shared})
            print(text, flush=True)
            if not args.only:
                with RESULTS.open("a") as file:
                    file.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
