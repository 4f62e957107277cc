"""What each published measurement trained: model, batch, loss and the rest of the recipe, by the name in its row.

Each function returns a ``Recipe``, whose model is built and traced without memory, as ``lowtide plan`` builds its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from published_models import (
    Decoder,
    InFloat32,
    LearnedPositions,
    Shape,
    Tuning,
    VisionMixer,
    VisionTransformer,
    whole_block,
)  # fmt: skip
from torch import nn
from torch.nn import functional

Step = Callable[[nn.Module, Any], torch.Tensor]
BF16 = torch.bfloat16

SHAPES = {
    "phi-1.5": Shape(51200, 24, 2048, 32, 32, 8192, rotary=0.5, parallel=True, shared_norm=True, gated=False, rms=False,
                     bias=True, head_bias=True, gelu="tanh"),
    "stablelm-alpha-3b": Shape(50688, 16, 4096, 32, 32, 16384, rotary=0.25, parallel=True, gated=False, rms=False,
                               bias=True),
    "llama-2-7b": Shape(32000, 32, 4096, 32, 32, 11008),
    "llama-2-13b": Shape(32000, 40, 5120, 40, 40, 13824),
    "tinyllama": Shape(32000, 22, 2048, 32, 4, 5632, narrow=True),
    "llama-3.1-8b": Shape(128256, 32, 4096, 32, 8, 14336, narrow=True),
    "llama-3.2-3b": Shape(128256, 28, 3072, 24, 8, 8192, tied=True, narrow=True),
}  # fmt: skip
_CHUNK = 128  # tokens of which LitGPT's fine-tuning makes logits at a time
_MPT = {"1b": (2048, 16, 24), "3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40)}  # width, heads, layers
_MPT_VOCABULARY = 50368
_IMAGES = {"vit_small_patch16_224": (384, 12, 6, 16), "vit_base_patch32_224": (768, 12, 12, 32)}


@dataclass(frozen=True)
class Recipe:
    """How a measurement was made.

    Attributes:
        batch: What ``step`` takes, on ``meta`` where it holds numbers.
        setup: Of ``TrainingSetup``, beside the device.
        done: What is done in a second, in one optimizer's step of one GPU.
        other_bytes: Resident beside what the setup knows; ``other`` says what.
        dtype: Of the parameters.
    """

    model: Callable[[], nn.Module]
    batch: Any
    step: Step
    setup: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = BF16
    autocast: torch.dtype | None = None
    done: float = 0.0
    other_bytes: Callable[[nn.Module], int] = lambda model: 0


def _ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.zeros(rows, tokens, dtype=torch.int64)


def _next_tokens(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1))


def _next_tokens_in_float32(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.reshape(-1))


class _ChunksByName:
    """A loss of logits in chunks, which the training loop still names while backward runs."""

    def __call__(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        self.logits = model(ids)
        parts = [*self.logits[:-1], self.logits[-1][..., :-1, :]]
        losses = [
            functional.cross_entropy(part.reshape(-1, part.shape[-1]), targets.reshape(-1), reduction="none")
            for part, targets in zip(parts, ids[:, 1:].split(_CHUNK, dim=1), strict=True)
        ]
        return torch.cat(losses).mean()


class _ByName:
    """The loss of whole logits, which the training loop still names while backward runs."""

    def __call__(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        self.logits = model(ids)
        return functional.cross_entropy(self.logits.reshape(-1, self.logits.shape[-1]), ids.reshape(-1))


def litgpt(model: str, method: str, bits: str, rows: int, tokens: int) -> Recipe:
    """LitGPT's fine-tuning by Lightning Fabric: outputs cast to float32, gradients accumulated.

    Quantised runs use bitsandbytes' paged AdamW. Its states of fewer than 100,000 elements, all of these, are in
    float32 on the device.
    """
    quantized = bits.startswith("nf4")
    tuning = Tuning(method, 4 if quantized else 16, nested=bits == "nf4-dq")
    mixed = bits == "mixed"
    return Recipe(
        lambda: InFloat32(Decoder(SHAPES[model], tokens, tuning, chunk=_CHUNK)),
        _ids(rows, tokens), _ChunksByName(),
        {"batch_size": rows, "seq_len": tokens, "accumulate": 128 // rows,
         "optimizer": "none" if quantized else "adamw", "precision": "bf16-mixed" if mixed else "bf16"},
        torch.float32 if mixed else BF16, BF16 if mixed else None,
        other_bytes=_paged_states if quantized else lambda _: 0,
    )  # fmt: skip


def _paged_states(model: nn.Module) -> int:
    return sum(8 * p.numel() for p in model.parameters() if p.requires_grad)


def vit_l16(precision: str, rows: int, optimizer: str, accumulate: int) -> Recipe:
    """torchvision's ViT-L/16 with ten classes, trained by Fabric on images of 224 x 224."""
    dtype = BF16 if precision == "bf16" else torch.float32
    images = torch.empty(rows, 3, 224, 224, dtype=dtype, device="meta")
    setup = {"batch_size": rows, "accumulate": accumulate, "optimizer": optimizer, "precision": precision}
    make = partial(VisionTransformer, 224, 16, 1024, 24, 16, 4096, 10, packed=True)
    return Recipe(lambda: InFloat32(make()), (images, torch.zeros(rows, dtype=torch.int64)), _classes, setup, dtype)


def vit_h14() -> Recipe:
    """timm's ViT-H/14 under autocast."""
    images = torch.empty(4, 3, 224, 224, device="meta")
    setup = {"batch_size": 4, "optimizer": "adam", "precision": "bf16-mixed"}
    make = partial(VisionTransformer, 224, 14, 1280, 32, 16, 5120, 102)
    return Recipe(make, (images, torch.zeros(4, dtype=torch.int64)), _classes, setup, torch.float32, BF16)


def timm(model: str, rows: int) -> Recipe:
    """timm's benchmark: SGD, automatic mixed precision in float16."""
    images = torch.empty(rows, 3, 224, 224, device="meta")
    setup = {"batch_size": rows, "optimizer": "sgd_momentum", "precision": "fp16-mixed"}
    if model == "mixer_b32_224":
        make: Callable[[], nn.Module] = partial(VisionMixer, 224, 32, 768, 12, 384, 3072, 1000)
    else:
        width, layers, heads, patch = _IMAGES[model]
        make = partial(VisionTransformer, 224, patch, width, layers, heads, 4 * width, 1000)
    batch = (images, torch.zeros(rows, dtype=torch.int64))
    return Recipe(make, batch, _classes, setup, torch.float32, torch.float16, done=rows)


def _classes(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def bert(precision: str, rows: int, accumulate: int, recompute: bool, optimizer: str) -> Recipe:
    """BERT-large with two classes on 512 tokens, by transformers' Trainer of 2022.

    Attention is not fused, and its AdamW takes one parameter after the other.
    """

    def make() -> nn.Module:
        import transformers

        config = transformers.BertConfig(
            vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
            num_labels=2, attn_implementation="eager",
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
        if recompute:
            model.gradient_checkpointing_enable()
        return model

    batch = {"input_ids": _ids(rows, 512), "labels": torch.zeros(rows, dtype=torch.int64)}
    setup = {"batch_size": rows, "seq_len": 512, "accumulate": accumulate, "precision": precision,
             "optimizer": "adamw_for_loop" if optimizer == "adamw" else optimizer,
             "cuda_version": "11.2"}  # fmt: skip
    autocast = torch.float16 if precision == "fp16-mixed" else None
    return Recipe(make, batch, lambda model, batch: model(**batch).loss, setup, torch.float32, autocast,
                  done=rows * accumulate)  # fmt: skip


class _Given(nn.Module):
    """A tensor that is trained: what a benchmark of a loss takes the gradient of."""

    def __init__(self, shape: tuple[int, ...], head: nn.Module | None = None) -> None:
        super().__init__()
        self.x, self.head = nn.Parameter(torch.empty(shape)), head

    def forward(self, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.x if self.head is None else self.head(self.x), targets)


def cross_entropy(vocabulary: int, tokens: int = 16384) -> Recipe:
    """A loss of logits that are given, and their gradient."""
    setup = {"optimizer": "none", "precision": "fp32"}
    targets = torch.zeros(tokens, dtype=torch.int64)
    return Recipe(lambda: _Given((tokens, vocabulary)), targets, lambda m, t: m(t), setup, torch.float32)


def head_and_loss(tokens: int) -> Recipe:
    """Llama 3's head and the loss of its logits. The benchmark has another head beside it, for Liger's own kernel."""
    setup = {"optimizer": "none", "precision": "bf16"}
    make = partial(nn.Linear, 4096, 128256, bias=False)
    targets = torch.zeros(tokens, dtype=torch.int64)
    return Recipe(lambda: _Given((tokens, 4096), make()), targets, lambda m, t: m(t), setup,
                  other_bytes=lambda model: model.head.weight.numel() * BF16.itemsize)  # fmt: skip


def mpt(size: str, rows: int, tokens: int, recompute: bool) -> Recipe:
    """MosaicML's MPT under FSDP's mixed precision: float32 shards, products in bfloat16."""
    width, heads, layers = _MPT[size]
    setup = {"batch_size": rows, "seq_len": tokens, "sharding": "fsdp", "data_parallel": 8, "precision": "fp32",
             "compute_dtype": "bfloat16"}  # fmt: skip
    make = partial(LearnedPositions, width, heads, layers, tokens, _MPT_VOCABULARY, recompute)
    return Recipe(make, _ids(rows, tokens), _next_tokens_in_float32, setup, done=rows * tokens)


def torchtune_7b() -> Recipe:
    """Logits in float32; the states of its paged optimizer are not in the allocator."""
    make = partial(Decoder, SHAPES["llama-2-7b"], 2048, recompute=whole_block)
    setup = {"batch_size": 4, "seq_len": 2048, "optimizer": "none"}
    return Recipe(make, _ids(4, 2048), _next_tokens_in_float32, setup)


def torchtune_3b() -> Recipe:
    """Llama 3.2 3B, whole sequences packed."""
    make = partial(Decoder, SHAPES["llama-3.2-3b"], 4096)
    setup = {"batch_size": 2, "seq_len": 4096}
    return Recipe(make, _ids(2, 4096), _next_tokens_in_float32, setup, done=2 * 4096)


def torchtitan_8b() -> Recipe:
    """Selective checkpointing by op; parameters in float32, computed with in bfloat16."""
    setup = {"batch_size": 2, "seq_len": 8192, "sharding": "fsdp", "data_parallel": 8, "precision": "fp32",
             "compute_dtype": "bfloat16", "selective_op": True}  # fmt: skip
    make = partial(Decoder, SHAPES["llama-3.1-8b"], 8192)
    return Recipe(make, _ids(2, 8192), _next_tokens_in_float32, setup, done=2 * 8192)


def tinyllama() -> Recipe:
    """LitGPT's pretraining script by Fabric, which casts the logits to float32; 32 sequences for a step."""
    setup = {"batch_size": 4, "seq_len": 2048, "accumulate": 8}
    make = partial(Decoder, SHAPES["tinyllama"], 2048)
    return Recipe(lambda: InFloat32(make()), _ids(4, 2048), _ByName(), setup, done=8 * 4 * 2048)


def thunder_7b() -> Recipe:
    """LitGPT's model under FSDP2 that keeps parameters whole from forward to backward."""
    setup = {"batch_size": 1, "seq_len": 4096, "sharding": "fsdp", "data_parallel": 8, "reshard": False,
             "optimizer": "adamw_fused"}  # fmt: skip
    make = partial(Decoder, replace(SHAPES["llama-2-7b"], narrow=True), 4096)
    return Recipe(make, _ids(1, 4096), _next_tokens, setup, done=4096)


RECIPES: dict[str, Callable[..., Recipe]] = {
    "litgpt": litgpt, "vit_l16": vit_l16, "vit_h14": vit_h14, "timm": timm, "bert": bert,
    "cross_entropy": cross_entropy, "head_and_loss": head_and_loss, "mpt": mpt, "torchtune_7b": torchtune_7b,
    "torchtune_3b": torchtune_3b, "torchtitan_8b": torchtitan_8b, "tinyllama": tinyllama, "thunder_7b": thunder_7b,
}  # fmt: skip
