"""What an accelerator's allocator counts as allocated for a step, and what it reserves, at most.

Allocated bytes are those of ``torch.accelerator.max_memory_allocated``: a block counts whole, with what is not split
off it. Reserved bytes are those that a device's own tools show for the process.

The step starts from an allocator that holds what is resident and nothing else, and runs until another run reserves
nothing more. After each comes ``optimizer.step()``, where the graph knows the optimizer; its temporaries are reserved
and are no part of what counts as allocated, as in the graph. So memory that others left cached and other shapes are
not part of it. What resident tensors count is what ``graph.resident`` says, which on an accelerator is the statistic
itself.

``training_peaks`` begins earlier, with parameters alone: the first ``optimizer.step()`` makes its state in what
activations have left, so the next steps reserve more, and each makes its temporaries. Gradients come in backward, the
BLAS library's workspaces with the first products.

Known weakness: of most kernels the order of temporaries is not known (``kernel_blocks.py`` has some; others count as
one block), nor how an optimizer's state and temporaries are cut into tensors (they count as copies of the gradients),
nor what lies between resident tensors. So a step that just fills a segment may need one more, and what is not split off
a large block may differ.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle

from lowtide.graph.gradients import with_gradients_before, with_gradients_made
from lowtide.graph.step_graph import NEW_GRADIENT, StepGraph
from lowtide.plan import Moves
from lowtide.simulation.block_log import Change, block_log
from lowtide.simulation.caching_allocator import (
    OTHER_ALLOCATORS,
    Block,
    CachingAllocator,
    Segment,
    expandable_segments_here,
)

MOST_STEPS = 4
_KIND_OF = {
    "parameters": "parameter", "gradients": "gradient", "buffers": "buffer", "batch": "input", "optimizer": "gradient",
}  # fmt: skip


@dataclass(frozen=True)
class AllocatorPeaks:
    """Most bytes in steps, resident memory included.

    Attributes:
        counted_bytes: Allocated, by the allocator's statistics.
        reserved_bytes: Taken from the device.
    """

    counted_bytes: int
    reserved_bytes: int


def allocator_peaks(
    graph: StepGraph,
    actions: Mapping[int, str],
    replays: Mapping[int, int],
    moves: Moves,
    *,
    expandable_segments: bool | None = None,
) -> AllocatorPeaks | None:
    """What the device's allocator counts and reserves at most.

    Args:
        expandable_segments: Whether the allocator's segments grow; None: as this process's environment sets it.

    Returns:
        None where it is not known, for which ``why_unknown`` has a reason.

    Raises:
        PlanMismatchError: a value is unpacked whose recipe is gone.
    """
    grows = expandable_segments_here() if expandable_segments is None else expandable_segments
    if grows is None or graph.device in OTHER_ALLOCATORS:
        return None
    changes = block_log(graph, actions, replays, moves, frees_gradients=False)
    found = _steps_until_settled(graph, changes, [], grows)
    temporaries = list(_like_gradients(graph, graph.optimizer_step_bytes))
    if temporaries:
        reserved_bytes = _steps_until_settled(graph, changes, temporaries, grows).reserved_bytes
        found = replace(found, reserved_bytes=reserved_bytes)
    return found


def _steps_until_settled(
    graph: StepGraph, changes: tuple[Change, ...], temporaries: list[int], grows: bool
) -> AllocatorPeaks:
    """Of steps with these ``changes``: each leaves its gradients, the optimizer takes ``temporaries``, and they go."""
    allocator = CachingAllocator(expandable_segments=grows)
    for size in resident_blocks(graph):
        allocator.allocate(size)
    resident = most = allocator.allocated_bytes
    for _ in range(MOST_STEPS):
        before = allocator.reserved_bytes
        gradients, high = _played(allocator, changes)
        most = max(most, high)
        _used_for_a_moment(allocator, temporaries)
        for block in gradients:
            allocator.free(block)
        if allocator.reserved_bytes == before:
            break
    return AllocatorPeaks(graph.start_bytes + most - resident, allocator.reserved_bytes)


def counted_from(
    segments: Iterable[Segment], graph: StepGraph, actions: Mapping[int, str], replays: Mapping[int, int], moves: Moves
) -> int:
    """What the allocator counts at most in steps that begin with what it holds, in ``segments``, now.

    Raises:
        PlanMismatchError: a value is unpacked whose recipe is gone.
    """
    changes = block_log(graph, actions, replays, moves, frees_gradients=False)
    allocator = CachingAllocator.with_segments(segments)
    most = 0
    for _ in range(MOST_STEPS):
        before = allocator.reserved_bytes
        gradients, high = _played(allocator, changes)
        most = max(most, high)
        for block in gradients:
            allocator.free(block)
        if allocator.reserved_bytes == before:
            break
    return most


def training_peaks(
    graph: StepGraph,
    actions: Mapping[int, str],
    replays: Mapping[int, int],
    moves: Moves,
    *,
    gradients_kept: bool = False,
    micro_batches: int = 1,
    expandable_segments: bool | None = None,
) -> AllocatorPeaks | None:
    """``allocator_peaks`` of a training that begins: its first steps, each with ``optimizer.step()``.

    Args:
        gradients_kept: They are zeroed after a step, or freed only once the next one's forward has run; else freed.
        micro_batches: Before each step of the optimizer.

    Returns:
        As ``allocator_peaks``.
    """
    grows = expandable_segments_here() if expandable_segments is None else expandable_segments
    if grows is None or graph.device in OTHER_ALLOCATORS:
        return None
    allocator = CachingAllocator(expandable_segments=grows)
    later = ("gradients", "optimizer", "workspaces")
    for size in resident_blocks(replace(graph, resident={k: v for k, v in graph.resident.items() if k not in later})):
        allocator.allocate(size)
    workspaces = graph.resident.get("workspaces", 0)
    made = with_gradients_made(graph)
    new = block_log(made, actions, replays, moves, frees_gradients=False)
    first, more = new, new
    if workspaces:
        first = block_log(made, actions, replays, moves, frees_gradients=False, workspaces=workspaces)
    if gradients_kept or micro_batches > 1:
        more = block_log(with_gradients_before(graph), actions, replays, moves)
    state = list(resident_blocks(replace(graph, resident={"optimizer": graph.resident.get("optimizer", 0)})))
    temporaries = list(_like_gradients(graph, graph.optimizer_step_bytes))
    most, gradients = 0, list[Block]()
    for step in range(MOST_STEPS + 1):
        before = allocator.reserved_bytes
        for micro_batch in range(min(micro_batches, 2)):
            begins = first if step == micro_batch == 0 else new
            left, high = _played(allocator, more if gradients else begins)
            gradients += left
            most = max(most, high)
        if step == 0:
            for size in state:
                allocator.allocate(size)
        most = max(most, _used_for_a_moment(allocator, temporaries))
        if not gradients_kept:
            while gradients:
                allocator.free(gradients.pop())
        if step and allocator.reserved_bytes == before:
            break
    return AllocatorPeaks(most, allocator.reserved_bytes)


def _played(allocator: CachingAllocator, changes: tuple[Change, ...]) -> tuple[list[Block], int]:
    """(gradients that are left, most allocated bytes) of one step."""
    blocks: dict[int, Block] = {}
    most = 0
    for number, size in changes:
        if size:
            blocks[number] = allocator.allocate(size)
            most = max(most, allocator.allocated_bytes)
        else:
            allocator.free(blocks.pop(number))
    return [block for number, block in blocks.items() if number > 0], most


def _used_for_a_moment(allocator: CachingAllocator, sizes: list[int]) -> int:
    """Allocated bytes while blocks of ``sizes`` are there."""
    made = [allocator.allocate(size) for size in sizes]
    most = allocator.allocated_bytes
    for block in made:
        allocator.free(block)
    return most


def _like_gradients(graph: StepGraph, left: int) -> Iterator[int]:
    """``left`` bytes in blocks as large as gradients, in their order, once and again."""
    for size in cycle(_gradient_sizes(graph)):
        if size > left:
            break
        yield size
        left -= size
    if left:
        yield left


def _gradient_sizes(graph: StepGraph) -> list[int]:
    """Of gradients from before the step and of those that it makes, in the order of their parameters."""
    left = Counter(s.bytes for s in graph.storages if s.kind in ("gradient", NEW_GRADIENT) and s.bytes)
    found = []
    for storage in graph.storages:
        if storage.kind == "parameter" and left[storage.bytes] > 0:
            left[storage.bytes] -= 1
            found.append(storage.bytes)
    return found + list(left.elements())


def why_unknown(device: str) -> str:
    """Why nothing is known of the allocator of a type of device, in this process; "" where it is."""
    if device in OTHER_ALLOCATORS:
        return f"memory of device {device!r} does not come from a caching allocator as modelled here"
    if expandable_segments_here() is None:
        return "PYTORCH_ALLOC_CONF sets something else than expandable_segments, which is not modelled"
    return ""


def resident_blocks(graph: StepGraph) -> Iterator[int]:
    """Bytes of the tensors that are there before the step; in all what ``graph.before`` says."""
    sizes: dict[str, list[int]] = {}
    for storage in graph.storages:
        if storage.op is None and storage.bytes:
            sizes.setdefault(storage.kind, []).append(storage.bytes)
    sizes["gradient"] = _gradient_sizes(graph)
    for part, left in graph.before.items():
        known = sizes.get(_KIND_OF.get(part, part), [])
        if part == "optimizer" and known:  # made for one parameter after the other
            times = max(1, left // sum(known))
            known = [size for size in known for _ in range(times)]
        for size in known:
            if size > left:
                break
            yield size
            left -= size
        if left:
            yield left
