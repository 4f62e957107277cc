"""Making stored values again: in program order, each absent one once, dropped after its last reader."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd  # where ops were recorded

from lowtide.device.streams import run_in_order_on
from lowtide.errors import ReplayError
from lowtide.step.execution_state import no_autocast
from lowtide.tape.online.online_values import MARK, StoredValue

MOST_UNSPLIT_BYTES = 1 << 20  # of a large block, which counts as a whole; where segments grow, each block is split
_WORD = 8  # bytes, for each of which an accelerator says whether they are the same
Made = list[tuple[StoredValue, Tensor]]


def chain_of(values: Iterable[StoredValue], *, later: bool = False) -> list[StoredValue] | None:
    """``values`` and the absent ones that they are made from, in program order; None if one cannot be made again.

    Args:
        later: When backward comes to them. Parameters that are not gathered now will be then.
    """
    found = {id(v): v for v in values}
    todo = list(found.values())
    while todo:
        value = todo.pop()
        recipe = value.recipe
        if recipe is None or value.why_kept or recipe.is_stale or (recipe.gathered and not later and recipe.is_closed):
            return None
        for read in value.inputs:
            if read.is_present or id(read) in found:
                continue
            if read.is_root_for(value):
                storage = read.storage()
                if storage is None or storage.__dict__.get(MARK) is not read:
                    return None
                continue
            found[id(read)] = read
            todo.append(read)
    return sorted(found.values(), key=lambda v: v.number)


def why_not_made(target: StoredValue) -> ReplayError:
    """The error for a value that has no ``chain_of`` any more: what an op of it read has been written."""
    todo, seen = [target], set[int]()
    while todo:
        value = todo.pop()
        if value.recipe is not None and (error := value.recipe.why_stale()) is not None:
            return error
        todo += [read for read in value.inputs if not read.is_present and id(read) not in seen]
        seen.update(id(read) for read in todo)
    return ReplayError("a released tensor cannot be made again.\nThis is a bug in lowtide.")


def room_bytes(value: StoredValue) -> int:
    """What making ``value`` allocates: its op's other outputs and workspace too."""
    return value.bytes if value.recipe is None else value.recipe.room_bytes


def transient_bytes(chain: list[StoredValue], targets: Iterable[StoredValue]) -> int:
    """Most bytes that live at once while ``chain`` runs and each target goes as soon as it is made and compared.

    On a device a large block may be handed out whole, with up to 1 MiB more; the releaser leaves that free for one.
    """
    wanted = {id(v) for v in targets}
    left = _reader_counts(chain)
    live = peak = 0
    held: dict[int, int] = {}
    for value in chain:
        compared = value.bytes // _WORD if id(value) in wanted and value.run.stream is not None else 0
        peak = max(peak, live + room_bytes(value) + compared)
        if id(value) not in wanted and left.get(id(value)):
            unsplit = value.run.most_unsplit_bytes if value.bytes > MOST_UNSPLIT_BYTES else 0
            held[id(value)] = value.bytes + unsplit
            live += value.bytes + unsplit
        for read in value.inputs:
            left[id(read)] -= 1
            if not left[id(read)]:
                live -= held.pop(id(read), 0)
    return peak


def pinned_bytes(chain: list[StoredValue]) -> int:
    """Bytes that a release of the last of ``chain`` would pin: roots that nothing else holds for the tape."""
    roots = {id(r): r.bytes for v in chain for r in v.inputs if not r.is_present and r.is_root_for(v)}
    return sum(roots.values())


def run_chain(
    chain: list[StoredValue],
    targets: Iterable[StoredValue],
    before: Callable[[StoredValue], None],
    take: Callable[[StoredValue, Made], Made],
) -> None:
    """Run the recipes of ``chain``: of what is absent, and of ``targets`` even if they are present.

    Args:
        before: Called before a recipe runs.
        take: Is given what a recipe made; returns what later recipes of the chain may read.
    """
    run_anyway = {id(v) for v in targets}
    left = _reader_counts(chain)
    transient: dict[StoredValue, Tensor] = {}
    with ExitStack() as stack:
        locked = stack.enter_context(inputs_locked(chain))
        stack.enter_context(below_autograd())
        stack.enter_context(no_autocast())
        # FSDP allocates on streams of its own, which do not wait for what is read here, and need no workspaces.
        stack.enter_context(run_in_order_on(chain[0].run.stream if chain else None))
        for value in chain:
            if id(value) in run_anyway or (not value.is_present and value not in transient):
                before(value)
                recipe = value.recipe
                assert recipe is not None
                tensors = recipe.run(transient)
                made = [(o, tensors[n]) for n, ref in recipe.outputs if (o := ref()) is not None]
                del tensors
                run_anyway.difference_update(id(other) for other, _ in made)  # one run gives all of an op's outputs
                # No name of the loop's may hold one of them: that would live until the next one is kept.
                transient.update({other: tensor for other, tensor in take(value, made) if left.get(id(other))})
                del made
            for read in value.inputs:
                locked.popleft().locked -= 1
                left[id(read)] -= 1
                if not left[id(read)]:
                    transient.pop(read, None)


@contextmanager
def inputs_locked(chain: list[StoredValue]) -> Iterator[deque[StoredValue]]:
    """What ``chain`` reads stays; taken from the left of the deque, one is free again."""
    locked = deque(read for value in chain for read in value.inputs)
    for read in locked:
        read.locked += 1
    try:
        yield locked
    finally:
        for read in locked:
            read.locked -= 1


def _reader_counts(chain: list[StoredValue]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for value in chain:
        for read in value.inputs:
            counts[id(read)] = counts.get(id(read), 0) + 1
    return counts
