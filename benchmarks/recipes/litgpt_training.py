"""A model of LitGPT trained in bf16, as benchmarks of lightning-thunder do without thunder: fused AdamW, random tokens.

    python litgpt_training.py MODEL ROWS TOKENS ACCUMULATE SHARDED FABRIC

FABRIC: the loss as in LitGPT's pretraining script, a function of its own, with logits that Fabric has cast to float32.
Else thunder's benchmark, which names the logits until the next step.

SHARDED: under FSDP2 that keeps parameters whole from forward to backward, over the ranks of the job. The model is
lightning-thunder's way of making one: parameters on meta, then empty on the device.
"""

import sys

import torch
import torch.distributed as dist
from litgpt.config import Config
from litgpt.model import GPT
from torch.nn import functional


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))


def forward_and_loss(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1]).float()
    return loss_of(logits, ids)


def main() -> None:
    name = sys.argv[1]
    rows, tokens, accumulate, sharded, fabric = map(int, sys.argv[2:])
    with torch.device("meta"):
        model = GPT(Config.from_name(name)).bfloat16()
    if sharded:
        from torch.distributed._composable.fsdp import fully_shard

        dist.init_process_group("nccl")
        torch.cuda.set_device(0)
        for block in model.transformer.h:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
    model.to_empty(device="cuda")
    model.max_seq_length = tokens
    model.cos, model.sin = (table.bfloat16() for table in model.rope_cache(device="cuda"))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    while True:
        for _ in range(accumulate):
            ids = torch.randint(0, 32000, (rows, tokens + 1)).cuda()
            if fabric:
                loss = forward_and_loss(model, ids)
            else:
                logits = model(ids[:, :-1])
                loss = loss_of(logits, ids)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
