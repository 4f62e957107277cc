"""Which storages hold floats that a little may be lost of, should the user allow it (``graph/lossy.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lowtide.graph.lossy import ITEM_BYTES
from lowtide.tracing.operators import fills_its_storage, tensors_in

_ROW = 16  # numbers in a row, from which on it is none of statistics


def note_dtypes(
    storages: list[dict[str, Any]],
    number_of: Callable[[torch.Tensor], int | None],
    op: int,
    inputs: Iterable[torch.Tensor],
    result: Any,
    written: Iterable[int],
) -> None:
    """Write down ``dtype`` of what ``op`` makes, and forget that of what it writes, where that leaves it unfit.

    Only a first output counts (others are statistics, masks or states), made from floats alone (what is made from
    integers or booleans is a mask, an index or a choice).
    """
    floats = all(t.is_floating_point() for t in inputs)
    for other in () if floats else written:
        storages[other]["dtype"] = ""
    first = next(tensors_in(result), None)
    number = None if first is None or not floats else number_of(first)
    if first is None or number is None or storages[number]["op"] != op or storages[number]["output"]:
        return
    name = str(first.dtype).removeprefix("torch.")
    if name in ITEM_BYTES and first.dim() > 1 and first.shape[-1] >= _ROW and fills_its_storage(first):
        storages[number]["dtype"] = name


def check_dtype(storage: dict[str, Any], tensor: torch.Tensor) -> None:
    """Autograd stores ``tensor`` over ``storage``: read as another dtype it is no row of floats."""
    if storage.get("dtype") not in (None, str(tensor.dtype).removeprefix("torch.")):
        storage["dtype"] = ""
