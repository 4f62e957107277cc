"""Moved storages: when copies set out, settle and come back in one forward pass and its backward.

    Copy        stands where a dropped tensor has its recipe: it reads nothing, and running it fetches.
    Transfers   of one forward pass: which copies are on their way out, and which fetches are due.

The rules are those of ``lowtide.simulation.transfers``, which the simulator follows too. They go by bytes and by what
backward unpacks, never by how fast a tier is: a slow one makes the step wait, and memory stays within the prediction.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Container

import torch

from lowtide.errors import TierError
from lowtide.tape.execution_state import ExecutionState
from lowtide.tape.offload.tiers import Ticket, Tiers
from lowtide.tape.program import Move
from lowtide.tape.recipes import Recipe
from lowtide.tape.values import Value, ViewSpec, modified_in_place, sharing_version
from lowtide.tracing.restore import same_bits

_NONE = -2  # no backward yet; outside of any its number is -1


class OffloadedTensor(Recipe):
    """A storage elsewhere, in the place of the recipe of an op.

    Attributes:
        number: Position in the forward pass, among the recipes.
        ticket: What the tier gave for it; None until it sets out.
        had_in: The backward that fetched it last.
        original: The tensor itself, kept beside to be compared with what comes back; None but in rehearsals.
    """

    __slots__ = ("_like", "_value", "_version", "_witness", "had_in", "move", "original", "ticket")

    def __init__(self, number: int, move: Move, run: ExecutionState) -> None:
        self.number, self.move, self.run = number, move, run
        self.inputs = ()
        self.tensor = None  # its Value has it
        self.transient_replays = 0  # it is fetched for good
        self.ticket: Ticket | None = None
        self.had_in = _NONE
        self.original: torch.Tensor | None = None

    def stand_for(self, value: Value, tensor: torch.Tensor, version: int) -> None:
        """``value`` is what comes back, as ``tensor`` looks at its storage; written after ``version`` it may not be."""
        self._value = weakref.ref(value)
        self.outputs = (self._value,)
        self._like = ViewSpec(tensor)
        # Counts writes together with the tensor, and holds nothing of it.
        self._witness = sharing_version(tensor)
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._version = version

    def replay(self, *, keep: bool, wanted: Container[Value] | None = None) -> None:
        """Fetch, and hand the tensor to the Value if it still lives.

        Args:
            keep, wanted: As for a recipe; with either the copy stays where it is.

        Raises:
            RuntimeError: plain autograd's own, the original was changed in place since.
            TierError: the tier lost it, or gives back something else.
        """
        if self._witness._version != self._version:
            raise modified_in_place(self._witness, self._like.size, self._version)
        value = self._value()
        if value is None or self.ticket is None:
            return
        value.tensor = self._like.view_of(self.ticket.fetch())
        self.had_in = torch._C._current_graph_task_id()
        original, self.original = self.original, None
        if original is not None and not same_bits(value.tensor, original):
            raise TierError(
                f"the {self.move.tier} tier gave back other bits than it was given, for a tensor of shape "
                f"{list(original.shape)}.\nNothing has been attached. Use another device, or plan without that tier."
            )
        if wanted is None:
            value.uses_left = value.users + min(value.uses_left, 0) if keep else -1
            if not keep:
                value.make_final()


class Transfers:
    """What moves in one forward pass and its backward."""

    def __init__(self, tiers: Tiers, max_inflight_bytes: int) -> None:
        self._tiers, self._window_bytes = tiers, max_inflight_bytes
        self._lock = threading.RLock()  # backward may unpack from several threads
        self._outgoing: deque[OffloadedTensor] = deque()
        self._outgoing_bytes = 0
        self._sent: list[tuple[int, int, weakref.ref[OffloadedTensor]]] = []  # what is fetched before it is needed
        self._due: deque[tuple[int, int, weakref.ref[OffloadedTensor]]] = deque()
        self._unpacks = 0
        self._backward = _NONE

    def send(self, copy: OffloadedTensor, storage: torch.UntypedStorage) -> None:
        """A copy of ``storage`` sets out, after as many before it have settled as the window wants.

        Raises:
            TierError: the tier has no room, or an earlier copy failed.
        """
        with self._lock:
            size = copy.move.bytes
            while self._outgoing and self._outgoing_bytes + size > self._window_bytes:
                self._settle()
            copy.ticket = self._tiers[copy.move.tier].store(storage)
            self._outgoing.append(copy)
            self._outgoing_bytes += size
            if copy.move.fetch_at is not None:  # of several at once the last made first: backward goes back
                self._sent.append((copy.move.fetch_at, -copy.move.storage, weakref.ref(copy)))

    def settle(self) -> None:
        """Wait for all copies on their way out. Raises: TierError: one failed."""
        with self._lock:
            while self._outgoing:
                self._settle()

    def _settle(self) -> None:
        copy = self._outgoing.popleft()
        self._outgoing_bytes -= copy.move.bytes
        if copy.ticket is not None:
            copy.ticket.settle()

    def asked(self) -> None:
        """Backward unpacks something, of this pass or another: start what is due.

        Raises:
            TierError: a copy failed.
        """
        with self._lock:
            task = torch._C._current_graph_task_id()
            if task > self._backward:  # a backward of its own; one inside another has come back where it is less
                self.settle()
                self._backward, self._unpacks = task, 0
                self._due = deque(sorted(self._sent, key=lambda entry: entry[:2]))
            while self._due and self._due[0][0] <= self._unpacks:
                copy = self._due.popleft()[2]()
                # A dead one nobody wants any more.
                if copy is not None and copy.ticket is not None and copy.had_in != self._backward:
                    copy.ticket.start()
            self._unpacks += 1
