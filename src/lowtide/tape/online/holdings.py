"""Who needs a stored value's memory: reference counts by hand, so that a recipe pins nothing before its release."""

import weakref
from collections.abc import Iterable, Iterator

from torch import Tensor

from lowtide.tape.online.online_values import Claim, StoredValue


class Holdings:
    """The stored values whose memory the tape holds, for autograd or for a released value that reads it."""

    def __init__(self) -> None:
        self._held: dict[int, StoredValue] = {}
        self.released: dict[int, StoredValue] = {}  # claimed by autograd, memory gone

    def __iter__(self) -> Iterator[StoredValue]:
        return iter(list(self._held.values()))

    def hold(self, value: StoredValue, tensor: Tensor) -> None:
        value.tensor = tensor
        self._held[id(value)] = value

    def let_go(self, value: StoredValue) -> None:
        value.tensor = None
        self._held.pop(id(value), None)

    def claim(self, value: StoredValue, claim: Claim, tensor: Tensor) -> None:
        """Autograd wants ``value``, whose memory ``tensor`` is over, from now on."""
        value.claim = weakref.ref(claim)
        if value.tensor is None:
            self.hold(value, tensor)
            if value.readers_released:  # it was to be made from these
                self._unneed(value.inputs)

    def end_claim(self, value: StoredValue) -> None:
        """Autograd wants it no more."""
        released = self.released.pop(id(value), None)
        if value.readers_released:
            return
        if value.tensor is not None:
            self.let_go(value)
        elif released is not None:
            self._unneed(value.inputs)

    def release(self, value: StoredValue) -> None:
        """Its memory goes; from now on what its recipe reads is needed."""
        self.let_go(value)
        if value.claim() is not None:
            self.released[id(value)] = value
        self._need(value)

    def let_go_unclaimed(self) -> None:
        """The step is over: what no claim of autograd's can ask for any more goes, whatever was counted of it.

        A graph that somebody keeps may still run backward: what it claims stays, and so does what that is made from.
        """
        wanted: set[int] = set()
        todo = [v for v in (*self._held.values(), *self.released.values()) if v.claim() is not None]
        while todo:
            value = todo.pop()
            if id(value) not in wanted:
                wanted.add(id(value))
                todo += value.inputs if value.tensor is None else ()
        for value in self:
            if id(value) not in wanted:
                self.let_go(value)

    def restore(self, value: StoredValue, tensor: Tensor) -> None:
        """A released value has been made again."""
        self.released.pop(id(value), None)
        self.hold(value, tensor)
        self._unneed(value.inputs)

    def _need(self, released: StoredValue) -> None:
        todo = [(released, value) for value in released.inputs]
        while todo:
            reader, value = todo.pop()
            was_needed = value.is_needed
            value.readers_released += 1
            if value.tensor is not None:
                continue
            if value.is_root_for(reader):
                memory = value.memory()
                assert memory is not None  # ``chain`` looked
                self.hold(value, memory)
                if was_needed and value.recipe is not None:  # it was to be made from these, for readers in its windows
                    self._unneed(value.inputs)
            elif not was_needed:
                todo += [(value, read) for read in value.inputs]

    def _unneed(self, values: Iterable[StoredValue]) -> None:
        todo = list(values)
        while todo:
            value = todo.pop()
            value.readers_released -= 1
            if value.is_needed:
                continue
            if value.tensor is not None:
                self.let_go(value)
            elif value.recipe is not None:
                todo += value.inputs
