"""The blocks that one simulated step asks its allocator for and gives back, in program order."""

from collections.abc import Collection, Mapping, Sequence

from lowtide.graph.products import is_product
from lowtide.graph.step_graph import NEW_GRADIENT, StepGraph
from lowtide.plan import Moves
from lowtide.simulation.kernel_blocks import KERNELS_OF, output_order, temporaries
from lowtide.simulation.references import GraphIndex, Probe, References
from lowtide.simulation.simulated_step import SimulatedStep

Change = tuple[int, int]  # number of a block, and the bytes it is asked for; 0 bytes: it is given back


def block_log(
    graph: StepGraph,
    actions: Mapping[int, str],
    replays: Mapping[int, int],
    moves: Moves,
    *,
    frees_gradients: bool = True,
    workspaces: int = 0,
) -> tuple[Change, ...]:
    """Changes of one step, beside what is there before; a block that the step leaves is given back at its end.

    Args:
        frees_gradients: If not, those that the step has made stay.
        workspaces: Bytes that are not there yet, of the BLAS library: each thread takes its part at its first product
            and keeps it, in a block of a negative number. What is replayed runs in backward's thread.

    An op takes its outputs in order, then its workspace, in blocks as ``kernel_blocks.py`` has them. Generator state
    that replays keep is left out: an accelerator's is in host memory.

    Raises:
        PlanMismatchError: a value is unpacked whose recipe is gone.
    """
    step = SimulatedStep(graph, actions, replays, moves, counted_by=_LoggedReferences)
    references = step.references
    assert isinstance(references, _LoggedReferences)
    references.note_kernels(graph)
    if workspaces:
        references.take_workspaces(graph, workspaces)
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
        self._makes: Sequence[tuple[int, ...]] = index.makes  # by op: outputs as they are allocated
        self._temporaries: list[tuple[int, ...]] = [(size,) if size else () for size in index.workspace_bytes]
        self._products: frozenset[int] = frozenset()
        self._backward: frozenset[int] = frozenset()  # of these, those of backward
        self._to_take: dict[bool, int] = {}  # by thread, whether it is backward's: bytes that it takes and keeps
        # Blocks by storage: of originals, of values, and of what the last replay made until it is a value.
        self._originals: dict[int, int] = {}
        self._values: dict[int, int] = {}
        self._remade: dict[int, int] = {}

    def note_kernels(self, graph: StepGraph) -> None:
        """How the kernels of the graph's device ask for memory."""
        if graph.device != KERNELS_OF:
            return
        self._makes = [tuple(op.makes[n] for n in output_order(op.name, len(op.makes))) for op in graph.ops]
        size = self.index.bytes
        given = [_shapes(signature) for signature in graph.signatures]
        self._temporaries = [
            temporaries(
                o.name,
                o.workspace_bytes,
                [size[s] for s in self.index.makes_again[o.id]],
                given[o.signature] if given else (),
            )
            for o in graph.ops
        ]

    def take_workspaces(self, graph: StepGraph, size: int) -> None:
        """``size`` bytes come with the threads' first products."""
        products = [op for op in graph.ops if is_product(op.name)]
        threads = {op.backward for op in products} or {False}
        self._products = frozenset(op.id for op in products)
        self._backward = frozenset(op.id for op in products if op.backward)
        self._to_take = dict.fromkeys(threads, size // len(threads))

    def retain(self, storage: int) -> None:
        if self.counts[storage] == 0:
            self._allocate(self._originals, storage)
        super().retain(storage)

    def release(self, storage: int) -> None:
        super().release(storage)
        if self.counts[storage] == 0:
            self._free(self._originals, storage)

    def run_op(self, op: int) -> None:
        for storage in self._makes[op]:
            self._allocate(self._originals, storage)
        self._use_workspace(op, op in self._backward)
        super().run_op(op)

    def replay_op(self, op: int) -> int:
        self._keep_remade()
        again = self.index.makes_again[op]
        for storage in self._makes[op] if len(again) == len(self._makes[op]) else again:
            self._allocate(self._remade, storage)
        self._use_workspace(op, in_backward=True)
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

    def _use_workspace(self, op: int, in_backward: bool) -> None:
        blocks = [self._new(size) for size in self._temporaries[op]]
        if op in self._products and in_backward in self._to_take:
            self._num_blocks += 1
            self.changes.append((-self._num_blocks, self._to_take.pop(in_backward)))
        self.changes += [(block, 0) for block in reversed(blocks)]

    def _new(self, size: int) -> int:
        self._num_blocks += 1
        self.changes.append((self._num_blocks, size))
        return self._num_blocks


def _shapes(signature: dict) -> list[list[int]]:
    """Of an operator's tensor arguments, in order."""
    return [a["t"] for a in signature.get("args", []) if isinstance(a, dict) and "t" in a]
