"""A KV cache that keeps a budget: layers that do not fit lie elsewhere and are read one layer ahead.

    cache = lowtide.inference.LayerOffloadCache(model.config, budget="1GiB")
    model.generate(**inputs, past_key_values=cache)

Layers are used in turn, over and over, so the best choice is a fixed set that stays; the others are spread evenly, so
that each is read while as many as possible run. The set is planned from bytes, as the cache grows. Built on
transformers' ``DynamicCache`` and its layers: an absent layer is given back its tensors before transformers' own
``update`` runs, so tokens are the same. Layers with windows or states of a fixed size always stay.

Elsewhere is the host's pinned memory for a model on an accelerator, and a file for one on the CPU
(``cache_places.py``). A layer is written once; then each token that is added goes there alone.
"""

from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from lowtide.errors import TierError
from lowtide.graph.costs import DISK, HOST, Link
from lowtide.inference.cache_places import Away, FilePlace, HostPlace
from lowtide.measurement.links import measured_link
from lowtide.units import format_bytes, parse_budget

_AHEAD = 2  # layers in memory beside those that stay: the one in use and the next one


class LayerOffloadCache(DynamicCache):
    """transformers' dynamic cache within a budget.

    Args:
        config: Of the model; a multimodal one counts by its text decoder.
        budget: Bytes of keys and values that may lie in memory while a layer uses its own, an int or ``"1GiB"``.
        scratch_dir: Of a model on the CPU, where the file is; by default the system's directory for temporary files.

    Attributes:
        peak_bytes: Most bytes of keys and values that lay in memory while a layer used its own, measured.
        moved_bytes: Moved away so far, measured.

    Raises:
        TierError: the directory cannot be used; later, where the budget does not hold two layers.
        ValueError: ``budget`` is not an amount of memory.
    """

    def __init__(self, config: Any, *, budget: int | str, scratch_dir: str | Path | None = None) -> None:
        super().__init__(config=config)
        amount = parse_budget(budget)
        if not isinstance(amount, int):
            raise ValueError(f'budget={budget!r} is not an amount of memory. Pass bytes as an int, or "1GiB".')
        self.budget_bytes = amount
        self.peak_bytes = self.moved_bytes = 0
        self._scratch_dir = scratch_dir
        self._places: dict[torch.device, FilePlace | HostPlace] = {torch.device("cpu"): FilePlace(scratch_dir)}
        # Exactly this class: its subclasses hold more than keys and values.
        self._movable = [i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        self._away: dict[int, Away] = {}

    def predicted_bytes(self, layer_bytes: int, *, fixed_bytes: int = 0) -> int:
        """Bytes in memory when each movable layer holds ``layer_bytes``: of those that stay, and of two more."""
        away = self._number_away(layer_bytes, fixed_bytes)
        return fixed_bytes + (len(self._movable) - away + (_AHEAD if away else 0)) * layer_bytes

    def predicted_ms(
        self, layer_bytes: int, plain_ms: float, *, device: str = "cpu", link: Link | None = None, fixed_bytes: int = 0
    ) -> float:
        """Milliseconds of a token when each movable layer holds ``layer_bytes``.

        On an accelerator the layers between two that are away run while the second one is brought; what that takes
        longer is waited for. On a CPU copies and layers share memory, and each copy adds what it takes alone. Layers
        count as equally long. That a token's own keys go out is not counted.

        Args:
            plain_ms: Of a token with every layer in memory.
            link: To where layers lie; by default measured, between ``device`` and its tier. A disk is measured
                without the system's page cache, so a machine with spare memory is faster.
        """
        away = self._chosen(self._number_away(layer_bytes, fixed_bytes))
        if not away:
            return plain_ms
        on_cpu = torch.device(device).type == "cpu"
        link = link or measured_link(DISK if on_cpu else HOST, device, self._scratch_dir)
        fetch_ms = link.fetch_ms(layer_bytes)
        if on_cpu:
            return plain_ms + len(away) * fetch_ms
        count, layer_ms = len(self.layers), plain_ms / len(self.layers)
        apart = [(after - before - 1) % count + 1 for before, after in zip(away, away[1:] + away[:1], strict=True)]
        return plain_ms + sum(max(0.0, fetch_ms - layers * layer_ms) for layers in apart)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers' own."""
        kept = self._fetch(layer_idx)
        self._read_ahead(layer_idx)
        made = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx in self._movable:
            self._store(layer_idx, kept)  # what was there is as it was: a DynamicLayer appends
        in_use = sum(x.nbytes for x in made) if layer_idx in self._away else 0  # attention still reads them
        self.peak_bytes = max(self.peak_bytes, self._resident_bytes() + in_use)
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
        away = self._away.get(layer_idx)
        return super().get_seq_length(layer_idx) if away is None else away.tokens

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

    def _store(self, index: int, kept: int = 0) -> None:
        """Move away what the plan says, now that layer ``index`` is as long as the others will be.

        ``kept`` of its tokens lie there already.
        """
        size = _bytes(self.layers[index])
        fixed = sum(_bytes(x) for i, x in enumerate(self.layers) if i not in self._movable)
        for chosen in self._chosen(self._number_away(size, fixed)):
            # As the cache grows, others may have to go besides this one.
            if chosen not in self._away and _bytes(self.layers[chosen]):
                self._write(chosen, kept if chosen == index else 0)

    def _chosen(self, number: int) -> list[int]:
        """``number`` movable layers, evenly spread."""
        count = len(self._movable)
        return [x for i, x in enumerate(self._movable) if (i + 1) * number // count > i * number // count]

    def _write(self, index: int, kept: int) -> None:
        layer = self.layers[index]
        place = self._place_of(layer.keys.device)
        away = self._away[index] = place.write(index, [layer.keys, layer.values], kept)
        self.moved_bytes += away.written_bytes
        layer.keys, layer.values = layer.keys.new_empty(0), layer.values.new_empty(0)

    def _place_of(self, device: torch.device) -> FilePlace | HostPlace:
        if device not in self._places:
            self._places[device] = HostPlace(device)
        return self._places[device]

    def _read_ahead(self, index: int) -> None:
        """Begin to read the next layer that is away."""
        order = [i for i in (*self._movable, *self._movable) if i in self._away]
        following = next((i for i in order if i > index), order[0] if order else None)
        if following is not None:
            self._away[following].begin()

    def _fetch(self, index: int) -> int:
        """Bring layer ``index`` back; how many tokens of it were away."""
        away = self._away.pop(index, None)
        if away is None:
            return 0
        self.layers[index].keys, self.layers[index].values = away.take()
        return away.tokens

    def _resident_bytes(self) -> int:
        ahead = sum(away.size for away in self._away.values() if away.has_begun)
        return ahead + sum(_bytes(layer) for layer in self.layers)


def _bytes(layer: Any) -> int:
    held = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(x.nbytes for x in held if isinstance(x, torch.Tensor))
