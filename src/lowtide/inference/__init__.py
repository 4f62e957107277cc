"""The KV cache: what it takes, what fits, and a cache that keeps a budget."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "LayerOffloadCache":  # imported on first use: it needs transformers
        from lowtide.inference.layer_offload import LayerOffloadCache

        return LayerOffloadCache
    raise AttributeError(f"module 'lowtide.inference' has no attribute {name!r}")
