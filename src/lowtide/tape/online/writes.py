"""What writes do to the stored values of a step: they complete an output that nothing has read, or end it.

Before memory is written, what was released and is made from it is made again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowtide.device.autocast import with_autocast
from lowtide.device.dispatch import may_run_others
from lowtide.step.execution_state import ExecutionState
from lowtide.step.operators import (
    OVERWRITERS,
    UNINITIALISED,
    WRITES,
    fills_its_storage,
    packet_name,
    storage_of,
    why_not_replayed,
)
from lowtide.step.sharding.windows import NO_WINDOWS
from lowtide.tape.online.holdings import Holdings
from lowtide.tape.online.live_bytes import LiveBytes
from lowtide.tape.online.online_values import MARK, Recipe, StoredValue, UnreadableError, value_of_storage
from lowtide.tape.online.outside_reads import OutsideReads
from lowtide.tape.online.release import Releaser
from lowtide.tape.online.replays import chain_of
from lowtide.tape.online.running_op import RunningOp
from lowtide.tape.online.sharding import copy_before_write, is_closed


class Writes:
    """Those of one step.

    Attributes:
        outside: Recipes that read what no op under the tape made.
    """

    def __init__(self, run: ExecutionState, holdings: Holdings, live: LiveBytes, releaser: Releaser) -> None:
        self._run, self._holdings, self._live, self._releaser = run, holdings, live, releaser
        self.outside = OutsideReads()

    def note(self, op: RunningOp, seconds: float) -> None:
        """An in-place op has run."""
        for tensor in op.written:
            value = value_of_storage(storage_of(tensor), self._run)
            # The counter moves when this call has returned.
            version = tensor._version + 1
            if value is None or len(op.written) > 1 or not self._complete(op, value, version, seconds):
                self.end_value(tensor, version, op.number, op.layer)

    def end_value(self, tensor: torch.Tensor, version: int, number: int, layer: int) -> None:
        """Op ``number`` has written ``tensor``: what its storage held has ended, and the next value has ``version``."""
        storage = storage_of(tensor)
        value = value_of_storage(storage, self._run)
        if storage is None:
            return
        if value is None:
            self.outside.note_written(storage)
            return
        value.overwritten, value.why_kept = True, "was written in place"
        if value.tensor is not None and not value.is_needed:
            self._holdings.let_go(value)
        storage.__dict__[MARK] = replaced = StoredValue(storage, number, version, layer, self._run)
        replaced.why_kept = "was written in place"

    def _complete(self, op: RunningOp, value: StoredValue, version: int, seconds: float) -> bool:
        """Whether the in-place op became part of the recipe that makes ``value``."""
        recipe = value.recipe
        if recipe is None or value.num_reads or value.is_needed or value.version != version - 1:
            return False
        if value.why_kept and value.why_kept != UNINITIALISED:
            return False
        if value.windows != (
            NO_WINDOWS if self._run.windows is None else self._run.windows.around
        ):  # what completes it reads what is made elsewhere
            return False
        func, args, kwargs = op.func, op.args, op.kwargs
        if why_not_replayed(func, args, kwargs) not in ("", WRITES):
            return False
        fills = packet_name(func) in OVERWRITERS and fills_its_storage(args[0])
        if value.why_kept and not fills:
            return False
        alone = len(recipe.outputs) == 1
        read_before = len(recipe.inputs)
        position = next(n for n, reference in recipe.outputs if reference() is value)
        try:
            recipe.complete(func, args, kwargs, with_autocast(op.rng) if may_run_others(func) else op.rng, position)
        except UnreadableError:
            return False
        later = any(i.number > value.number for i in recipe.inputs[read_before:])
        if later and not alone:  # the other outputs are read in between
            value.why_kept = "was completed from what came later"
        if alone:
            value.number = op.number
        if fills:
            value.why_kept = ""
        value.cost_s += seconds
        value.version = version
        self.outside.note(recipe)
        return True

    def keep_what_reads(self, targets: list[torch.Tensor]) -> None:
        """``targets`` are about to be written: what was released and is made from them is made again first.

        What cannot be before its window opens is made from a copy.
        """
        released = self._holdings.released
        if not released:
            return
        for tensor in targets:
            storage = storage_of(tensor)
            if storage is None:
                continue
            value = value_of_storage(storage, self._run)
            if not (value.readers_released if value is not None else storage in self.outside):
                continue
            copied: torch.UntypedStorage | None = None
            with self._releaser.releasing_nothing():
                for other in list(released.values()):
                    if other.tensor is not None or not (readers := _readers_of(other, value, storage)):
                        continue
                    if not is_closed(other):
                        self._releaser.remake(other)
                    elif value is None:
                        copied = copied or copy_before_write(None, storage)
                        self.outside.let_read(readers, storage, copied)
                    elif copied is None:
                        copied = copy_before_write(value, storage)
            if copied is not None:
                self._live.add(copied)

    @contextmanager
    def expected(self, targets: list[torch.Tensor]) -> Iterator[None]:
        """Inside, ``targets`` may be written unseen: what is made from them is there, and stays."""
        self.keep_what_reads(targets)
        storages = [storage for t in targets if (storage := storage_of(t)) is not None]
        read = [(value_of_storage(storage, self._run), storage) for storage in storages]
        outer = self._releaser.must_stay
        self._releaser.must_stay = lambda value: (
            any(_readers_of(value, *r) for r in read) or (outer is not None and outer(value))
        )
        try:
            yield
        finally:
            self._releaser.must_stay = outer

    def may_be_read(self, tensor: torch.Tensor) -> bool:
        """Whether recipes may read this memory."""
        storage = storage_of(tensor)
        value = value_of_storage(storage, self._run)
        if value is not None:
            return value.recipe is not None or value.num_reads > 0
        return storage is not None and storage in self.outside


def _readers_of(value: StoredValue, read: StoredValue | None, storage: torch.UntypedStorage) -> list[Recipe]:
    """Those of the recipes of ``value`` that read ``read``; or, where that is None, ``storage`` from outside."""
    recipes = [part.recipe for part in chain_of([value], later=True) or () if part.recipe is not None]
    if read is not None:
        return [recipe for recipe in recipes if any(i is read for i in recipe.inputs)]
    return [recipe for recipe in recipes if recipe.reads_outside(storage)]
