"""Where a watch meets the training loop: from the model's call to the end of the backward that follows.

The dispatch mode and the pair of saved-tensor hooks go to the bottom of the thread's stacks. A mode of the user's that
opens or closes meanwhile then pops itself and not ours.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.switched_mode import Hooks, insert_hooks, insert_mode, is_on, remove_hooks, remove_mode
from lowtide.tape.tape import Tape


class _Here(threading.local):
    """What is open on this thread."""

    def __init__(self) -> None:
        self.seams: list[Seam] = []


_here = _Here()


class Seam:
    """A mode and a pair of hooks that are in place, on the thread that opened it, while it is open."""

    def __init__(self, mode: TorchDispatchMode, hooks: Hooks) -> None:
        self._mode, self._hooks = mode, hooks
        self._thread: threading.Thread | None = None
        self._is_open = False

    @property
    def is_here(self) -> bool:
        return self._thread is threading.current_thread()

    @property
    def is_elsewhere(self) -> bool:
        """In place on another thread, which still runs."""
        return self._thread is not None and not self.is_here and self._thread.is_alive()

    def open(self) -> None:
        self._is_open = True
        self._put_in_place()

    def _put_in_place(self) -> None:
        self._thread = threading.current_thread()
        insert_mode(self._mode)
        insert_hooks(self._hooks)
        _here.seams.append(self)

    def close(self) -> None:
        """Take mode and hooks away. From another thread they cannot be reached, and stay."""
        self._is_open = False
        self._take_away()

    def _take_away(self) -> None:
        if self.is_here:
            remove_mode(self._mode)
            remove_hooks(self._hooks)
            _here.seams.remove(self)
            self._thread = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, mode and hooks are away. They stay so if the seam is closed there.

        Where the mode is off already, work of our own runs, which is no other model's.
        """
        if not self.is_here or not is_on(self._mode):
            yield
            return
        self._take_away()
        try:
            yield
        finally:
            if self._is_open:
                self._put_in_place()


class ModelSeams:
    """Those of one model's steps. A model that is dropped in the middle of a step leaves none in place."""

    def __init__(self, model: nn.Module) -> None:
        self._open: list[Seam] = []
        self._left_behind: list[Seam] = []  # of steps that are over, in place on threads that are not this one
        weakref.finalize(model, _close_all, self._open).atexit = False

    def open(self, tape: Tape | OnlineTape) -> Seam:
        seam = Seam(tape, (tape.pack, tape.unpack))
        seam.open()
        self._open.append(seam)
        return seam

    def close(self, seam: Seam) -> None:
        """What another thread has in place goes when that thread calls the model next."""
        seam.close()
        self._open.remove(seam)
        if seam.is_elsewhere:
            self._left_behind.append(seam)

    def close_left_behind(self) -> None:
        """What steps that are over have left on this thread."""
        _close_all(self._left_behind)
        self._left_behind = [seam for seam in self._left_behind if seam.is_elsewhere]

    def others_suspended(self) -> AbstractContextManager[None]:
        """Inside, what other models have in place here is away: a call of one model is in no other model's step."""
        return _suspended([seam for seam in _here.seams if seam not in self._open])

    def suspended(self, seams: list[Seam]) -> AbstractContextManager[None]:
        """Inside, ``seams`` are away, as far as they are on this thread."""
        return _suspended([seam for seam in seams if seam.is_here])


@contextmanager
def _suspended(seams: list[Seam]) -> Iterator[None]:
    with ExitStack() as away:
        for seam in seams:
            away.enter_context(seam.suspended())
        yield


def _close_all(seams: list[Seam]) -> None:
    for seam in seams:
        seam.close()
