"""What a backward makes is learned once for each sequence of forward ops; from then on no mode sees its ops.

    a backward of a sequence that is new -> the mode stays; between one unpacked tensor and the next, the most that its
                                            ops hold is noted
    the same sequence again              -> the mode is away; at each unpacked tensor so much is left free as is noted

What forward made, and what is made again, is counted as ever: storages tell when they die. A backward of which ops
write what released values are made from, or record a graph, keeps the mode. So does one that has once unpacked other
tensors than was learned, or in another order: on a device second derivatives change their order from step to step,
since each thread numbers its own nodes. From there on so much is left free as it takes at most.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch

from lowtide.device.memory import available_bytes
from lowtide.device.names import is_accelerator
from lowtide.tape.online.live_bytes import LiveBytes
from lowtide.tape.online.release import Releaser
from lowtide.tape.online.room import LearnedBackward

_UNPACKED_BETWEEN_LOOKS = 4  # at what the device's allocator counts
_ROOM_ON_DEVICE = 2  # times what backward holds at most has to be free: nobody lets go of more where memory runs out


class SeenBackward:
    """One whose ops are seen, and learned."""

    def __init__(self, live: LiveBytes, releaser: Releaser) -> None:
        self._live, self._releaser = live, releaser
        self._held, self._most, self._unpacked = array("q"), array("q"), array("q")
        self._start = self._highest = 0  # of live bytes, since a tensor was unpacked
        self._is_usable = True
        live.begin_backward()
        self.note_unpacked()

    @property
    def _now(self) -> int:
        """Live bytes, and those that were let go of to make room: that is another step's matter."""
        return self._live.now + self._releaser.dropped_bytes

    def note_op(self, more_bytes: int = 0) -> None:
        """An op has run, and took ``more_bytes`` beside what it made."""
        self._highest = max(self._highest, self._now + more_bytes)

    def note_unpacking(self, claim: int) -> None:
        """A tensor is about to be unpacked, and perhaps made again."""
        self._unpacked.append(claim)
        self._note_most()

    def _note_most(self) -> None:
        self._most.append(self._held[-1] + self._highest - self._start)

    def note_unpacked(self) -> None:
        self._held.append(self._live.of_backward)
        self._start = self._highest = self._now

    def keep_mode(self) -> None:
        """There is more to see in it than what it makes."""
        self._is_usable = False

    def end(self) -> LearnedBackward | None:
        self._note_most()
        self.note_unpacked()
        return LearnedBackward(self._held, self._most, self._unpacked) if self._is_usable else None


class UnseenBackward:
    """One whose ops are not seen: what they hold is left free in the budget.

    Args:
        unsplit_bytes: What the device's allocator counts beside the step's storages and so many bytes of backward's.
    """

    def __init__(
        self, learned: LearnedBackward, live: LiveBytes, releaser: Releaser, unsplit_bytes: Callable[[int], int]
    ) -> None:
        self._learned, self._live, self._releaser = learned, live, releaser
        self._unsplit_bytes, self._unsplit = unsplit_bytes, 0
        self._at = 0
        self._is_other = False
        self.note_unpacked()

    def note_unpacking(self, claim: int) -> None:
        """A tensor is about to be unpacked, and perhaps made again: backward holds what it has made so far."""
        unpacked = self._learned.unpacked
        self._is_other = self._is_other or self._at >= len(unpacked) or unpacked[self._at] != claim
        self._at += 1
        held = self._of(self._learned.held_bytes)
        if self._at % _UNPACKED_BETWEEN_LOOKS == 0:
            self._unsplit = self._unsplit_bytes(held)
        self._releaser.aside_bytes = held + self._unsplit

    def note_unpacked(self) -> None:
        """Room is made for what comes until the next one."""
        releaser, live = self._releaser, self._live
        if self._at == 0:
            self._unsplit = self._unsplit_bytes(0)
        most = self._of(self._learned.most_bytes)
        releaser.aside_bytes = most + self._unsplit
        releaser.make_room(0)
        live.peak = max(live.peak, live.now + most)

    def end(self) -> bool:
        """Whether it was the one that was learned."""
        self._releaser.aside_bytes = 0
        self._live.now += self._learned.held_bytes[-1]
        return not self._is_other and self._at == len(self._learned.unpacked)

    def _of(self, known: Sequence[int]) -> int:
        return max(known) if self._is_other else known[self._at]


def has_room_unseen(learned: LearnedBackward, device: torch.device | None) -> bool:
    """Whether no op of a backward can run out of memory on ``device``: without the mode none would run again."""
    if device is None or not is_accelerator(device):
        return True
    available = available_bytes(device)
    return available is not None and available >= _ROOM_ON_DEVICE * max(learned.most_bytes)
