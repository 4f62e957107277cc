"""A KV cache that keeps a budget: layers that do not fit lie in a scratch file and are read one layer ahead.

    cache = lowtide.inference.LayerOffloadCache(model.config, budget="1GiB", scratch_dir="/scratch")
    model.generate(**inputs, past_key_values=cache)

Layers are used in turn, over and over, so the best choice is a fixed set that stays; the others are spread evenly, so
that each is read while as many as possible run. The set is planned from bytes, as the cache grows. Built on
transformers' ``DynamicCache`` and its layers: an absent layer is given back its tensors before transformers' own
``update`` runs, so tokens are the same. Layers with windows or states of a fixed size always stay.

Known limits: on the CPU only, with a file; on an accelerator use ``DynamicCache(offloading=True)``. A layer is written
anew with each token.
"""

from __future__ import annotations

import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from lowtide.errors import TierError
from lowtide.scratch_file import open_scratch, read_all, write_all
from lowtide.units import format_bytes, parse_budget

_AHEAD = 2  # layers in memory beside those that stay: the one in use and the next one


class LayerOffloadCache(DynamicCache):
    """transformers' dynamic cache within a budget.

    Args:
        config: Of the model; a multimodal one counts by its text decoder.
        budget: Bytes of keys and values that may lie in memory between layers, an int or ``"1GiB"``.
        scratch_dir: Where the file is; by default the system's directory for temporary files.

    Attributes:
        peak_bytes: Most bytes of keys and values that lay in memory between layers, measured.
        moved_bytes: Written to the file so far, measured.

    Raises:
        TierError: the directory cannot be used; later, where the budget does not hold two layers, or the model is not
            on the CPU.
        ValueError: ``budget`` is not an amount of memory.
    """

    def __init__(self, config: Any, *, budget: int | str, scratch_dir: str | Path | None = None) -> None:
        super().__init__(config=config)
        amount = parse_budget(budget)
        if not isinstance(amount, int):
            raise ValueError(f'budget={budget!r} is not an amount of memory. Pass bytes as an int, or "1GiB".')
        self.budget_bytes = amount
        self.peak_bytes = self.moved_bytes = 0
        self._fd = open_scratch(scratch_dir)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="lowtide-kv")
        self._finalizer = weakref.finalize(self, _close, self._fd, self._reader)
        # Exactly this class: its subclasses hold more than keys and values.
        self._movable = [i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        self._away: dict[int, _Stored] = {}
        self._places: dict[int, tuple[int, int]] = {}  # offset and room in the file
        self._coming: dict[int, Future[tuple[torch.Tensor, torch.Tensor]]] = {}

    def predicted_bytes(self, layer_bytes: int, *, fixed_bytes: int = 0) -> int:
        """Bytes in memory when each movable layer holds ``layer_bytes``: of those that stay, and of two more."""
        away = self._number_away(layer_bytes, fixed_bytes)
        return fixed_bytes + (len(self._movable) - away + (_AHEAD if away else 0)) * layer_bytes

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers' own."""
        if key_states.device.type != "cpu":
            raise TierError(
                f"LayerOffloadCache moves layers to a file, from the CPU only; this model is on {key_states.device}. "
                "Use transformers' DynamicCache(config=..., offloading=True)."
            )
        self._fetch(layer_idx)
        self._read_ahead(layer_idx)
        made = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx in self._movable:
            self._store(layer_idx)
        self.peak_bytes = max(self.peak_bytes, self._resident_bytes())
        return made

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """As transformers' own; layers that are away come back one at a time."""
        self._each_at_home(lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As transformers' own."""
        self._each_at_home(lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """As transformers' own."""
        self._each_at_home(lambda layer: layer.batch_select_indices(indices))

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers' own."""
        self._each_at_home(lambda layer: layer.crop(tokens_to_remove))

    def reset(self) -> None:
        """As transformers' own."""
        self._each_at_home(lambda layer: layer.reset())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As transformers' own, also of a layer that is away."""
        stored = self._away.get(layer_idx)
        return super().get_seq_length(layer_idx) if stored is None else stored.shapes[0][-2]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As transformers' own, also of a layer that is away."""
        if layer_idx in self._away:
            return self.get_seq_length(layer_idx) + query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)

    def _each_at_home(self, change: Any) -> None:
        for index, layer in enumerate(self.layers):
            self._fetch(index)
            change(layer)
            if index in self._movable:
                self._store(index)

    def _number_away(self, layer_bytes: int, fixed_bytes: int) -> int:
        """How many movable layers cannot stay."""
        left = self.budget_bytes - fixed_bytes
        if len(self._movable) * layer_bytes <= left:
            return 0
        stay = left // max(1, layer_bytes) - _AHEAD
        if stay < 0:
            raise TierError(
                f"budget={format_bytes(self.budget_bytes)} does not hold two layers of the cache of "
                f"{format_bytes(layer_bytes)} each beside {format_bytes(fixed_bytes)} that always stay. Raise it to "
                f"{fixed_bytes + _AHEAD * layer_bytes} bytes or more, or take fewer or shorter sequences."
            )
        return len(self._movable) - stay

    def _store(self, index: int) -> None:
        """Move to the file what the plan says, now that layer ``index`` is as long as the others will be."""
        size = _bytes(self.layers[index])
        fixed = sum(_bytes(x) for i, x in enumerate(self.layers) if i not in self._movable)
        count, number = len(self._movable), self._number_away(size, fixed)
        for place, at_home in enumerate(self._movable):
            # Evenly spread: ``number`` of ``count``. As the cache grows, others may have to go besides this one.
            spread = (place + 1) * number // count > place * number // count
            if spread and at_home not in self._away and _bytes(self.layers[at_home]):
                self._write(at_home)

    def _write(self, index: int) -> None:
        layer = self.layers[index]
        size = _bytes(layer)
        offset = os.fstat(self._fd).st_size
        room = 2 * size  # grown by doubling, so that the file stays within four times what it holds
        if self._places.get(index, (0, 0))[1] >= size:
            offset, room = self._places[index]
        tensors = [layer.keys.contiguous(), layer.values.contiguous()]
        at = offset
        try:
            os.truncate(self._fd, max(os.fstat(self._fd).st_size, offset + room))
            for x in tensors:
                write_all(self._fd, memoryview(x.view(-1).view(torch.uint8).numpy()), at)
                at += x.nbytes
        except OSError as error:
            raise TierError(f"the cache's scratch file cannot be written: {error.strerror or error}.") from error
        self._places[index] = (offset, room)
        self.moved_bytes += size
        self._away[index] = _Stored(offset, [tuple(x.shape) for x in tensors], layer.keys.dtype)
        layer.keys = layer.values = torch.empty(0, dtype=layer.dtype)

    def _read_ahead(self, index: int) -> None:
        """Begin to read the next layer that is away."""
        order = [i for i in (*self._movable, *self._movable) if i in self._away]
        following = next((i for i in order if i > index), order[0] if order else None)
        if following is not None and following not in self._coming:
            self._coming[following] = self._reader.submit(self._away[following].read, self._fd)

    def _fetch(self, index: int) -> None:
        stored = self._away.pop(index, None)
        if stored is None:
            return
        coming = self._coming.pop(index, None)
        try:
            keys, values = stored.read(self._fd) if coming is None else coming.result()
        except OSError as error:
            raise TierError(f"the cache's scratch file cannot be read: {error.strerror or error}.") from error
        self.layers[index].keys, self.layers[index].values = keys, values

    def _resident_bytes(self) -> int:
        ahead = sum(self._away[i].nbytes for i in self._coming)
        return ahead + sum(_bytes(layer) for layer in self.layers)


class _Stored:
    """Where a layer's keys and values lie in the file."""

    def __init__(self, offset: int, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        self.offset, self.shapes, self.dtype = offset, shapes, dtype

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes) * self.dtype.itemsize

    def read(self, fd: int) -> tuple[torch.Tensor, torch.Tensor]:
        found, at = [], self.offset
        for shape in self.shapes:
            x = torch.empty(shape, dtype=self.dtype)
            read_all(fd, memoryview(x.view(-1).view(torch.uint8).numpy()), at)
            at += x.nbytes
            found.append(x)
        return found[0], found[1]


def _bytes(layer: Any) -> int:
    held = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(x.nbytes for x in held if isinstance(x, torch.Tensor))


def _close(fd: int, reader: ThreadPoolExecutor) -> None:
    reader.shutdown(wait=True, cancel_futures=True)
    os.close(fd)
