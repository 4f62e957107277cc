"""Batches of images and text for models that take both: one image in each sequence, as large as the config says.

How many tokens an image becomes, and in which form a model takes its pixels, no config says in one way. Forms are tried
on a sequence or two until one is taken; nothing is in memory meanwhile. Where none is, the batch is text alone, and
the note says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowtide.foresight.training_setup import SetupError
from lowtide.hollow.models import hollow_batch

_SIDE = 448  # pixels, of models that take any size
Form = tuple[int, dict[str, Any], str]  # image tokens, what besides the text is given for one sequence, in words


def image_form(model: nn.Module, config: Any, dtype: torch.dtype) -> Form:
    """The first form that ``model`` takes; no tokens where it takes none. To be called under a ``HollowMode``."""
    for count, given, words in _forms(model, config, dtype):
        try:
            with torch.no_grad():
                model(**hollow_batch(image_batch(config, (count, given, words), 1, count + 8)))
        except Exception:  # another number of tokens, or another form
            continue
        return count, given, words
    return 0, {}, "text alone: how the model takes images is not known here"


def image_batch(config: Any, form: Form, rows: int, tokens: int) -> dict[str, Any]:
    """``rows`` sequences of ``tokens``, those of the image first. Raises: SetupError: the image has more."""
    count, given, _ = form
    if count >= tokens:
        raise SetupError(f"--seq-len {tokens} has no room for text beside the {count} tokens of an image. Pass more.")
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    if not count:
        return batch
    start = getattr(config, "vision_start_token_id", None)
    begin = 0 if start is None else 1
    if start is not None:
        ids[:, 0] = start
    ids[:, begin : begin + count] = _token(config)
    for name, value in given.items():
        if name == "mm_token_type_ids":
            batch[name] = (ids == _token(config)).int()
        elif value.is_meta:
            batch[name] = torch.empty(rows * value.shape[0], *value.shape[1:], dtype=value.dtype, device="meta")
        else:
            batch[name] = value.repeat(rows, *([1] * (value.dim() - 1)))
    return batch


def _forms(model: nn.Module, config: Any, dtype: torch.dtype) -> Iterator[Form]:
    token, accepted = _token(config), inspect.signature(model.forward).parameters
    if token is None or "pixel_values" not in accepted:
        return
    vision = getattr(config, "vision_config", config)
    patch = getattr(vision, "patch_size", None)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    if "image_grid_thw" in accepted and isinstance(patch, int):
        merge = getattr(vision, "spatial_merge_size", None) or 1
        across = max(1, _SIDE // (patch * merge)) * merge
        deep = channels * patch * patch * (getattr(vision, "temporal_patch_size", None) or 1)
        grid = torch.tensor([[1, across, across]])
        pixels = torch.empty(across * across, deep, dtype=dtype, device="meta")
        words = f"an image of {across * patch} x {across * patch} pixels in each sequence"
        given = {"pixel_values": pixels, "image_grid_thw": grid}
        kinds = {"mm_token_type_ids": torch.zeros(1)}  # in its place come the kinds of the batch's own tokens
        for more in (kinds, {}):
            yield (across // merge) ** 2, given | more, words
        return
    side = getattr(vision, "image_size", None)
    if not isinstance(side, int):
        return
    whole = (side // patch) ** 2 if isinstance(patch, int) else 0
    named = [getattr(config, name, None) for name in ("image_seq_length", "mm_tokens_per_image", "image_seq_len")]
    counts = [
        n for n in (*named, whole, whole + 1, whole // 4, whole // 9, whole // 16) if isinstance(n, int) and n > 0
    ]
    pixels = torch.empty(1, channels, side, side, dtype=dtype, device="meta")
    words = f"an image of {side} x {side} pixels in each sequence"
    for count in dict.fromkeys(counts):
        for given in (
            {"pixel_values": pixels},
            {"pixel_values": pixels, "image_sizes": torch.tensor([[side, side]])},
            {"pixel_values": pixels.unsqueeze(1)},
        ):
            if "image_sizes" in given and "image_sizes" not in accepted:
                continue
            yield count, given, words


def _token(config: Any) -> int | None:
    found = getattr(config, "image_token_id", None)
    return getattr(config, "image_token_index", None) if found is None else found
