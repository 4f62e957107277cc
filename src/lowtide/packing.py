"""Tensors packed into a byte an element, and back: see ``graph/lossy.py`` for the format and where it comes from.

Everything is worked on in float32, a chunk at a time, on the stream that computes: there is no link to wait for.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from lowtide.errors import TierError
from lowtide.graph.costs import FP8, INT8
from lowtide.graph.lossy import BLOCK, CHUNK

_MOST = {INT8: 127.0, FP8: 448.0}
_TINY = 1e-30  # a scale no smaller than that: blocks of zeros divide by it


class Packed(NamedTuple):
    """A flat tensor in ``form``: a byte for each element and a scale for each block."""

    form: str
    bytes: torch.Tensor
    scales: torch.Tensor


def dtype_of(form: str) -> torch.dtype:
    """What the bytes of ``form`` are.

    Raises:
        TierError: this torch has no such dtype.
    """
    found = torch.int8 if form == INT8 else getattr(torch, "float8_e4m3fn", None)
    if found is None:
        raise TierError(f'torch {torch.__version__} has no float8_e4m3fn, which lossy="{FP8}" needs. Use "{INT8}".')
    return found


def pack(flat: torch.Tensor, form: str) -> Packed | None:
    """``flat`` packed; None where some element is infinite or not a number."""
    count, most = flat.numel(), _MOST[form]
    found = torch.empty(count, dtype=dtype_of(form), device=flat.device)
    scales = torch.empty(-(-count // BLOCK), dtype=torch.float32, device=flat.device)
    work = torch.empty(min(count, CHUNK), dtype=torch.float32, device=flat.device)
    for begin, end in _chunks(count):
        part = work[: end - begin].copy_(flat[begin:end]).abs_()
        chunk = scales[begin // BLOCK : -(-end // BLOCK)]
        for blocks, scale in _in_blocks(part, chunk):
            torch.amax(blocks, dim=1, out=scale)
        chunk.div_(most).clamp_(min=_TINY)
        part.copy_(flat[begin:end])
        for blocks, scale in _in_blocks(part, chunk):
            blocks.div_(scale.unsqueeze(1))
        found[begin:end].copy_(part.round_() if form == INT8 else part)
    del work
    finite = not count or math.isfinite(scales.max().item())
    return Packed(form, found, scales) if finite else None


def unpack(packed: Packed, out: torch.Tensor) -> torch.Tensor:
    """Write what ``packed`` stands for into the flat tensor ``out``, and return that."""
    count = out.numel()
    there = out.dtype is torch.float32
    work = out if there else torch.empty(min(count, CHUNK), dtype=torch.float32, device=out.device)
    for begin, end in _chunks(count):
        part = (work[begin:end] if there else work[: end - begin]).copy_(packed.bytes[begin:end])
        for blocks, scale in _in_blocks(part, packed.scales[begin // BLOCK :]):
            blocks.mul_(scale.unsqueeze(1))
        if not there:
            out[begin:end].copy_(part)
    return out


def relative_error(packed: Packed, flat: torch.Tensor) -> float:
    """Norm of what packing changed / norm of ``flat``."""
    norm = torch.linalg.vector_norm(flat, dtype=torch.float32).item()
    change = unpack(packed, torch.empty_like(flat)).sub_(flat)
    return torch.linalg.vector_norm(change, dtype=torch.float32).item() / norm if norm else 0.0


def _chunks(count: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + CHUNK, count)) for begin in range(0, count, CHUNK)]


def _in_blocks(part: torch.Tensor, scales: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``part`` as rows of whole blocks, and the rest, each with its scales."""
    whole, rest = divmod(part.numel(), BLOCK)
    rows = [(part[: whole * BLOCK].view(whole, BLOCK), scales[:whole])] if whole else []
    return [*rows, (part[whole * BLOCK :].view(1, rest), scales[whole : whole + 1])] if rest else rows
