"""The bytes of a storage, to compare and to sum.

On a CPU a sum is known at once. On a device it stays there, and is compared there: the host waits for nothing.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _current_graph_task_id as graph_task
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from lowtide.device import values_off
from lowtide.device.dispatch import bytes_of
from lowtide.device.names import is_accelerator
from lowtide.device.out_of_memory import is_out_of_memory
from lowtide.device.streams import current_stream, new_event, why_no_streams
from lowtide.errors import ReplayError
from lowtide.step.bits import same_elements
from lowtide.step.operators import fingerprint

Seal = int | tuple[int, ...] | Tensor  # a sum of words; in rehearsals a fingerprint, which shows swaps of words too
_PIECE = 1 << 22  # words that are on the host at a time
_CHUNK = 64  # sums in one piece of a device's memory
_FLAGS = 512  # likewise
_ROUND = 16  # steps until the host asks: in so many each dropped tensor has been compared once (``tape.py``)
_HAVE_NAN = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128
})  # fmt: skip


def words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of a tensor's storage, eight at a time, and the rest: the cheapest form to compare and to sum."""
    raw = bytes_of(tensor.untyped_storage())
    whole = raw.numel() // 8 * 8
    return raw[:whole].view(torch.int64), raw[whole:]


@values_off.unread
def _sum_there(tensor: Tensor) -> Tensor:
    whole, rest = words(tensor)
    return whole.sum() + rest.sum() if rest.numel() else whole.sum()


def sum_of_words(tensor: Tensor) -> int:
    """Shows a later write to the storage: any change of one word changes it, a swap of two words does not."""
    try:
        found = int(_sum_there(tensor))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found = _sum_on_host(tensor)
    return 0 if values_off.are_off else found


def _sum_on_host(tensor: Tensor) -> int:
    """The same sum, where the device has no memory for it: the bytes come to the host, some at a time."""
    found = sum(int(piece.cpu().sum()) for part in words(tensor) for piece in part.split(_PIECE))
    return (found + 2**63) % 2**64 - 2**63  # as words overflow


def has_seal(tensor: Tensor, seal: int | tuple[int, ...]) -> bool:
    """Whether the storage of ``tensor`` has the bits that were sealed."""
    return (sum_of_words(tensor) if isinstance(seal, int) else fingerprint(tensor)) == seal


def same_storage_bits(a: Any, b: Tensor) -> bool:
    """Whether the storages of two tensors hold the same bytes."""
    if not isinstance(a, Tensor) or a.untyped_storage().nbytes() != b.untyped_storage().nbytes():
        return False
    parts = list(zip(words(a), words(b)))
    try:
        return all(same_elements(*part) for part in parts)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return _same_on_host(a, b)


def same_bytes_as_copy(a: Any, copy: torch.UntypedStorage) -> bool:
    """``same_storage_bits``, of a storage whose bytes are in host memory."""
    if not isinstance(a, Tensor) or a.untyped_storage().nbytes() != copy.nbytes():
        return False
    return _same_on_host(a, torch.empty(0, dtype=torch.uint8, device="cpu").set_(copy))


def _same_on_host(a: Tensor, b: Tensor) -> bool:
    """Some bytes at a time."""
    pieces = (pair for part in zip(words(a), words(b)) for pair in zip(*(t.split(_PIECE) for t in part)))
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in pieces) or values_off.are_off


def changed_unseen(op: str, where: str, *, computed: bool = False) -> ReplayError:
    """A replay gives other bits than the op gave in the forward pass, though no version shows a change.

    Args:
        computed: Backward has gone on, and other steps may have followed.
    """
    harm = "No gradient was computed from it."
    if computed:
        harm = (
            f"Gradients of the last {3 * _ROUND} steps at most are not a number, or wrong: go back to a state of "
            "before, and throw them away."
        )
    return ReplayError(
        f"{op} in {where or 'the model'} gives other bits than in the forward pass: something that it read was changed "
        f"since, without a version\n(through .data, NumPy or a pointer). {harm}\n"
        "Make the change before the forward pass or after backward."
    )


class _Reading:
    """Flags on their way to the host."""

    def __init__(self, flags: list[Tensor], device: torch.device) -> None:
        self._copies = [
            torch.empty(chunk.shape, dtype=chunk.dtype, device="cpu", pin_memory=True).copy_(chunk, non_blocking=True)
            for chunk in flags
        ]
        self._event = new_event(device)
        self._event.record(current_stream(device))

    def is_there(self, *, waits: bool) -> bool:
        if waits:
            self._event.synchronize()
        return waits or self._event.query()

    def raised(self) -> list[int]:
        """The numbers of the flags that are up."""
        return [n for n, flag in enumerate(flag for chunk in self._copies for flag in chunk.tolist()) if flag]


class SealsOnDevice:
    """The seals of one tape's steps on a device, which stay there. Nobody waits for what they show.

    A replay that has other bits is overwritten with NaN by the device itself, so that no gradient made from it can be
    used. The host learns of it later: once in sixteen steps it asks for the flags, and the backward that
    finds them there ends with the error.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []  # words of the newest chunk
        # Of this step and of the one before: another stream may still read words that nobody holds any more.
        self._chunks: list[Tensor] = []
        self._older_chunks: list[Tensor] = []
        self._flags: list[Tensor] = []
        self._free_flags: list[Tensor] = []
        self._flag_of: dict[tuple[str, str], Tensor] = {}  # by operator and module
        self._open: set[int] = set()  # backward passes that compare
        self._num_steps = 0  # since the host asked last
        self._has_compared = False  # likewise
        self._reading: _Reading | None = None

    def begin_step(self) -> None:
        self._older_chunks, self._chunks, self._free = self._chunks, [], []
        self._num_steps += 1

    def seal(self, tensor: Tensor) -> Tensor:
        """A word on the device that will have the sum of the storage's words."""
        there = _sum_there(tensor)
        if not self._free:
            self._chunks.append(torch.empty(_CHUNK, dtype=torch.int64, device=self._device))
            self._free = list(self._chunks[-1].unbind())
        return self._free.pop().copy_(there)

    def check(self, sealed: Tensor, tensor: Tensor, op: str, where: str, *, at_once: bool) -> None:
        """Compare ``tensor``, a replay, with what was sealed: on the device, or ``at_once``.

        Raises:
            ReplayError: ``at_once``, it has other bits.
        """
        differs = _sum_there(tensor) != sealed
        backward = graph_task()
        if at_once or backward == -1:
            if bool(differs) and not values_off.are_off:
                raise changed_unseen(op, where)
            return
        _spoil_where(differs, tensor)
        self._flag(op, where).logical_or_(differs)
        if backward not in self._open:
            self._open.add(backward)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(backward))

    def _flag(self, op: str, where: str) -> Tensor:
        flag = self._flag_of.get((op, where))
        if flag is None:
            if not self._free_flags:
                self._flags.append(torch.zeros(_FLAGS, dtype=torch.bool, device=self._device))
                self._free_flags = list(self._flags[-1].unbind())[::-1]
            flag = self._flag_of[op, where] = self._free_flags.pop()
        return flag

    def _end(self, backward: int) -> None:
        """A backward that compared has ended."""
        self._open.discard(backward)
        self._has_compared = True
        if self._num_steps >= _ROUND:  # the device is never so far behind that the host waits here
            self.look(waits=True)
        elif self._reading is not None:
            self._look(self._reading, waits=False)

    def look(self, *, waits: bool) -> None:
        """See what earlier backward passes have shown, and ask for what the last ones have.

        Args:
            waits: For the earlier ones.

        Raises:
            ReplayError: a replay had other bits.
        """
        if self._reading is not None:
            self._look(self._reading, waits=waits)
        if self._reading is None and self._has_compared:
            self._has_compared, self._num_steps = False, 0
            self._reading = _Reading(self._flags, self._device)
            self._look(self._reading, waits=False)

    def settle(self) -> None:
        """Wait for what all backward passes so far have shown. Raises: ReplayError."""
        self.look(waits=True)
        self.look(waits=True)

    def _look(self, reading: _Reading, *, waits: bool) -> None:
        if not reading.is_there(waits=waits):
            return
        self._reading = None
        if (raised := reading.raised()) and not values_off.are_off:
            for flags in self._flags:
                flags.zero_()
            op, where = list(self._flag_of)[raised[0]]
            raise changed_unseen(op, where, computed=True)


@values_off.unread
def _spoil_where(differs: Tensor, tensor: Tensor) -> None:
    """Make ``tensor`` NaN if ``differs`` says so. Its version stays: nobody is to find it changed."""
    if tensor.dtype in _HAVE_NAN:
        with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
            tensor.masked_fill_(differs, float("nan"))


def seals_on(device: torch.device) -> SealsOnDevice | None:
    """Those of a tape on ``device``; None: its sums are known at once, or nothing travels beside the step."""
    return SealsOnDevice(device) if is_accelerator(device) and _has_pinned_memory(device) else None


@cache
def _has_pinned_memory(device: torch.device) -> bool:
    """And events."""
    try:
        torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
    except RuntimeError:
        return False
    return not why_no_streams(device.type)
