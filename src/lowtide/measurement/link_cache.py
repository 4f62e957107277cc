"""Measured links, kept in ``lowtide/links.json`` in the user's cache directory.

An entry is for one host, one tier, one device or file system and one version of PyTorch, and is valid for a week. If
the file is damaged, or cannot be read or written, links are measured as if there were none.
"""

import json
import logging
import math
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lowtide.graph.costs import DISK, Link
from lowtide.measurement.device import device_name

VERSION = 1
VALID_S = 7 * 24 * 3600
_MOST_ENTRIES = 64
_log = logging.getLogger(__name__)


def path() -> Path:
    """Path of the file, in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says to ignore a path that is not absolute.
    return Path(home if os.path.isabs(home) else os.path.expanduser("~/.cache")) / "lowtide" / "links.json"


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
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A process that reads meanwhile sees the old file or the new one, never a part.
        fd, name = tempfile.mkstemp(prefix="links-", dir=file.parent)
        try:
            with os.fdopen(fd, "w") as written:
                json.dump({"version": VERSION, "links": rows}, written)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        _log.info("the link's speed is not kept for next time: %s", error)


def _read() -> dict[str, Any]:
    try:
        body = json.loads(path().read_text())
    except (OSError, ValueError, RecursionError):  # none yet, or damaged
        return {}
    rows = body.get("links") if isinstance(body, dict) and body.get("version") == VERSION else None
    return rows if isinstance(rows, dict) else {}
