"""``lowtide.checkpoint`` beside ``torch.utils.checkpoint`` on a decoder, each layer checkpointed: CPU, one thread.

    python benchmarks/checkpoint_calls.py            the decoder of ``decoder.py``; some minutes
    python benchmarks/checkpoint_calls.py --quick    a toy, to see that it runs

How it is measured: ``interleaved_methods.py``. The first step under ``lowtide.checkpoint`` proves each kind of op.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from interleaved_methods import SEED, interleaved, main

RESULTS = Path(__file__).parent / "results" / "checkpoint_calls_cpu.jsonl"


def lines(args: argparse.Namespace) -> list[dict]:
    """One line per method."""
    import torch
    import transformers
    from torch.utils.checkpoint import checkpoint

    import lowtide

    torch.set_num_threads(1)
    layers, hidden, inner, heads, tokens = (2, 64, 176, 4, 64) if args.quick else (8, 512, 1408, 8, 512)
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=heads // 2, vocab_size=512, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 512, (4, tokens))
    calls = {
        "none": None,
        "torch.utils.checkpoint": partial(checkpoint, use_reentrant=False),
        "lowtide.checkpoint": lowtide.checkpoint,
    }

    def use(call) -> None:
        for layer in model.model.layers:
            layer.gradient_checkpointing = call is not None
            layer._gradient_checkpointing_func = call

    def step(name: str) -> float:
        use(calls[name])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    step("none")
    case = f"decoder, {layers} layers of {hidden}, 4 x {tokens} tokens"
    return interleaved(args, model, calls, step, benchmark="checkpoint_calls_cpu", case=case)


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, RESULTS, lines, HF_HUB_OFFLINE="1"))
