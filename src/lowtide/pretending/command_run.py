"""Runs the command in an environment, ends all of its processes, and gives back what was seen inside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any

import psutil

from lowtide.pretending import environments
from lowtide.pretending.environments import ScriptEnvironment
from lowtide.pretending.settings import NCCL_BYTES, SKIPPED_ABOVE_BYTES, PretendError, PretendSettings

_PYTHON = ("python", "python3", "python3.11", "python3.12", "python3.13")
_LAST_WORDS = 60  # lines of the script's errors that are kept
_LINGERS_S = 20.0  # a process that has seen its last step may take that long to end
_MARK = "STANDIN_SCRIPT"


@dataclass(frozen=True)
class SentObjects:
    """For one run: the folder of what ranks send one another, and after which list it may end.

    Attributes:
        to: The receiver, and how many lists; None: the run goes on to its own end.
    """

    folder: Path
    to: tuple[int, int] | None = None


@dataclass(frozen=True)
class CommandRun:
    """What came of one run of the command.

    Attributes:
        seen: What the process that trained reported (``cuda_standin.script.record``); empty where none did.
        exit_code: 0 where the process was ended after the steps that were asked for.
        last_words: The end of what the script wrote to stderr.
        ended_because: Empty, or why it was ended before its time.
        step_record: What the stand-in recorded of one step, for its time (``step_record``); None where none was.
        host_peak_bytes: Of resident memory, of the process that took most.
    """

    command: tuple[str, ...]
    seen: dict[str, Any]
    exit_code: int
    seconds: float
    last_words: str = ""
    ended_because: str = ""
    host_peak_bytes: int = 0
    step_record: dict[str, Any] | None = None


def run(
    command: Sequence[str], settings: PretendSettings, environment: ScriptEnvironment, output: IO[str] | None = None,
    more_variables: Mapping[str, str] | None = None, change: str = "",
    clock_ms: tuple[float, float] | None = None, sent: SentObjects | None = None,
) -> CommandRun:  # fmt: skip
    """Run ``command`` to the steps asked for; its own output goes where ours goes, or all of it to ``output``.

    Args:
        clock_ms: The script's own clocks say that a step takes so long, and the host for its part of it.
        change: One of ``change_inside``'s, made in the script's process.
        sent: What other ranks have sent, where this is one of several runs.

    Raises:
        PretendError: The command is empty or is not there.
    """
    words = resolved(command, environment)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lowtide-pretend-") as made:
        folder = Path(made)
        (folder / "request.json").write_text(json.dumps(_request(settings, change, clock_ms, sent)))
        variables = _variables(settings, environment, folder) | dict(more_variables or {})
        if change:
            variables["LOWTIDE_PRETEND_CHANGE"] = change
        process = subprocess.Popen(
            words, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        kept: deque[str] = deque(maxlen=_LAST_WORDS)
        heard = sent is None or sent.to is None  # a run for another's sake says nothing
        reader = Thread(target=_pass_on, args=(process.stderr, kept, heard), daemon=True)
        reader.start()
        host_peak, why = 0, ""
        try:
            host_peak, why = _watched(process, folder, settings)
        finally:
            _end_all(folder)
        code = process.wait()
        reader.join(timeout=5)
        if process.stderr is not None:
            process.stderr.close()
        seen = _seen(folder)
        step_record = _step_record(folder, seen)
    if seen.get("counted") and not why:  # its steps are done; what came after them was for time
        code = 0
    return CommandRun(
        tuple(command), seen, code if code >= 0 else 128 - code, time.monotonic() - began, "".join(kept), why,
        host_peak, step_record,
    )  # fmt: skip


def resolved(command: Sequence[str], environment: ScriptEnvironment) -> list[str]:
    """The command's first word as the environment has it: its Python, its scripts, else the user's own."""
    if not command:
        raise PretendError(
            "there is no command. Write it after two dashes: lowtide pretend --device h100 -- python train.py"
        )
    first, *rest = command
    if first in _PYTHON:
        return [str(environment.python), *rest]
    if first.endswith(".py") and Path(first).is_file():
        return [str(environment.python), first, *rest]
    path = os.pathsep.join([str(environment.bin), os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    found = shutil.which(first, path=path)
    if found is None:
        raise PretendError(f"{first!r} is no program on the path, nor in {environment.bin}, nor a Python file here.")
    # A script of the user's environment would start that environment's Python.
    is_python = Path(found).read_bytes()[:256].split(b"\n")[0].rstrip().rpartition(b"/")[2].startswith(b"python")
    return [*([str(environment.python)] if is_python else []), found, *rest]


def _request(
    settings: PretendSettings, change: str, clock_ms: tuple[float, float] | None, sent: SentObjects | None
) -> dict[str, Any]:
    plugins = [("lowtide_inside.py", settings.budget is not None), ("change_inside.py", bool(change))]
    asked: dict[str, Any] = {
        "steps": settings.last_step,
        "ranks": settings.ranks or 0,
        "rank": settings.rank,
        "ranks_per_node": settings.ranks_per_node,
        "history": settings.history,
        "snapshot": str(settings.snapshot.absolute()) if settings.snapshot else "",
        "no_weights": settings.no_weights,
        "time": settings.time and settings.last_step > 0,
        "context_mib": settings.facts.context_bytes >> 20,
        "nccl_mib": NCCL_BYTES >> 20,
        "plugins": [str(Path(__file__).with_name(name)) for name, wanted in plugins if wanted],
    }
    if sent is not None:
        asked["objects"] = str(sent.folder)
        if sent.to is not None:
            asked["sends_to"], asked["sends"] = sent.to
    if clock_ms is not None:
        step_ms, host_ms = clock_ms
        # One more: what the script prints of a step comes after the optimizer's part of it.
        asked |= {"clock_step_ms": step_ms, "clock_host_ms": host_ms, "steps": settings.last_step + 1}
        asked |= {"time": False, "history": False, "snapshot": ""}
    return asked


def _variables(settings: PretendSettings, environment: ScriptEnvironment, folder: Path) -> dict[str, str]:
    # What this process' own stand-in was told is not meant for the script.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")}
    variables |= {name: os.environ[name] for name in ("STANDIN_CACHE", "STANDIN_HEADERS") if name in os.environ}
    for name in ("CUDA_VISIBLE_DEVICES", "PYTHONNOUSERSITE", "PYTHONSAFEPATH"):
        variables.pop(name, None)
    memory = settings.memory_bytes
    ranks = settings.ranks or 1
    devices = settings.devices or min(ranks, settings.ranks_per_node)
    variables |= {
        _MARK: str(folder / "request.json"),
        "STANDIN_CUDA": "1",
        "STANDIN_GPU": settings.facts.name,
        "STANDIN_CONTEXT": str(settings.context_bytes(ranks) >> 20),
        "STANDIN_DEVICES": str(devices),
        "STANDIN_ROUTING": settings.routing,
        "STANDIN_STRICT": "1" if settings.values == "all" else "0",
        "PYTHONUNBUFFERED": "1",
    }
    if memory is not None:
        variables["STANDIN_MEMORY"] = str(max(1, memory >> 20))
    if settings.values != "all":
        # Threads that wait for each other over a few numbers take longer than the numbers; torchrun says the same.
        variables.setdefault("OMP_NUM_THREADS", "1")
    if settings.values == "none":
        variables["STANDIN_SKIP_BYTES"] = "0"
    elif settings.values == "small":
        variables["STANDIN_SKIP_BYTES"] = str(SKIPPED_ABOVE_BYTES)
    if ranks > 1:
        local = settings.rank % devices
        variables |= {"WORLD_SIZE": str(ranks), "RANK": str(settings.rank), "LOCAL_RANK": str(local),
                      "LOCAL_WORLD_SIZE": str(devices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    if settings.budget is not None:
        variables["LOWTIDE_BUDGET"] = settings.budget
        variables["LOWTIDE_PRETEND_HOST_BUDGET"] = settings.host_budget or ""
    # Also where the script has lowtide in it: times of kernels that do nothing would decide its plans.
    variables["LOWTIDE_WITHOUT_VALUES"] = settings.facts.name if settings.values != "all" else "0"
    return environments.entering(variables, environment)


def _pass_on(stream: IO[str] | None, kept: deque[str], heard: bool) -> None:
    """The script's stderr goes on to ours where it is ``heard``; its end is kept for the report."""
    with contextlib.suppress(ValueError):
        for line in stream or ():
            kept.append(line)
            if heard:
                sys.stderr.write(line)
                sys.stderr.flush()


def _watched(process: subprocess.Popen[str], folder: Path, settings: PretendSettings) -> tuple[int, str]:
    """Waits for the command's end. Returns the most resident bytes of a process, and why it was ended, if it was."""
    progress, seen_at, stopped_at = None, time.monotonic(), None
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        for pid in _marked(folder):
            peak = max(peak, _resident_peak(pid))
        now = time.monotonic()
        state = tuple(sorted((path.name, path.stat().st_mtime_ns) for path in _reports(folder)))
        if state != progress:
            progress, seen_at = state, now
            if stopped_at is None and _seen(folder).get("stopped"):
                stopped_at = now
        if stopped_at is not None and now - stopped_at > _LINGERS_S:
            return peak, ""  # its steps are done; what still runs is a loader or a watchdog
        if now - seen_at > settings.patience_s:
            return peak, f"there was no step for {settings.patience_s:.0f} s"
    return peak, ""


def _reports(folder: Path) -> list[Path]:
    return list(folder.glob("report-*.json"))


def _seen(folder: Path) -> dict[str, Any]:
    """Of the process that took most steps; a launcher and a loader report none."""
    found: list[dict[str, Any]] = []
    for path in _reports(folder):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return max(found, key=lambda r: (len(r["steps"]), len(r["out_of_memory"]), r["launches"]), default={})


def _step_record(folder: Path, seen: dict[str, Any]) -> dict[str, Any] | None:
    name = seen.get("step_record", {}).get("file")
    if not name:
        return None
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / name).read_text())
        return found
    return None


def _marked(folder: Path) -> Iterator[int]:
    """All processes of this run, whatever session or parent they have: its folder is in their environment."""
    mark = f"{_MARK}={folder}/".encode()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                yield pid


def _resident_peak(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10
    return 0


def _end_all(folder: Path) -> None:
    """No process of the run is left behind."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        left = list(_marked(folder))
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, sign)
        until = time.monotonic() + 3
        while left and time.monotonic() < until:
            left = list(_marked(folder))
            time.sleep(0.05)
        if not left:
            return
