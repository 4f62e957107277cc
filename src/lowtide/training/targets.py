"""Targets that the loss is going to read: they are there before the step, and no call of the model is given them.

A watched step meets them when an op reads them. Until the first one has ended, nobody knows how much they are, and on a
CPU no allocator tells. So before it Python's young objects are looked at, in about a millisecond: a batch has just been
made. Frames of the code that calls the model would tell more exactly, but reading a frame's variables keeps them alive
(Python before 3.13).
"""

import gc

import torch
from torch import nn

from lowtide.step.operators import gradient_of, storage_of, tensors_in
from lowtide.step.subclasses import plain_tensors

_YOUNG = (0, 1)  # generations of Python's garbage collector


def likely_target_bytes(model: nn.Module, batch: object, device: torch.device) -> int:
    """Bytes of tensors beside ``batch`` that have as many rows, belong to no graph, and were made a short time ago."""
    given = [*tensors_in(batch)]
    rows = {t.shape[0] for t in given if t.dim()}
    known = {s._cdata for t in plain_tensors(*given, *model.parameters(), *model.buffers()) if (s := storage_of(t))}
    gradients = [grad for p in model.parameters() if (grad := gradient_of(p)) is not None]
    known |= {s._cdata for grad in gradients if (s := storage_of(grad))}
    found: dict[int, int] = {}
    for tensor in (o for generation in _YOUNG for o in gc.get_objects(generation) if type(o) is torch.Tensor):
        if tensor.device != device or not tensor.dim() or tensor.shape[0] not in rows or tensor.requires_grad:
            continue
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in known:  # of rows of a data set the rows
            found[storage._cdata] = max(found.get(storage._cdata, 0), min(tensor.nbytes, storage.nbytes()))
    return sum(found.values())
