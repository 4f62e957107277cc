"""When what autograd stores of a watched step would end without a tape, which holds some of it for longer.

- Python's reference ends when only the tape still refers to the storage, which is looked up before each op.
- Autograd's ends with the last handle, and that of a node in backward when the node has let go of it.
"""

import torch
from torch._C import _current_autograd_node as current_node
from torch._C import _current_graph_task_id as graph_task
from torch._C import _storage_Use_Count as use_count

from lowtide.graph.step_graph import DROP, RELEASE, UNPACK
from lowtide.recording.graph_builder import GraphBuilder
from lowtide.recording.listener import Held
from lowtide.recording.live_storages import LiveStorages
from lowtide.step.operators import storage_of

_OWN_REFERENCES = 2  # to a storage that only the tape holds: its tensor, and the storage's Python object


class StoredTensors:
    """Of one step; ``builder`` gets their events."""

    def __init__(self, builder: GraphBuilder, storages: LiveStorages) -> None:
        self._builder, self._storages = builder, storages
        self._python_holds: dict[int, tuple[Held, int]] = {}  # stored, and not yet let go by Python
        self._handed_out: dict[int, _HandedOut] = {}  # by saved tensor

    def add(self, storage: int, value: Held | None) -> int:
        """Autograd stores a tensor of ``storage``: its number; ``value``: the tape's, if it has one."""
        saved = self._builder.add_saved(storage)
        if value is not None:
            self._python_holds[id(value)] = value, self._builder.saved[saved]
        return saved

    def note_given(self, saved: int, tensor: torch.Tensor) -> None:
        """Autograd has got ``tensor`` back."""
        self.drop_what_was_used()
        self._builder.add_event(UNPACK, saved)
        self._handed_out[saved] = _HandedOut(tensor)

    def note_released(self, saved: int) -> None:
        """Autograd has let a saved tensor go."""
        if self._handed_out.pop(saved, self) is not self:
            self._builder.add_event(DROP, saved)
        self._builder.add_event(RELEASE, saved)

    def drop_what_was_used(self) -> None:
        """What an earlier autograd node was given, it has used; and this one, what it has let go of."""
        if self._handed_out:
            node = _node()
            for saved in [s for s, given in self._handed_out.items() if given.node != node or given.is_let_go]:
                del self._handed_out[saved]
                self._builder.add_event(DROP, saved)

    def poll(self) -> None:
        """Which of the stored has Python let go since the last op?"""
        if graph_task() != -1:
            self.drop_what_was_used()
        for key, (value, number) in list(self._python_holds.items()):
            tensor = value.tensor
            if tensor is None:  # released, or autograd has let go: the storage's death tells
                del self._python_holds[key]
            elif use_count(tensor.untyped_storage()._cdata) <= _OWN_REFERENCES:
                self._storages.note_free(number)
                del self._python_holds[key]


class _HandedOut:
    """A tensor that an autograd node was given, which makes a tensor of its own of it.

    That ends with the node's own code. What autograd does then (it sums a gradient over the rows that a bias was
    broadcast to) is still part of the node.
    """

    __slots__ = ("_references", "_storage", "_taken", "_tensor", "node")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.node, self._taken = _node(), False
        self._tensor = tensor  # held: else the tape might let go of it, and the count would fall for that
        self._storage = storage_of(tensor)
        self._references = 0 if self._storage is None else use_count(self._storage._cdata)

    @property
    def is_let_go(self) -> bool:
        """Whether the node had it, and has it no more."""
        if self._storage is None:
            return False
        taken = use_count(self._storage._cdata) > self._references
        self._taken |= taken
        return self._taken and not taken


def _node() -> int | None:
    """The sequence number of the autograd node that runs now."""
    node = current_node()
    return None if node is None else node._sequence_nr()
