"""One case of a benchmark in a process of its own: on one thread, with a cache of its own, keeping its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any


def line_of(arguments: list[str], limit_s: float) -> dict[str, Any]:
    """The JSON line that ``python ARGUMENTS`` prints last; of one that fails, ``status`` and ``error``."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOWTIDE_CACHE_DIR": cache, "MALLOC_MMAP_MAX_": "0"}
        environment["MALLOC_TRIM_THRESHOLD_"] = str(1 << 40)  # memory stays: page faults flatter lean plans
        try:
            done = subprocess.run(
                [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=limit_s,
                check=False,
            )  # fmt: skip
            status, errors = f"ended with {done.returncode}", done.stderr
            if done.returncode == 0:
                return json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired as error:
            status, errors = f"no end after {limit_s} s", str(error.stderr or "")
    return {"status": status, "error": errors.splitlines()[-20:]}
