"""What a KV cache takes beside the weights on a device, what fits, and what that means for the settings of servers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowtide.errors import LowtideError, MissingPackageError
from lowtide.estimation.device_table import Device
from lowtide.inference.kv_cache import CACHE_DTYPES, LayerCache, cache_bytes, layer_caches
from lowtide.models.shipped import UnknownModelError

_VLLM_BLOCK_TOKENS = 16
_MOST = 1 << 24


@dataclass(frozen=True)
class CachePlan:
    """Bytes of cache and weights, and what fits.

    Attributes:
        token_bytes: What one more token of one sequence adds, where no window is full.
        working_bytes: Left free for activations: of one token for each sequence, and of a chunk of prompt.
        max_batch_size: At the length asked for; ``max_seq_len`` at the batch size asked for. 0: none.
        settings: By server, the settings that give this cache; empty where it does not fit.
    """

    batch_size: int
    seq_len: int
    cache_bytes: int
    token_bytes: int
    weights_bytes: int
    working_bytes: int
    context_bytes: int
    usable_bytes: int
    fits: bool
    max_batch_size: int
    max_seq_len: int
    settings: dict[str, dict[str, Any]]


def config_of(facts: dict[str, Any]) -> Any:
    """The transformers config of ``models.shipped.model_facts``.

    Raises:
        MissingPackageError: transformers is not installed.
        UnknownModelError: it does not know the model.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingPackageError(
            "configs are read by transformers. Install it: pip install 'lowtide[transformers]'"
        ) from None
    options = {name: value for name, value in facts["config"].items() if name != "model_type"}
    try:
        return AutoConfig.for_model(facts["config"]["model_type"], **options)
    except Exception as error:  # whatever a config class refuses
        raise UnknownModelError(f"transformers does not take the config of {facts['name']}: {error}") from error


def count_parameters(config: Any) -> int:
    """Parameters of the model that ``config`` describes, built on the meta device: no memory, no weights."""
    import torch
    import transformers

    makers: tuple[str, ...] = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq",
              "AutoModelForImageClassification", "AutoModel")  # fmt: skip
    if config.model_type == "bert":
        makers = ("AutoModel",)
    for name in makers:
        maker = getattr(transformers, name)
        if type(config) in maker._model_mapping:
            with torch.device("meta"):
                return int(maker.from_config(config).num_parameters())
    raise LowtideError(f"transformers has no model class for {config.model_type}.")


def plan_cache(
    config: Any,
    parameters: int,
    device: Device,
    *,
    batch_size: int,
    seq_len: int,
    cache_dtype: str | None = None,
    dtype: str = "bfloat16",
    source_length: int | None = None,
) -> CachePlan:
    """Return what the cache of ``batch_size`` sequences of ``seq_len`` tokens takes on ``device``, and what fits.

    Args:
        dtype: Of weights and activations; ``cache_dtype`` of the cache, by default the same.

    Raises:
        UnknownCacheError: the config describes no cache that is known.
    """
    layers = layer_caches(config, source_length=source_length)
    stored = cache_dtype or dtype

    def taken(batch: int, length: int) -> int:
        return cache_bytes(layers, batch, length, stored, dtype)

    weights = math.ceil(parameters * CACHE_DTYPES[dtype])
    text = config.get_text_config(decoder=True)
    # A chunk of 2048 tokens through the widest layer, and logits of every sequence in float32.
    working = 2048 * 6 * _width(text) * 2 + batch_size * int(getattr(text, "vocab_size", 0)) * 4
    left = device.usable_bytes - device.context_bytes - weights - working
    longest = int(getattr(text, "max_position_embeddings", None) or _MOST)
    fits = taken(batch_size, seq_len) <= left
    return CachePlan(
        batch_size=batch_size,
        seq_len=seq_len,
        cache_bytes=taken(batch_size, seq_len),
        token_bytes=math.ceil(sum(layer.token_elements for layer in layers) * CACHE_DTYPES[stored]),
        weights_bytes=weights,
        working_bytes=working,
        context_bytes=device.context_bytes,
        usable_bytes=device.usable_bytes,
        fits=fits,
        max_batch_size=_largest(lambda batch: taken(batch, seq_len) <= left, _MOST),
        max_seq_len=_largest(lambda length: taken(batch_size, length) <= left, longest),
        settings=_settings(layers, taken, weights + working, left, device, batch_size, seq_len, longest, stored, dtype)
        if fits
        else {},
    )


def _settings(
    layers: tuple[LayerCache, ...], taken: Callable[[int, int], int], resident: int, left: int, device: Device,
    batch_size: int, seq_len: int, longest: int, stored: str, dtype: str,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    # vLLM takes its share of the whole memory for weights, activations and blocks of 16 tokens; the rest is others'.
    rounded = -(-seq_len // _VLLM_BLOCK_TOKENS) * _VLLM_BLOCK_TOKENS
    needed = resident + taken(batch_size, rounded) + device.context_bytes
    share = min(0.98, math.ceil(100 * needed / device.usable_bytes) / 100)
    vllm: dict[str, Any] = {
        "gpu_memory_utilization": share,
        "max_model_len": min(seq_len, longest),
        "max_num_seqs": batch_size,
    }
    if stored != dtype:
        vllm["kv_cache_dtype"] = stored
    alone = _largest(lambda length: taken(1, length) <= left, longest)
    return {"vllm": vllm, "text-generation-webui": {"n_ctx": alone}}


def _width(config: Any) -> int:
    hidden = int(getattr(config, "hidden_size", 0) or 0)
    inner = getattr(config, "intermediate_size", None)
    return max(hidden, inner if isinstance(inner, int) else 0)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` for which ``holds``; it holds for all smaller ones too. 0: for none."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
