"""Bitwise comparison of tensors, in little memory and with one wait for the device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.device import values_off
from lowtide.device.names import is_accelerator

_PIECE = 1 << 20  # elements: on a device a comparison makes a byte for each


@values_off.unread
def same_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and one integer type hold the same numbers.

    ``torch.equal`` makes a byte for each element on a device: an eighth of a storage, half of a tensor of bfloat16.
    """
    if a.numel() <= _PIECE or not is_accelerator(a.device):
        same = torch.equal(a, b)
    else:
        differ = torch.zeros((), dtype=torch.bool, device=a.device)
        for x, y in _pieces(a, b):
            differ.logical_or_((x != y).any())
        same = not bool(differ)
    return same or values_off.are_off


def _pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if a.numel() <= _PIECE:
        yield a, b
        return
    dimension = max(range(a.dim()), key=a.size)
    rows = max(1, _PIECE // (a.numel() // a.size(dimension)))
    for x, y in zip(a.split(rows, dimension), b.split(rows, dimension), strict=True):
        yield from _pieces(x, y)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality; NaN equals NaN of the same bits, 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.dtype.is_floating_point:  # same sizes of elements: no copy, whatever the strides are
        as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(a.element_size(), torch.int64)
        a, b = a.view(as_int), b.view(as_int)
    return same_elements(a, b)
