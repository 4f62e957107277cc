"""An allocator's refusal: how it is known, and how much was missing."""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowtide.device.memory import available_bytes, release_cached_memory
from lowtide.errors import RehearsalMemoryError
from lowtide.units import parse_budget

# What errors say that have no class of their own: the CPU's allocator, cuBLAS and cuDNN, other backends.
_REFUSALS = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
_TRIED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)
_FREE = re.compile(r"of which ([\d.]+ ?\w+) is free")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator has refused."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(refusal in str(error) for refusal in _REFUSALS)


@contextmanager
def told_by_name(while_what: str, way_out: str) -> Iterator[None]:
    """Turn an allocator's refusal inside into ``RehearsalMemoryError``, and free what the code inside has made."""
    try:
        yield
        return
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).splitlines()[0]
        let_go_of_frames(error)
    gc.collect()  # the step's graph is a cycle
    release_cached_memory()
    raise RehearsalMemoryError(f"memory ran out while {while_what}: {said}\n{way_out}")


def missing_bytes(error: BaseException, device: torch.device) -> int | None:
    """By how much the refused allocation was larger than what was free; None where that is not known.

    From the allocator's message; where it does not say what was free, that is read now. So ask while the error's
    frames still hold what the step had made.
    """
    tried = _bytes_in(_TRIED.search(str(error)))
    if tried is None:
        return None
    free = _bytes_in(_FREE.search(str(error)))
    free = available_bytes(device) if free is None else free
    if free is None:
        return None
    missing = tried - free
    return missing if missing > 0 else None  # else memory was in pieces, or somebody has freed some since


def let_go_of_frames(error: BaseException | None) -> None:
    """Free what the code that failed has made. Clearing the frames' locals is not enough: functions have closures."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def tried_bytes(error: BaseException) -> int:
    """Bytes of the refused allocation; 0 where the message does not say."""
    return _bytes_in(_TRIED.search(str(error))) or 0


def _bytes_in(found: re.Match[str] | None) -> int | None:
    if found is None:
        return None
    try:
        parsed = parse_budget(found[1].replace("bytes", "B"))
    except ValueError:
        return None
    return parsed if isinstance(parsed, int) else None
