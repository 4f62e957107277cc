"""The bytes of a storage, to compare and to sum.

On a CPU a sum is known at once. On a device it travels to pinned memory of the host while the step goes on. The sums of
a backward are compared when that ends: the host waits once.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _current_graph_task_id as graph_task

from lowtide.device import values_off
from lowtide.device.dispatch import bytes_of
from lowtide.device.names import is_accelerator
from lowtide.device.out_of_memory import is_out_of_memory
from lowtide.device.streams import synchronize
from lowtide.errors import ReplayError
from lowtide.tracing.bits import same_elements
from lowtide.tracing.operators import fingerprint

Seal = int | tuple[int, ...] | Tensor  # a sum of words; in rehearsals a fingerprint, which shows swaps of words too
_PIECE = 1 << 22  # words that are on the host at a time
_CHUNK = 64  # sums that travel to one piece of pinned memory


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
        computed: Backward has gone on, and ended.
    """
    harm = "No gradient was computed from it."
    if computed:
        harm = "The gradients of this backward are wrong: throw them away."
    return ReplayError(
        f"{op} in {where or 'the model'} gives other bits than in the forward pass: something that it read was changed "
        f"since, without a version\n(through .data, NumPy or a pointer). {harm}\n"
        "Make the change before the forward pass or after backward."
    )


class _Comparison(NamedTuple):
    """What was sealed, and the sum of its replay: both on their way to the host."""

    sealed: Tensor
    replayed: Tensor
    op: str
    where: str


class SealsOnDevice:
    """The seals of one forward pass on a device. Its backward passes end with an error if a replay has other bits."""

    __slots__ = ("_device", "_free", "_open", "_pending")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []  # pinned words of the host
        self._pending: list[_Comparison] = []
        self._open: set[int] = set()  # backward passes at whose end the sums are compared

    def seal(self, tensor: Tensor) -> Tensor:
        """A word in host memory that will have the sum of the storage's words."""
        if not self._free:
            chunk = torch.empty(_CHUNK, dtype=torch.int64, device="cpu", pin_memory=True)
            self._free = list(chunk.unbind())
        there = _sum_there(tensor)
        return self._free.pop().copy_(there, non_blocking=True)

    def check(self, sealed: Tensor, tensor: Tensor, op: str, where: str, *, at_once: bool) -> None:
        """Compare ``tensor``, a replay, with what was sealed: when the backward that runs ends, or ``at_once``.

        Raises:
            ReplayError: it has other bits; at the end of backward, from ``backward()``.
        """
        self._pending.append(_Comparison(sealed, self.seal(tensor), op, where))
        backward = graph_task()
        if at_once or backward == -1:
            self._compare(computed=False)
        elif backward not in self._open:
            self._open.add(backward)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(backward))

    def _end(self, backward: int) -> None:
        self._open.discard(backward)
        self._compare(computed=True)

    def _compare(self, *, computed: bool) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        synchronize(self._device)
        for sealed, replayed, op, where in pending:
            if int(sealed) != int(replayed) and not values_off.are_off:
                raise changed_unseen(op, where, computed=computed)


def seals_on(device: torch.device) -> SealsOnDevice | None:
    """Those of a forward pass on ``device``; None: its sums are known at once, or nothing travels beside the step."""
    return SealsOnDevice(device) if is_accelerator(device) and _has_pinned_memory(device.type) else None


@cache
def _has_pinned_memory(device_type: str) -> bool:
    try:
        torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
    except RuntimeError:
        return False
    return True
