"""The blocks that one simulated step asks its allocator for and gives back, in program order."""

from collections.abc import Collection, Mapping

from lowtide.graph.step_graph import NEW_GRADIENT, StepGraph
from lowtide.plan import Moves
from lowtide.simulation.references import GraphIndex, Probe, References
from lowtide.simulation.simulated_step import SimulatedStep

Change = tuple[int, int]  # number of a block, and the bytes it is asked for; 0 bytes: it is given back


def block_log(
    graph: StepGraph, actions: Mapping[int, str], replays: Mapping[int, int], moves: Moves, *,
    frees_gradients: bool = True,
) -> tuple[Change, ...]:  # fmt: skip
    """Changes of one step, beside what is there before; a block that the step leaves is given back at its end.

    Args:
        frees_gradients: If not, those that the step has made stay.

    An op takes its outputs in order, then its workspace as one block. Generator state that replays keep is left out:
    an accelerator's is in host memory.

    Raises:
        PlanMismatchError: a value is unpacked whose recipe is gone.
    """
    step = SimulatedStep(graph, actions, replays, moves, counted_by=_LoggedReferences)
    references = step.references
    assert isinstance(references, _LoggedReferences)
    step.play(graph.events)
    stay = {s.id for s in graph.storages if s.kind == NEW_GRADIENT and not frees_gradients}
    references.end(stay)
    return tuple(references.changes)


class _LoggedReferences(References):
    """Reference counts that write down which memory comes and goes."""

    def __init__(self, index: GraphIndex, actions: Mapping[int, str], probe: Probe | None = None) -> None:
        super().__init__(index, actions, probe)
        self.changes: list[Change] = []
        self._num_blocks = 0
        # Blocks by storage: of originals, of values, and of what the last replay made until it is a value.
        self._originals: dict[int, int] = {}
        self._values: dict[int, int] = {}
        self._remade: dict[int, int] = {}

    def retain(self, storage: int) -> None:
        if self.counts[storage] == 0:
            self._allocate(self._originals, storage)
        super().retain(storage)

    def release(self, storage: int) -> None:
        super().release(storage)
        if self.counts[storage] == 0:
            self._free(self._originals, storage)

    def run_op(self, op: int) -> None:
        for storage in self.index.makes[op]:
            self._allocate(self._originals, storage)
        self._use_workspace(op)
        super().run_op(op)

    def replay_op(self, op: int) -> int:
        self._keep_remade()
        for storage in self.index.makes[op]:
            self._allocate(self._remade, storage)
        self._use_workspace(op)
        return super().replay_op(op)

    def discard(self, storage: int) -> None:
        super().discard(storage)
        self._free(self._remade, storage)

    def fetch(self, storage: int) -> None:
        self._allocate(self._values, storage)
        super().fetch(storage)

    def dematerialise(self, storage: int) -> None:
        self._keep_remade()
        if storage in self.materialised:
            self._free(self._values, storage)
        super().dematerialise(storage)

    def end(self, stay: Collection[int]) -> None:
        """What the step leaves goes, but for these storages."""
        self._keep_remade()
        for blocks in (self._originals, self._values):
            for storage in list(blocks):
                if storage not in stay:
                    self._free(blocks, storage)

    def _keep_remade(self) -> None:
        """What was not discarded has become a value."""
        self._values.update(self._remade)
        self._remade.clear()

    def _allocate(self, blocks: dict[int, int], storage: int) -> None:
        size = self.index.bytes[storage]
        if size:
            blocks[storage] = self._new(size)

    def _free(self, blocks: dict[int, int], storage: int) -> None:
        number = blocks.pop(storage, None)
        if number is not None:
            self.changes.append((number, 0))

    def _use_workspace(self, op: int) -> None:
        size = self.index.workspace_bytes[op]
        if size:
            self.changes.append((self._new(size), 0))

    def _new(self, size: int) -> int:
        self._num_blocks += 1
        self.changes.append((self._num_blocks, size))
        return self._num_blocks
