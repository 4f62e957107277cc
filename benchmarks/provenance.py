"""Where a result comes from: commit, versions and device, added to each JSON line."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def provenance() -> dict:
    import torch
    import transformers

    from lowtide.device.names import device_name

    return {
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def commit() -> str:
    """Short hash; ``+`` where tracked files other than results differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", ".", ":!results")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")
