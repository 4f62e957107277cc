"""What PyTorch's allocators hand out, counted from their own events: by some lines of C++, where a compiler is.

The counter is built once for each PyTorch, beside the training, and kept in lowtide's cache directory. It costs 0.3 us
an op. It lies in the profiler's slot of the thread, so it goes when a profiler starts, and never comes while one is
active. Where it cannot be built, nobody counts: ``why_missing`` says why.

Known weaknesses, on a CPU: memory that native libraries take past PyTorch's allocator is not seen. What was allocated
while nobody counted has no known size when it is freed, or the size of the block that was counted at its address.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler

from lowtide.cache_files import cache_dir, read_file, write_file
from lowtide.device.names import index_of, is_accelerator

_SOURCE = Path(__file__).with_name("csrc") / "allocation_counter.cpp"
_FLAGS = ("-std=c++20", "-O1", "-g0", "-w", "-shared", "-fPIC")
_PLACE = "LOWTIDE_ALLOCATION_COUNTER"  # the folder that counters are kept in; 0: there is none
_MOST_DEVICES = 64
_HOST = -1

_lock = threading.RLock()
_places: dict[int, "_Place"] = {}  # by what lies in the slot: a backward may have it on threads of its own
_library: Any = None
_why_missing = ""
_building: threading.Thread | None = None


def prepare(*, waits: bool = False) -> None:
    """Load the counter; where nobody has built it yet, build it on a thread of its own. It is there a little later.

    Args:
        waits: Until it is there, or is known to be missing.
    """
    global _building, _why_missing
    with _lock:
        if _library is None and not _why_missing and _building is None:
            try:
                built = _built()
                if built is None:
                    _building = threading.Thread(target=_build, name="lowtide-counter", daemon=True)
                    _building.start()
                else:
                    _load(built)
            except Exception as error:  # nothing of this may end a training
                _why_missing = _in_a_line(error)
        building = _building
    if waits and building is not None:
        building.join()


def why_missing() -> str:
    """Why nobody counts; "" where the counter is there, or may still come."""
    return _why_missing


def is_there() -> bool:
    return _library is not None


class AllocationWindow:
    """Counts on this thread from here on. Windows may overlap in any way.

    Args:
        device: Whose memory.
    """

    def __init__(self, device: str | torch.device, place: "_Place") -> None:
        self._place = place
        self._device = index_of(device) if is_accelerator(device) else _HOST
        self.is_of_host = self._device == _HOST
        place.note_peaks()
        self._start = place.now(self._device) if self.is_of_host else 0
        self._peak = 0
        self._left: int | None = None
        self.lost = False  # a profiler has taken the counter's place
        place.windows.add(self)

    def note(self, peaks: dict[int, int]) -> None:
        self._peak = max(self._peak, peaks.get(self._device, 0) - self._start)

    @property
    def device(self) -> int:
        return self._device

    def close(self) -> None:
        if self._left is None:
            self._left = 0
            self._place.leave(self)

    def end(self, left: int) -> None:
        """The last that is known: ``left`` bytes now."""
        self._left = left - self._start

    def reader(self, start_bytes: int = 0) -> Callable[[], int | None]:
        """Tells what lives now less ``start_bytes``, as ``peak_bytes`` counts; None: nobody counts any more.

        On an accelerator 0 as long as nothing was allocated.
        """
        now, handle, device = _library.lowtide_counter_now, self._place.handle, self._device
        start_bytes += self._start
        reference = weakref.ref(self)

        def read() -> int | None:
            window = reference()
            if window is None or window._left is not None:
                return None
            found = now(handle, device)
            return found - start_bytes if found or device == _HOST else 0

        return read

    @property
    def peak_bytes(self) -> int:
        """On a CPU above what was there at the start; on an accelerator all that was allocated, 0: nothing was."""
        return self._peak

    @property
    def left_bytes(self) -> int:
        """At the end, likewise."""
        return self._left or 0

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # None: a module's names are gone before what it made
            self.close()


class _Place:
    """A counter, while any window of it is open."""

    def __init__(self, handle: int) -> None:
        self.handle, self._key = handle, _library.lowtide_counter_here()
        self.windows: weakref.WeakSet[AllocationWindow] = weakref.WeakSet()
        _places[self._key] = self

    @property
    def _counts(self) -> bool:
        return _places.get(self._key) is self

    def now(self, device: int) -> int:
        return int(_library.lowtide_counter_now(self.handle, device))

    def note_peaks(self) -> None:
        devices = {window.device for window in self.windows}
        peaks = {device: int(_library.lowtide_counter_take_peak(self.handle, device)) for device in devices}
        for window in self.windows:
            window.note(peaks)

    def leave(self, window: AllocationWindow) -> None:
        with _lock:
            if not self._counts:
                return
            self.windows.add(window)  # it is being forgotten, perhaps
            self.note_peaks()
            window.end(self.now(window.device))
            self.windows.discard(window)
            if not self.windows:
                self._stop()

    def step_aside(self) -> None:
        """A profiler starts on this thread."""
        self.note_peaks()
        for window in list(self.windows):
            window.lost = True
            window.end(self.now(window.device))
        self._stop()

    def _stop(self) -> None:
        del _places[self._key]
        _library.lowtide_counter_stop(self.handle)
        _library.lowtide_counter_free(self.handle)


def count(device: str | torch.device = "cpu") -> AllocationWindow | None:
    """Count what is allocated on ``device``; None where the counter is missing, or a profiler is active."""
    if _library is None or (is_accelerator(device) and index_of(device) >= _MOST_DEVICES):
        return None
    with _lock:
        place = _places.get(_library.lowtide_counter_here())
        if place is None:
            handle = _library.lowtide_counter_start()
            if not handle:
                return None
            place = _Place(handle)
        return AllocationWindow(device, place)


def step_aside() -> None:
    """Leave the profiler's slot of this thread: what counts there loses count."""
    with _lock:
        if (place := _places.get(_library.lowtide_counter_here())) is not None:
            place.step_aside()


# -- building -----------------------------------------------------------------------------------------------


def _path() -> Path:
    facts = [torch.__version__, str(torch.version.git_version), str(torch.compiled_with_cxx11_abi())]
    facts += [platform.system(), platform.machine(), *_FLAGS]
    digest = hashlib.sha256("\0".join(facts).encode() + _SOURCE.read_bytes())
    place = os.environ.get(_PLACE, "")
    if place == "0":
        raise OSError(f"{_PLACE}=0")
    return (Path(place) if place else cache_dir() / "counter") / f"{digest.hexdigest()[:16]}.so"


def _built() -> Path | None:
    """The library that is there; None: it has to be built. Raises: OSError: there is to be none."""
    path = _path()
    if not path.exists():
        return None
    read_file(path)  # one that somebody else could have written is not believed
    return path


def _build() -> None:
    global _building, _why_missing
    try:
        path = build()
        with _lock:
            _load(path)
    except Exception as error:
        _why_missing = _in_a_line(error)
    _building = None


def build() -> Path:
    """Build the counter for this PyTorch, and keep it. Raises: OSError: no compiler, or no place to keep it."""
    name = os.environ.get("CXX", "c++")
    compiler = shutil.which(name) or shutil.which("g++")
    if compiler is None:
        raise OSError(f"there is no C++ compiler ({name}) to build the counter with")
    root, path = Path(torch.__file__).parent, _path()
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        made = Path(folder) / path.name
        command = [
            compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            "-isystem", root / "include", _SOURCE, "-o", made, f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu",
        ]  # fmt: skip
        nicely = [nice, "-n", "10"] if (nice := shutil.which("nice")) else []  # training has the cores
        done = subprocess.run([*nicely, *map(str, command)], capture_output=True, text=True)
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
            raise OSError(f"{Path(compiler).name} cannot build the counter: {said.strip()[:200]}")
        write_file(path, made.read_bytes())
    return path


def _load(path: Path) -> None:
    """Called with the lock held."""
    global _library
    library = ctypes.CDLL(str(path))
    handle = ctypes.c_void_p
    for name, result, arguments in (
        ("start", handle, []),
        ("here", handle, []),
        ("stop", None, [handle]),
        ("free", None, [handle]),
        ("now", ctypes.c_int64, [handle, ctypes.c_int]),
        ("take_peak", ctypes.c_int64, [handle, ctypes.c_int]),
    ):
        function = getattr(library, f"lowtide_counter_{name}")
        function.restype, function.argtypes = result, arguments
    before = profiler._run_on_profiler_start

    def run_on_profiler_start() -> None:
        step_aside()
        before()

    profiler._run_on_profiler_start = run_on_profiler_start  # each of PyTorch's profilers calls it first
    _library = library


def _in_a_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]
