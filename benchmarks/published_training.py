"""Published trainings as scripts that ``lowtide pretend`` runs: ``pretend_time.py`` starts them.

    torchrun --nproc-per-node 8 published_training.py --model mpt-7b --rows 6 --tokens 2048 --wrap fsdp1

Models are those of ``published_recipes.py``. The loop has no end: whoever starts it ends it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from published_models import Decoder, LearnedPositions, Shape, whole_block
from published_recipes import _MPT, _MPT_VOCABULARY, SHAPES
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

LARGER_MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # width, heads, layers
LARGER_LLAMA = {"llama-34b": Shape(32000, 48, 8192, 64, 8, 22016)}
_SAVED = (torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default,
          torch.ops.aten._scaled_dot_product_efficient_attention.default)  # fmt: skip


def model_of(args: argparse.Namespace) -> tuple[nn.Module, int]:
    """The model and its vocabulary."""
    kind, _, size = args.model.partition("-")
    if kind == "bert":
        return bert(args), 30522
    if kind == "mpt":
        width, heads, layers = (_MPT | LARGER_MPT)[size]
        model = LearnedPositions(width, heads, layers, args.tokens, _MPT_VOCABULARY, args.recompute == "whole")
        return model, _MPT_VOCABULARY
    shape = (SHAPES | LARGER_LLAMA)[args.model]
    model = Decoder(shape, args.tokens)
    how = {"whole": whole_block, "op": _but_products_and_attention}.get(args.recompute)
    for block in model.blocks if how else ():
        block.forward = how(block.forward)  # below what compiles the block
    return model, shape.vocabulary


def bert(args: argparse.Namespace) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        num_labels=2, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    if args.recompute == "whole":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})  # as it was then
    return model


def _but_products_and_attention(block: Callable[..., Any]) -> Callable[..., Any]:
    """torchtitan's selective checkpointing: attention and every second matrix product are kept."""
    seen: dict[bool, int] = {}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.mm.default:
            seen[context.is_recompute] = seen.get(context.is_recompute, 0) + 1
            keep = seen[context.is_recompute] % 2 == 1
        else:
            keep = op in _SAVED
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run(*args: Any) -> Any:
        seen.clear()
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)

    return run


def wrapped(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """On the device, in parts where there are ranks."""
    blocks = [m for m in model.modules() if isinstance(m, nn.ModuleList)][:1]
    if args.compile:
        for block in blocks[0]:
            block.compile()
    if args.wrap == "none":
        return model.to_empty(device="cuda")
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    reduced = torch.float32 if args.reduce_float32 else torch.bfloat16
    if args.wrap.startswith("fsdp2"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(torch.bfloat16, reduced) if args.dtype == "mixed" else MixedPrecisionPolicy()
        for part in (*blocks[0], model):
            fully_shard(part, mp_policy=policy, reshard_after_forward=args.wrap != "fsdp2-keep")
        return model.to_empty(device="cuda")
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    strategy, more = ShardingStrategy.FULL_SHARD, {}
    if args.wrap == "fsdp1-hybrid":
        strategy = ShardingStrategy.HYBRID_SHARD
        more = {"device_mesh": dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size() // 8, 8))}
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({type(blocks[0][0])}),
        mixed_precision=MixedPrecision(torch.bfloat16, reduced, torch.bfloat16), sharding_strategy=strategy,
        limit_all_gathers=True, use_orig_params=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE, device_id=0,
        param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False), **more,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    for name in ("rows", "tokens", "accumulate"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--wrap", default="none", choices=("none", "fsdp1", "fsdp1-hybrid", "fsdp2", "fsdp2-keep"))
    parser.add_argument("--dtype", default="mixed", choices=("mixed", "bf16", "fp32", "fp16-amp"))
    parser.add_argument("--recompute", default="none", choices=("none", "whole", "op"))
    parser.add_argument("--optimizer", default="foreach", choices=("loop", "foreach", "fused"))
    for name in ("compile", "compile-loss", "reduce-float32", "loss-float32", "clip", "loss-read"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()

    with torch.device("meta"):
        model, vocabulary = model_of(args)
    if args.dtype == "bf16":
        model = model.bfloat16()
    model = wrapped(model, args).train()
    how = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[args.optimizer]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **how)
    loss_from = torch.compile(_cross_entropy) if args.compile_loss else _cross_entropy
    scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "fp16-amp")
    while True:
        for _ in range(args.accumulate):
            ids = torch.randint(0, vocabulary, (args.rows, args.tokens)).cuda()
            with torch.autocast("cuda", torch.float16, enabled=args.dtype == "fp16-amp"):
                loss = loss_of(model, ids, args, loss_from) / args.accumulate
            scaler.scale(loss).backward()
        if args.clip:
            scaler.unscale_(optimizer)
            clip = getattr(model, "clip_grad_norm_", None)
            clip(1.0) if clip else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if args.loss_read:
            loss.item()


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor, in_float32: bool) -> torch.Tensor:
    logits = logits.flatten(0, 1)
    return functional.cross_entropy(logits.float() if in_float32 else logits, targets.flatten())


def loss_of(
    model: nn.Module, ids: torch.Tensor, args: argparse.Namespace, loss_from: Callable[..., torch.Tensor]
) -> torch.Tensor:
    if args.model == "bert-large":
        labels = torch.randint(0, 2, ids.shape[:1]).cuda()
        loss: torch.Tensor = model(input_ids=ids, labels=labels).loss
        return loss
    return loss_from(model(ids), ids, args.loss_float32)


if __name__ == "__main__":
    main()
