"""How fast the links to other tiers are, here: measured once a machine, tier and file system (``link_cache.py``).

A disk is measured as it performs when memory has none to spare for its cache: writes until they are on the device,
reads after the cache has let go of the file. Where there is memory to spare it will do better than planned.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lowtide.errors import TierError
from lowtide.graph.costs import DISK, HOST, TIERS, Link
from lowtide.measurement import link_cache
from lowtide.scratch_file import open_scratch, read_all, write_all
from lowtide.units import format_bytes

_LARGE, _SMALL = 1 << 25, 1 << 12
_REPEATS = 3
_known: dict[tuple[str, str, str], Link] = {}


def measured_link(tier: str, device: str, scratch_dir: str | Path | None = None, *, refresh: bool = False) -> Link:
    """The link between ``device`` and ``tier``, as measured not long ago or, with ``refresh``, now.

    Raises:
        ValueError: there is no tier of that name.
        TierError: this device has no such tier, or the directory cannot be used.
    """
    if tier not in TIERS:
        raise ValueError(f"tier {tier!r} is not known. Use {' or '.join(map(repr, TIERS))}.")
    check_tier(tier, device)
    where = Path(tempfile.gettempdir() if scratch_dir is None else scratch_dir)
    key = (tier, str(torch.device(device)), "" if tier == HOST else str(where.resolve()))
    if key in _known and not refresh:
        return _known[key]
    written = _written_as(tier, device, where)
    link = None if refresh or written is None else link_cache.recall(written)
    if link is None:
        link = _disk(scratch_dir) if tier == DISK else _host(torch.device(device))
        if written is not None:
            link_cache.remember(written, link)
    _known[key] = link
    return link


def _written_as(tier: str, device: str, where: Path) -> str | None:
    """The link's key in the cache; None where the directory is not there, which measuring it will say."""
    try:
        return link_cache.key_of(tier, device, where)
    except OSError:
        return None


def check_tier(tier: str, device: str) -> None:
    """Raises: TierError: ``device`` has no such tier."""
    kind = torch.device(device).type
    if tier == HOST and kind != "cuda":
        raise TierError(
            f"there is no host tier beside a model on {kind}: its memory is the host's.\n"
            "Leave host_budget= out, and use the disk tier: scratch_dir= or disk_budget=."
        )
    if tier == DISK and kind != "cpu":
        raise TierError(
            f"the disk tier holds storages of models on cpu, this one is on {kind}.\n"
            "Leave scratch_dir= and disk_budget= out, and use the host tier: host_budget=."
        )


def _disk(scratch_dir: str | Path | None) -> Link:
    fd = open_scratch(scratch_dir, _LARGE)
    try:
        block = torch.zeros(_LARGE, dtype=torch.uint8).random_(256, generator=torch.Generator().manual_seed(0))
        address = block.data_ptr()

        def store(size: int) -> None:
            write_all(fd, address, size, 0)
            os.fdatasync(fd)

        def fetch(size: int) -> None:
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
            read_all(fd, address, size, 0)

        return _link(store, fetch)
    finally:
        os.close(fd)


def _host(device: torch.device) -> Link:
    ours = torch.empty(_LARGE, dtype=torch.uint8, device=device)
    try:
        theirs = torch.empty(_LARGE, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise TierError(
            f"{format_bytes(_LARGE)} of host memory could not be pinned: {str(error).splitlines()[0]}\n"
            "Raise the system's limit of locked memory, or pass host_budget=None."
        ) from error

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return _link(lambda n: copy(theirs[:n], ours[:n]), lambda n: copy(ours[:n], theirs[:n]))


def _link(store: Callable[[int], None], fetch: Callable[[int], None]) -> Link:
    store(_LARGE)  # the first one also allocates
    large = [_median_s(move, _LARGE) for move in (store, fetch)]
    small = [_median_s(move, _SMALL) for move in (store, fetch)]
    store_bytes_per_s, fetch_bytes_per_s = (_LARGE / max(s, 1e-9) for s in large)
    return Link(store_bytes_per_s, fetch_bytes_per_s, latency_ms=1e3 * min(small))


def _median_s(move: Callable[[int], None], size: int) -> float:
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        move(size)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
