"""Measured links, kept in ``links.json`` in the cache directory (``cache_files.py``).

An entry is for one host, one tier, one device or file system and one version of PyTorch, and is valid for a week. If
the file is damaged, cannot be read or written, or is not the user's own, links are measured as if there were none.
"""

import json
import logging
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from lowtide.cache_files import cache_dir, read_file, write_file
from lowtide.device.names import device_name
from lowtide.graph.costs import DISK, Link

VERSION = 1
VALID_S = 7 * 24 * 3600
_MOST_ENTRIES = 64
_log = logging.getLogger(__name__)


def path() -> Path:
    """Path of the file."""
    return cache_dir() / "links.json"


def key_of(tier: str, device: str, directory: str | Path) -> str:
    """The key of a link. All directories of one file system have the same key, and count for the disk tier only."""
    on_disk = tier == DISK
    where = f"{os.stat(directory).st_dev}/{os.statvfs(directory).f_fsid}" if on_disk else device_name(device)
    return " | ".join((platform.node(), tier, where, f"torch {torch.__version__}"))


def recall(key: str) -> Link | None:
    """The link stored under ``key``; None if there is none that is valid."""
    row = _read().get(key)
    try:
        store, fetch, latency, at = (float(number) for number in row)  # type: ignore[union-attr]
    except (TypeError, ValueError):
        return None
    sound = all(map(math.isfinite, (store, fetch, latency))) and store > 0 and fetch > 0 and latency >= 0
    return Link(store, fetch, latency) if sound and 0 <= time.time() - at <= VALID_S else None


def remember(key: str, link: Link) -> None:
    """Store ``link`` under ``key``."""
    others = [row for row in _read().items() if row[0] != key]
    rows = dict(others[-_MOST_ENTRIES + 1 :])
    rows[key] = [link.store_bytes_per_s, link.fetch_bytes_per_s, link.latency_ms, time.time()]
    try:
        write_file(path(), json.dumps({"version": VERSION, "links": rows}).encode())
    except OSError as error:
        _log.info("the link's speed is not kept for next time: %s", error)


def _read() -> dict[str, Any]:
    try:
        body = json.loads(read_file(path()))
    except (OSError, ValueError, RecursionError):  # none yet, not the user's own, or damaged
        return {}
    rows = body.get("links") if isinstance(body, dict) and body.get("version") == VERSION else None
    return rows if isinstance(rows, dict) else {}
