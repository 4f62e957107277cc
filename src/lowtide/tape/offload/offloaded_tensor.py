"""Offloaded tensors of one forward pass and its backward.

A ``TransferQueue``, which the simulator uses too, says when each moves. It counts bytes and unpacks, never time: with
a slow tier the step waits, and memory stays within the prediction.
"""

import threading
import weakref
from collections.abc import Container, Sequence

import torch

from lowtide.errors import TierError
from lowtide.plan import TIER_OF, Decision
from lowtide.simulation.transfer_queue import TransferQueue
from lowtide.step.execution_state import ExecutionState
from lowtide.step.operators import allocated_bytes
from lowtide.step.storage_bits import has_seal
from lowtide.tape.offload.tiers import StoredCopy, Tiers
from lowtide.tape.recipes import Recipe
from lowtide.tape.values import Value, ViewSpec, modified_in_place, sharing_version

_NO_BACKWARD = -2  # before the first one; outside of a backward the id of the graph task is -1


class OffloadedTensor(Recipe):
    """A storage on another tier, in the place of a recipe: it reads nothing, and running it fetches."""

    __slots__ = ("_like", "_value", "_version", "_witness", "fetched_in", "move", "stored")

    def __init__(self, number: int, move: Decision, run: ExecutionState) -> None:
        self.number, self.move, self.run = number, move, run
        self.inputs = ()
        self.tensor = None  # its Value has it
        self.transient_replays, self.once_a_pass = 0, False  # every fetch is final
        self.stored: StoredCopy | None = None  # until it is sent
        self.fetched_in = _NO_BACKWARD  # graph task id of the backward that fetched it last

    def stand_for(self, value: Value, tensor: torch.Tensor) -> None:
        """Fetch into ``value``, with the shape of ``tensor``. Writes after the value's version are an error."""
        self._value = weakref.ref(value)
        self.outputs = (self._value,)
        self._like = ViewSpec(tensor)
        # Shares the version counter of the tensor, but none of its memory.
        self._witness = sharing_version(tensor)
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._version = value.version

    def replay(self, *, keep: bool, wanted: Container[Value] | None = None) -> None:
        """Fetch, and hand the tensor to the Value if it lives. With ``keep`` or ``wanted`` the copy stays on the tier.

        Raises:
            RuntimeError: plain autograd's own, the original was changed in place since.
            TierError: the tier lost the copy, or gave back other bits.
        """
        if self._witness._version != self._version:
            raise modified_in_place(self._witness, self._like.size, self._version)
        value = self._value()
        if value is None or self.stored is None:
            return
        value.tensor = self._like.view_of(self.stored.fetch())
        self.fetched_in = torch._C._current_graph_task_id()
        seal = value.seal  # a fingerprint: moved tensors are sealed in rehearsals alone
        if seal is not None and not isinstance(seal, torch.Tensor) and not has_seal(value.tensor, seal):
            raise TierError(
                f"the {TIER_OF[self.move.action]} tier gave back other bits than it was given, for a tensor of shape "
                f"{list(self._like.size)}.\nNothing has been attached. Use another device, or plan without that tier."
            )
        if wanted is None:
            value.uses_left = value.uses_in_this_pass() if keep else -1
            if not keep:
                value.make_final()


class Transfers:
    """What travels in one forward pass and its backward. Each method raises TierError where a copy failed."""

    def __init__(self, tiers: Tiers, max_inflight_bytes: int) -> None:
        self._tiers = tiers
        self._lock = threading.RLock()  # backward may unpack from several threads
        self._queue = TransferQueue(max_inflight_bytes, {})
        self._inflight: dict[int, OffloadedTensor] = {}  # by storage id of the traced graph
        self._planned: dict[int, weakref.ref[OffloadedTensor]] = {}  # those that are fetched before they are needed
        self._fetch_at: dict[int, int] = {}
        self._backward = _NO_BACKWARD

    def send(self, copy: OffloadedTensor, storage: torch.UntypedStorage) -> TierError | None:
        """Store ``storage``, after as many older copies have settled as the plan's limit asks for.

        Returns:
            Why the tier does not take it; None: it does. Older copies that have failed raise.
        """
        with self._lock:
            move = copy.move
            self._settle(self._queue.send(move.storage, allocated_bytes(storage)))
            try:
                copy.stored = self._tiers[TIER_OF[move.action]].store(storage)
            except TierError as refusal:
                return refusal
            self._inflight[move.storage] = copy
            if move.fetch_at is not None:
                self._planned[move.storage] = weakref.ref(copy)
                self._fetch_at[move.storage] = move.fetch_at
            return None

    def settle_all(self) -> None:
        """Wait for all copies in flight."""
        with self._lock:
            self._settle(self._queue.settle_all())

    def forget(self) -> None:
        """The forward pass has failed. What nobody holds goes now, and not when the next one begins."""
        with self._lock:
            self._queue.settle_all()
            self._inflight.clear()

    def on_unpack(self) -> None:
        """Backward unpacks a tensor, of this pass or another: start the fetches that are due."""
        with self._lock:
            task = torch._C._current_graph_task_id()
            if task > self._backward:  # a new backward; a smaller id is an outer one that goes on
                self._backward = task
                self._queue.begin_backward(self._fetch_at)
            due = self._queue.on_unpack()
            self._settle(due.settle)
            for storage in due.fetch:
                copy = self._planned[storage]()  # None: nobody needs it any more
                if copy is not None and copy.stored is not None and copy.fetched_in != self._backward:
                    copy.stored.start_fetch()

    def _settle(self, storages: Sequence[int]) -> None:
        for storage in storages:
            copy = self._inflight.pop(storage, None)  # None: the tier refused it
            if copy is not None and copy.stored is not None:
                copy.stored.settle()
