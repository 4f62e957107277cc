"""Architectures of transformers for ``hollow_counted.py``: small, but with rows enough that kernels take workspaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VARIANTS = ("float32", "bfloat16 autocast", "bfloat16", "LoRA")
ATTENTIONS = ("eager", "sdpa")  # what has no attention, or no fused one, is made once
_CAUSAL = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neo",
    "gpt_neox", "gptj", "opt", "bloom", "falcon", "stablelm", "starcoder2", "olmo2", "cohere", "granite", "mixtral",
    "qwen2_moe", "deepseek_v3", "mamba", "mamba2", "biogpt", "xglm", "codegen", "persimmon", "nemotron", "olmo", "mpt",
)  # fmt: skip
_MASKED = ("bert", "roberta", "distilbert", "electra", "albert", "deberta-v2", "modernbert")
_TRANSLATING = ("t5", "bart")
_SPEECH = ("whisper",)
_IMAGES = ("vit", "dinov2", "swin", "convnext", "resnet")
ARCHITECTURES = (*_CAUSAL, *_MASKED, *_TRANSLATING, *_SPEECH, *_IMAGES)
PLANNED = ("llama", "qwen2", "gpt2", "bert", "t5", "vit", "mixtral")  # steps under a plan are compared for them
ROWS, TOKENS, VOCABULARY, IMAGE = 2, 256, 1000, 64
_SIZES = {
    "hidden_size": 128, "n_embd": 128, "d_model": 128, "dim": 128, "embedding_size": 128, "word_embed_proj_dim": 128,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "d_kv": 32, "rotary_dim": 16,
    "intermediate_size": 256, "ffn_dim": 256, "d_ff": 256, "hidden_dim": 256, "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256, "vocab_size": VOCABULARY, "max_position_embeddings": 600, "state_size": 8,
    "num_local_experts": 4, "image_size": IMAGE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "use_cache": False,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 1},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                  "shared_expert_intermediate_size": 256},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 1,
                    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64,
                    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4},
    "t5": {"decoder_start_token_id": 0},
    "whisper": {"num_mel_bins": 16, "max_source_positions": 128, "max_target_positions": 300},
    "swin": {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
    "convnext": {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2},
    "resnet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]},
}  # fmt: skip
# Sizes that follow from others there.
_LEFT_OUT = {
    "gpt_neox": ("head_dim",), "phi": ("head_dim",), "stablelm": ("head_dim",), "falcon": ("head_dim",),
    "deepseek_v3": ("head_dim",), "distilbert": ("num_layers",),
    "swin": ("hidden_size", "num_attention_heads", "num_heads", "num_hidden_layers", "num_layers"),
}  # fmt: skip


class NotMade(Exception):
    """The architecture has no such attention, or no layer that takes adapters."""


def made(
    kind: str, variant: str, attention: str, rows: int = ROWS
) -> tuple[nn.Module, dict[str, torch.Tensor], Callable]:
    """A model in train mode on the CPU, its batch, and ``(model, batch) -> loss``.

    Args:
        rows: Of text or sound; of images there are twice as many.

    Raises:
        NotMade: there is no such variant.
    """
    import transformers

    torch.manual_seed(0)
    kinds = {
        _MASKED: transformers.AutoModelForMaskedLM,
        _TRANSLATING: transformers.AutoModelForSeq2SeqLM,
        _SPEECH: transformers.AutoModelForSpeechSeq2Seq,
        _IMAGES: transformers.AutoModelForImageClassification,
    }
    auto = next((auto for names, auto in kinds.items() if kind in names), transformers.AutoModelForCausalLM)
    plain = transformers.AutoConfig.for_model(kind)
    sizes = {n: v for n, v in _SIZES.items() if hasattr(plain, n) and n not in _LEFT_OUT.get(kind, ())}
    config = type(plain)(**sizes | _OWN.get(kind, {}))
    try:
        model = auto.from_config(config, attn_implementation=attention)
    except ValueError as error:
        raise NotMade(str(error)) from error
    if variant == "bfloat16":
        model = model.bfloat16()
    if variant == "LoRA":
        model = _with_lora(model)
    batch = _batch(kind, torch.bfloat16 if variant == "bfloat16" else torch.float32, rows)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=variant == "bfloat16 autocast"):
            return model(**batch).loss  # backward runs outside, as loops are written

    return model.train(), batch, loss


def _with_lora(model: nn.Module) -> nn.Module:
    import peft

    try:
        return peft.get_peft_model(model, peft.LoraConfig(r=8, lora_dropout=0.1, target_modules="all-linear"))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise NotMade(str(error)) from error


def _batch(kind: str, dtype: torch.dtype, rows: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (rows, TOKENS), generator=drawn)
    if kind in _IMAGES:
        images = torch.randn(2 * rows, 3, IMAGE, IMAGE, generator=drawn, dtype=torch.float32).to(dtype)
        return {"pixel_values": images, "labels": torch.tensor([0, 1, 1, 0]).repeat(rows // 2)}
    if kind in _SPEECH:
        sound = torch.randn(rows, 16, 256, generator=drawn, dtype=torch.float32).to(dtype)
        return {"input_features": sound, "labels": ids}
    return {"input_ids": ids, "labels": ids.clone()}
