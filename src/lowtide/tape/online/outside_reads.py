"""What an online step's recipes read from outside: memory that no op under the tape made, such as weights."""

import weakref
from collections.abc import Iterator

import torch

from lowtide.tape.online.online_values import Recipe
from lowtide.tape.online.sharding import read_copies


class OutsideReads:
    """The recipes that read a storage, by its address: a write to it ends what they say."""

    def __init__(self) -> None:
        self._readers: dict[int, list[weakref.ref[Recipe]]] = {}

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._readers

    def __iter__(self) -> Iterator[Recipe]:
        for readers in self._readers.values():
            yield from (recipe for reference in readers if (recipe := reference()) is not None)

    def note(self, recipe: Recipe) -> None:
        for kept in recipe.outside:
            self._readers.setdefault(kept.tensor.untyped_storage()._cdata, []).append(weakref.ref(recipe))

    def note_written(self, storage: torch.UntypedStorage) -> None:
        """Something writes ``storage``: who has read it cannot run again."""
        for reference in self._readers.pop(storage._cdata, ()):
            if (recipe := reference()) is not None:
                recipe.note_written()

    def let_read(self, readers: list[Recipe], storage: torch.UntypedStorage, copy: torch.UntypedStorage) -> None:
        """``readers`` read ``copy`` from now on; a write to ``storage`` is no concern of theirs."""
        read_copies(readers, storage, copy)
        others = self._readers[storage._cdata]
        others[:] = [reference for reference in others if reference() not in readers]

    def clear(self) -> None:
        self._readers.clear()
