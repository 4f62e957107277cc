"""Bytes of a transformers Cache, by batch and length, from a model's config alone.

Layer kinds are transformers' own (``cache_utils.get_layer_types_and_kwargs``); shapes are what its layers hold after a
token has been generated, checked byte for byte on CPU for nineteen architectures (``tests/inference``). A sliding
window of ``w`` tokens holds ``w - 1``. Latent attention (MLA) holds the latent and one rotary key. State-space and
linear attention layers hold a state of a fixed size, its recurrent part in float32.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.errors import LowtideError

# Bytes of one element; quantised caches have a scale and a zero point of 2 bytes for each group of 64.
CACHE_DTYPES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0,
                "int8": 1 + 4 / 64, "int4": 0.5 + 4 / 64, "int2": 0.25 + 4 / 64}  # fmt: skip
RESIDUAL_TOKENS = 128  # the newest tokens of a quantised cache are kept as they are
_BACKEND_BITS = ("int8", "int4", "int2")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding")
_LINEAR = ("conv", "linear_attention", "hybrid", "hybrid_sliding")


class UnknownCacheError(LowtideError, ValueError):
    """The config describes no cache whose bytes are known here; the message names what is missing."""


@dataclass(frozen=True)
class LayerCache:
    """What one decoder layer holds.

    Attributes:
        kind: transformers' layer type.
        token_elements: Keys and values of one token of one sequence.
        window: Tokens held at most; None: all of them.
        state_elements: Of the model's dtype, for each sequence whatever its length.
        recurrent_elements: The same in float32.
        fixed_elements: Keys and values of a sequence that never grow: of the encoder's output.
    """

    kind: str
    token_elements: int = 0
    window: int | None = None
    state_elements: int = 0
    recurrent_elements: int = 0
    fixed_elements: int = 0

    def bytes(self, batch_size: int, length: int, dtype: str, model_dtype: str) -> int:
        """Bytes that the layer holds after ``length`` tokens of each of ``batch_size`` sequences."""
        held = length if self.window is None else min(length, self.window)
        plain = CACHE_DTYPES[model_dtype]
        quantised = held
        if dtype in _BACKEND_BITS:
            quantised = max(0, held - RESIDUAL_TOKENS)
        per_token = CACHE_DTYPES[dtype] * quantised + plain * (held - quantised)
        own = self.token_elements * per_token + (self.state_elements + self.fixed_elements) * plain
        return math.ceil(batch_size * (own + 4 * self.recurrent_elements))


def layer_caches(config: Any, *, source_length: int | None = None) -> tuple[LayerCache, ...]:
    """Return what each decoder layer of a transformers config holds.

    Args:
        config: A transformers config; a multimodal one counts by its text decoder.
        source_length: Tokens of the encoder's output, for encoder-decoder models; Whisper's is fixed.

    Raises:
        UnknownCacheError: a kind of layer that is not known here, or a model without a cache (BERT, ViT).
    """
    from transformers.cache_utils import get_layer_types_and_kwargs

    text = config.get_text_config(decoder=True)
    if config.model_type in _NO_CACHE:
        raise UnknownCacheError(f"{config.model_type} generates nothing, so it has no KV cache.")
    if getattr(config, "is_encoder_decoder", False):
        return _encoder_decoder(config, source_length)
    kinds, options = get_layer_types_and_kwargs(text)
    return tuple(_layer(text, kind, option) for kind, option in zip(kinds, options))


def cache_bytes(
    layers: tuple[LayerCache, ...], batch_size: int, length: int, dtype: str = "bfloat16", model_dtype: str = "bfloat16"
) -> int:
    """Return the bytes of all layers; ``dtype`` is the cache's, of ``CACHE_DTYPES``."""
    return sum(layer.bytes(batch_size, length, dtype, model_dtype) for layer in layers)


_NO_CACHE = frozenset(
    {"bert", "vit", "roberta", "distilbert", "electra", "deberta", "deberta-v2", "swin", "resnet", "clip"}
)


def _layer(config: Any, kind: str, option: Mapping[str, Any]) -> LayerCache:
    if kind == "dummy":
        return LayerCache(kind)
    if kind not in _ATTENTION + _LINEAR:
        raise UnknownCacheError(f"{config.model_type} has layers of type {kind!r}, whose cache is not known here.")
    window = option.get("sliding_window")
    held = None if window is None else window - 1
    tokens = _token_elements(config, kind) if kind in _ATTENTION else 0
    state, recurrent = _state(config) if kind in _LINEAR else (0, 0)
    return LayerCache(kind, tokens, held, state, recurrent)


def _token_elements(config: Any, kind: str) -> int:
    if getattr(config, "kv_lora_rank", None):
        return int(config.kv_lora_rank + config.qk_rope_head_dim)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # Falcon
    elif config.model_type == "falcon":
        kv_heads = getattr(config, "num_kv_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if config.model_type == "gemma4_text" and kind == "full_attention":
        raise UnknownCacheError("gemma4's full layers have heads of another size, which are not known here.")
    return int(2 * kv_heads * head_dim)


def _state(config: Any) -> tuple[int, int]:
    """Elements of the convolution's state and of the recurrent one."""

    def has(*names: str) -> bool:
        return all(getattr(config, name, None) is not None for name in names)

    if has("linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim"):  # Qwen3-Next and its kin
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        return (2 * keys + values) * config.linear_conv_kernel_dim, values * config.linear_key_head_dim
    if has("conv_L_cache"):  # LFM2
        return config.hidden_size * config.conv_L_cache, 0
    if has("mamba_d_conv", "mamba_n_heads"):  # Mamba 2 inside Falcon-H1, Bamba, Granite
        inner = getattr(config, "mamba_d_ssm", None) or int(config.mamba_expand * config.hidden_size)
        groups = 2 * config.mamba_n_groups * config.mamba_d_state
        states = config.mamba_n_heads * config.mamba_d_head * config.mamba_d_state
        return (inner + groups) * config.mamba_d_conv, states
    if has("mamba_d_conv", "mamba_d_state"):  # Mamba inside Jamba
        inner = int(config.mamba_expand * config.hidden_size)
        return inner * config.mamba_d_conv, inner * config.mamba_d_state
    if config.model_type == "mamba2":
        inner = int(config.expand * config.hidden_size)
        groups = 2 * config.n_groups * config.state_size
        return (inner + groups) * config.conv_kernel, config.num_heads * config.head_dim * config.state_size
    if config.model_type in ("mamba", "falcon_mamba"):
        return config.intermediate_size * config.conv_kernel, config.intermediate_size * config.state_size
    raise UnknownCacheError(f"{config.model_type} has linear-attention layers whose state is not known here.")


def _encoder_decoder(config: Any, source_length: int | None) -> tuple[LayerCache, ...]:
    def first(*names: str) -> int:
        found = [getattr(config, name, None) for name in names]
        return int(next(value for value in found if value is not None))

    heads = first("decoder_attention_heads", "num_heads", "num_attention_heads")
    head_dim = getattr(config, "d_kv", None) or config.d_model // heads
    tokens = 2 * heads * head_dim
    fixed = getattr(config, "max_source_positions", None)
    source = fixed if config.model_type == "whisper" else source_length
    if source is None:
        raise UnknownCacheError(
            f"{config.model_type} caches its encoder's output too. Say how long it is: source_length=."
        )
    layers = first("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")
    return (LayerCache("encoder_decoder", tokens, fixed_elements=tokens * source),) * layers
