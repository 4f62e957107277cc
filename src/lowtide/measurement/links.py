"""Speed of the links to other tiers: bytes per second and latency, kept by machine, tier and file system.

A disk is measured without the page cache: writes until they are on the device, reads after the cache has dropped the
file. Known weakness: a machine with spare memory is faster than planned.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lowtide.device.names import is_accelerator
from lowtide.device.pinning import PinningError, host_buffer, pinned_buffer, unpin
from lowtide.device.streams import synchronize, why_no_streams
from lowtide.errors import TierError
from lowtide.graph.costs import DISK, HOST, TIERS, Link
from lowtide.measurement import link_cache
from lowtide.scratch_file import open_scratch, read_all, write_all
from lowtide.units import format_bytes

_LARGE, _SMALL = 1 << 25, 1 << 12
_REPEATS = 3
_known: dict[str, Link] = {}


def measured_link(tier: str, device: str, scratch_dir: str | Path | None = None, *, refresh: bool = False) -> Link:
    """Return the link between ``device`` and ``tier``. Arguments and errors: as of ``measure``."""
    if tier not in TIERS:
        raise ValueError(f"tier {tier!r} is not known. Use {' or '.join(map(repr, TIERS))}.")
    check_tier(tier, device)
    if tier == HOST and (why := why_no_streams(device)):
        raise TierError(f"{device} cannot copy beside the computation: {why}\nPass host_budget=None.")
    where = tempfile.gettempdir() if scratch_dir is None else scratch_dir
    try:
        key = link_cache.key_of(tier, device, where)
    except OSError:  # the directory does not exist: measuring raises the error
        key = str(where)
    link = None if refresh else _known.get(key) or link_cache.recall(key)
    if link is None:
        link = _disk(scratch_dir) if tier == DISK else _host(torch.device(device))
        link_cache.remember(key, link)
    _known[key] = link
    return link


def check_tier(tier: str, device: str) -> None:
    """Check that ``device`` has ``tier``. Raises: TierError: it has none."""
    kind = torch.device(device).type
    if tier == HOST and not is_accelerator(kind):
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
        numbers = torch.Generator("cpu").manual_seed(0)
        block = host_buffer(_LARGE).random_(256, generator=numbers)
        data = memoryview(block.numpy())

        def store(size: int) -> None:
            write_all(fd, data[:size], 0)
            os.fdatasync(fd)

        def fetch(size: int) -> None:
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
            read_all(fd, data[:size], 0)

        return _link(store, fetch)
    finally:
        os.close(fd)


def _host(device: torch.device) -> Link:
    try:
        on_device = torch.empty(_LARGE, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise TierError(
            f"{device} has not the {format_bytes(_LARGE)} left that measuring its link to host memory takes.\n"
            "Free memory of the device, or pass host_budget=None."
        ) from error
    try:
        on_host = pinned_buffer(_LARGE)
    except PinningError as error:
        raise TierError(
            f"{format_bytes(_LARGE)} of host memory could not be pinned: {error}\n"
            "Raise the system's limit of locked memory, or pass host_budget=None."
        ) from error

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        synchronize(device)

    try:
        return _link(lambda n: copy(on_host[:n], on_device[:n]), lambda n: copy(on_device[:n], on_host[:n]))
    finally:
        unpin([on_host])


def _link(store: Callable[[int], None], fetch: Callable[[int], None]) -> Link:
    store(_LARGE)  # the first store also allocates
    store_s, fetch_s = _median_s(store, _LARGE), _median_s(fetch, _LARGE)
    latency_s = min(_median_s(store, _SMALL), _median_s(fetch, _SMALL))
    return Link(_LARGE / max(store_s, 1e-9), _LARGE / max(fetch_s, 1e-9), latency_ms=1e3 * latency_s)


def _median_s(transfer: Callable[[int], None], size: int) -> float:
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        transfer(size)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
