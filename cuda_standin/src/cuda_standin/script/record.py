"""What this process has seen so far, and the file that it is written to."""

import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from cuda_standin import control, symbols
from cuda_standin.script.request import request

began = time.perf_counter()
process = os.getpid()
stages: list[dict[str, Any]] = []
step_records: list[dict[str, Any]] = []
notes: set[str] = set()
helpers: list[str] = []  # folders of plugins: their lines say nothing of the script either, and their steps are none
before_write: list[Callable[[], object]] = []  # of plugins
facts: dict[str, Any] = {}  # one of a kind: what the peak consists of, the message of an error
out_of_memory: list[dict[str, Any]] = []
backward_lines: list[tuple[int, str]] = []  # microseconds, and the script's line that called backward
stops: dict[tuple[str, str], int] = {}  # line and operator -> how often the host waited there, in the last whole step
_HERE = str(Path(__file__).parents[1]) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = tuple({os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep})


def reached(stage: str) -> None:
    """Notes when ``stage`` was reached for the first time."""
    if all(stage != known["stage"] for known in stages):
        stages.append({"stage": stage, "seconds": round(time.perf_counter() - began, 3)})
        write()  # whoever waits sees that there is progress


def is_package(file: str) -> bool:
    return any(part in file for part in _PACKAGES)


def is_machinery(file: str) -> bool:
    """PyTorch, the standard library and this package: a line of theirs says nothing of the script."""
    if file.startswith((_HERE, "<", *helpers)) or "/torchinductor_" in file or ("/torch/" in file and is_package(file)):
        return True
    return file.startswith(_STANDARD) and not is_package(file)


def is_called_by_helper(frame: FrameType | None) -> bool:
    """Whether the innermost caller outside PyTorch is a plugin."""
    while frame is not None and is_machinery(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(tuple(helpers)):
            return True
        frame = frame.f_back
    return False


def short(file: str) -> str:
    """A path as people know it: from its package on, or from the working directory."""
    for part in _PACKAGES:
        if part in file:
            return file.split(part)[-1]
    here = os.getcwd() + os.sep
    return file.removeprefix(here)


def lines_of(frame: FrameType | None) -> tuple[str, str]:
    """The innermost line outside PyTorch, and the innermost line outside all packages: the script's own."""
    first = script = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_machinery(file):
            line = f"{short(file)}:{frame.f_lineno}"
            first = first or line
            if not is_package(file):
                script = line
                break
        frame = frame.f_back
    return first or "backward", script


def stack_of(frame: FrameType | None, most: int = 40) -> list[str]:
    return [f"{short(f.filename)}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)[-most:]]


def main_frame() -> FrameType | None:
    """Of the thread that the script runs in: autograd's own threads have no line."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def write() -> None:
    """Write what is known beside the request; whole or not at all."""
    if os.getpid() != process:
        return  # a fork
    for function in before_write:
        function()
    from cuda_standin.script import composition

    counters = control.counters()
    left_out = control.report().without_values
    body = {
        "pid": process,
        "argv": sys.argv,
        "seconds": round(time.perf_counter() - began, 3),
        "stages": stages,
        "steps": step_records,
        "out_of_memory": out_of_memory,
        "stops": [
            {"line": line, "operator": name, "count": count}
            for (line, name), count in sorted(stops.items(), key=lambda item: -item[1])
        ],
        "launches": counters.launches,
        "pinned_peak_bytes": counters.pinned_peak_bytes,
        "without_values": {name: list(found) for name, found in left_out.items()},
        "unsupported": [f"{name} ({symbols.library_of(name)})" for name in control.unsupported_calls()],
        "foreign_libraries": control.foreign_libraries(),
        "notes": sorted(notes),
        **composition.found,
        **facts,
    }
    path = request().folder / f"report-{process}.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(body))
    new.replace(path)
