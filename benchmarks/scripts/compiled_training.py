"""A training loop of Llama 8B, compiled layer by layer and sharded by FSDP2, as torchtitan has it.

python compiled_training.py METHOD [--budget BYTES --plan FILE]     (benchmarks/compiled_full_size.py runs it)
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path

import torch
import transformers
from torch._functorch import config as functorch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

METHODS = ("compile alone", "full checkpointing", "selective", "memory budget 0.7", "memory budget 0.5",
           "memory budget 0.3", "lowtide")  # fmt: skip
aten = torch.ops.aten
KEPT = [aten.mm.default, aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default]  # fmt: skip


def wrapped(function, method):
    """A layer's forward as PyTorch's option has it."""
    again = partial(checkpoint, function, use_reentrant=False)
    if method == "full checkpointing":
        return again
    if method == "selective":
        return partial(again, context_fn=partial(create_selective_checkpoint_contexts, KEPT))
    return function


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--plan", type=Path)
    given = parser.parse_args()
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
            intermediate_size=14336, vocab_size=128256, use_cache=False,
        ))  # fmt: skip
    if given.method != "lowtide":
        for layer in model.model.layers:
            layer.forward = torch.compile(wrapped(layer.forward, given.method), fullgraph=True, dynamic=False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = None
    if given.method == "lowtide":
        import lowtide

        compiled = lowtide.compile(model, budget=given.budget, optimizer=optimizer)
    _, _, share = given.method.partition("memory budget ")
    while True:
        ids = torch.randint(0, 1000, (1, 8192), device="cuda")
        with functorch.patch(activation_memory_budget=float(share or 1)):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if compiled is not None and compiled.status().in_force:
            plan = compiled.plan
            given.plan.write_text(json.dumps({
                "predicted_peak_bytes": plan.predicted_peak_bytes, "predicted_overhead": plan.predicted_overhead,
                "planning_s": compiled.status().planning_s, "variants": {v.name: v.layers for v in plan.variants},
            }))  # fmt: skip


if __name__ == "__main__":
    main()
