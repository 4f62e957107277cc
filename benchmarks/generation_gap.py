"""How far apart training and generation are, of one model: log-probabilities of the same tokens, and peaks.

    cd benchmarks
    python generation_gap.py           under a minute; writes the results

Two copies of a Llama train three steps, one of them under a plan for half of its activations. Then each generates with
its KV cache. The gap is the largest difference between log-probabilities that generation gave its tokens and those
that a training forward pass gives the same tokens.
"""

from __future__ import annotations

import copy
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from provenance import HERE, provenance

import lowtide
from lowtide.measurement.allocator import peak_bytes

RESULTS = HERE / "results" / "generation_gap_cpu.jsonl"
PROMPT, NEW, STEPS = 64, 64, 3
PRECISIONS = ("float32", "bfloat16 autocast", "bfloat16")


def model() -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2, vocab_size=2048,
            num_hidden_layers=8, pad_token_id=0, eos_token_id=None, initializer_range=0.1,
        )
    )  # fmt: skip


def line(precision: str) -> dict:
    """Gaps and peaks of both copies."""

    def context() -> AbstractContextManager:
        return torch.autocast("cpu", torch.bfloat16) if "autocast" in precision else nullcontext()

    bare = model()
    if precision == "bfloat16":
        bare = bare.bfloat16()
    fitted = copy.deepcopy(bare)
    ids = torch.randint(1, 2048, (4, PROMPT + NEW))
    fit = lowtide.fit(fitted, {"input_ids": ids, "labels": ids}, budget="50%")
    found: dict[str, Any] = {"benchmark": "generation_gap", "precision": precision}
    tokens = []
    for name, m in (("plain", bare), ("planned", fitted)):
        optimizer = torch.optim.SGD(m.parameters(), lr=1e-3)

        def step(m: Any = m, optimizer: Any = optimizer) -> None:
            with context():
                m(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        m.train()
        found[f"{name}_step_peak_bytes"] = [peak_bytes(step) for _ in range(STEPS)][-1]
        m.eval()
        outs: list[Any] = []

        def generate(m: Any = m, outs: list = outs) -> None:
            with context():
                outs[:] = [m.generate(
                    ids[:, :PROMPT], attention_mask=torch.ones_like(ids[:, :PROMPT]), max_new_tokens=NEW,
                    do_sample=False, return_dict_in_generate=True, output_logits=True,
                )]  # fmt: skip

        found[f"{name}_generation_peak_bytes"] = peak_bytes(generate)
        sequences = outs[0].sequences
        said = torch.stack(outs[0].logits, 1).float().log_softmax(-1)
        m.train()
        with context():
            trained = m(input_ids=sequences).logits[:, PROMPT - 1 : -1].float().log_softmax(-1)
        picked = sequences[:, PROMPT:, None]
        found[f"{name}_gap"] = (said - trained).gather(-1, picked).abs().max().item()
        tokens.append(sequences)
    fit.remove()
    found["same_tokens"] = torch.equal(*tokens)
    return found


def main() -> int:
    torch.set_num_threads(1)
    shared = provenance()
    lines = [{**line(precision), **shared} for precision in PRECISIONS]
    for x in lines:
        print({key: x[key] for key in x if key not in shared})
    RESULTS.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
