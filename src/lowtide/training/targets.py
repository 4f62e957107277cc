"""Targets that the loss is going to read: they are there before the step, and no call of the model is given them.

A watched step meets them when an op reads them. Until the first one has ended, nobody knows how much they are, and on a
CPU no allocator tells. So before it the local variables of the code that calls the model are looked at: tensors with as
many rows as the batch, alone or in a small container, as a loop has them.
"""

import sys
from collections import UserDict
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from lowtide.step.operators import storage_of, tensors_in
from lowtide.step.subclasses import plain_tensors

_MOST_FRAMES = 64
_MOST_ENTRIES = 16  # of a container; longer ones hold many batches


def likely_target_bytes(model: nn.Module, batch: object, device: torch.device) -> int:
    """Bytes of what code on the stack holds beside ``batch``, with as many rows."""
    given = [*tensors_in(batch)]
    rows = {t.shape[0] for t in given if t.dim()}
    known = {s._cdata for t in plain_tensors(*given, *model.parameters(), *model.buffers()) if (s := storage_of(t))}
    known |= {s._cdata for p in model.parameters() if p.grad is not None and (s := storage_of(p.grad))}
    found: dict[int, int] = {}
    for tensor in _tensors_on_stack():
        if tensor.device != device or not tensor.dim() or tensor.shape[0] not in rows or tensor.grad_fn is not None:
            continue
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in known:  # of rows of a data set the rows
            found[storage._cdata] = max(found.get(storage._cdata, 0), min(tensor.nbytes, storage.nbytes()))
    return sum(found.values())


def _tensors_on_stack() -> Iterator[torch.Tensor]:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        for value in list(frame.f_locals.values()):
            yield from _tensors_of(value)
        frame = frame.f_back


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    kind = type(value)
    if kind is torch.Tensor:
        yield value
    elif kind in (list, tuple) and len(value) <= _MOST_ENTRIES:
        yield from (entry for entry in value if type(entry) is torch.Tensor)
    elif issubclass(kind, (dict, UserDict)) and len(value) <= _MOST_ENTRIES:
        yield from (entry for entry in list(value.values()) if type(entry) is torch.Tensor)
