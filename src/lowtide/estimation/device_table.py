"""Facts about devices, a JSON file for each in ``devices/``: memory, bandwidth, matrix rates, links.

Each number stands beside its source: an address, or ``assumed:`` with the reason. Rates are dense, without structured
sparsity. A file that ``lowtide calibrate`` wrote into the user's cache directory is the device ``here``; it holds
measured rates by class of op and size instead of a vendor's peaks.

Known weakness: most of these numbers were written down from memory. Of the addresses beside them, which say where the
vendor states them, few were read again. ``docs/published.md`` compares steps on a few of them.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lowtide.cache_files import cache_dir, read_file
from lowtide.errors import LowtideError

HERE = "here"
_FOLDER = Path(__file__).parent / "devices"
_AMOUNTS = ("memory_bytes", "usable_bytes", "bandwidth_bytes_per_s", "host_link_bytes_per_s", "context_bytes",
            "block_bytes", "blas_workspace_bytes")  # fmt: skip
_WIDTH = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}
_CALIBRATION_VERSION = 1
# torch/cuda/__init__.py asks for lazy loading (CUDA_MODULE_LOADING); CUDA has it since then.
_LAZY_SINCE = (11, 7)


class UnknownDeviceError(LowtideError, ValueError):
    """No device of that name is in the table; the message has the nearest names."""


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        kind: PyTorch's device type: ``cuda`` (ROCm too), ``hpu``, ``mps``, ``cpu``.
        memory_bytes: As the data sheet says; ``usable_bytes`` is what a process can allocate, its context included.
        matrix_flops: Operations per second of matrix products, by dtype; ``tf32`` is float32 rounded on the way in.
        host_link_bytes_per_s: To or from host memory, in one direction.
        peer_link_bytes_per_s: To the other devices of the same machine, in one direction; over the host's link where
            the table knows no other.
        context_bytes: What the driver's context and the libraries' kernels take before the first tensor.
        eager_context_bytes: The same before CUDA 11.7, which loads all kernels at once; 0: not known.
        block_bytes: The allocator rounds to multiples of it.
        sources: By field, where the number is from.
        rates: Measured: by class and dtype (``matmul.float32``) points of (work, work per second). Empty for devices of
            the table.
        op_us: Measured: microseconds of each op in a step whatever it computes; None for devices of the table.
        cold_us: Measured: added to a view where data has taken the caches from the code.
        error_fraction: How far a predicted step may be off: measured where it was, else assumed.
        multiprocessors: What a CUDA device divides the work of a kernel among; 0 where nobody needs it.
        shares: Measured on this device, by class of op, with its variant or dtype or without: points of (microseconds
            at the data sheet's rate, share of that rate that is reached). Where a class has none: ``roofline``'s.
        elements_per_s: Measured: what elementwise ops reach that are bound by finding their numbers, not by bandwidth;
            by ``Work.access``.
    """

    name: str
    title: str
    kind: str
    memory_bytes: int
    usable_bytes: int
    bandwidth_bytes_per_s: float
    matrix_flops: Mapping[str, float]
    host_link_bytes_per_s: float
    context_bytes: int
    block_bytes: int
    blas_workspace_bytes: int
    aliases: tuple[str, ...] = ()
    compute_capability: float | None = None
    note: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    op_us: float | None = None
    cold_us: float = 0.0
    error_fraction: float = 0.4
    peer_link_bytes_per_s: float = 0.0
    multiprocessors: int = 0
    eager_context_bytes: int = 0
    shares: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    elements_per_s: Mapping[str, float] = field(default_factory=dict)

    def context_bytes_of(self, cuda_version: str | None) -> int:
        """What a context takes under CUDA ``cuda_version`` (``"11.2"``); None: one that loads kernels when called."""
        loads_all = cuda_version is not None and tuple(map(int, cuda_version.split("."))) < _LAZY_SINCE
        return self.eager_context_bytes or self.context_bytes if loads_all else self.context_bytes

    def flops_per_s(self, dtype: str) -> float:
        """Peak of matrix products on ``dtype``; where the device has no unit for it, the rate of the next wider one."""
        if dtype in self.matrix_flops:
            return self.matrix_flops[dtype]
        width = _WIDTH.get(dtype, 1)
        wider = [d for d in self.matrix_flops if _WIDTH.get(d, 1) > width and d != "tf32"]
        # float64 on a device that has none is emulated, so much slower than float32: a sixty-fourth on consumer cards.
        return self.matrix_flops[min(wider, key=lambda d: _WIDTH.get(d, 1))] if wider else (
            self.matrix_flops["float32"] / 64
        )  # fmt: skip


def device_names() -> tuple[str, ...]:
    """Names of the table, and ``here`` if this machine has been calibrated."""
    names = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))
    return (*names, HERE) if calibration_path().exists() else names


def device_named(name: str) -> Device:
    """Return the device called ``name``, in any case, with or without the vendor (``"NVIDIA H100"``, ``a100_80gb``).

    Raises:
        UnknownDeviceError: there is none; or ``here`` before ``lowtide calibrate`` has run.
    """
    if not isinstance(name, str):
        raise UnknownDeviceError(f"device={name!r} is a {type(name).__name__}. Pass a name such as 'h100'.")
    wanted = _plain(name)
    if wanted == HERE:
        return _here()
    known = _table()
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=5, cutoff=0.5)
    nearest = list(dict.fromkeys(known[word].name for word in near))[:3]
    hint = f" Nearest: {', '.join(nearest)}." if nearest else ""
    raise UnknownDeviceError(f"device={name!r} is not in the table.{hint} Known are {', '.join(device_names())}.")


def calibration_path() -> Path:
    """The file of device ``here``."""
    return cache_dir() / "device-here.json"


@cache
def _table() -> dict[str, Device]:
    found: dict[str, Device] = {}
    for path in sorted(_FOLDER.glob("*.json")):
        device = _read(json.loads(path.read_text(encoding="utf-8")))
        found |= {_plain(word): device for word in (device.name, *device.aliases)}
    return found


def _plain(name: str) -> str:
    word = name.strip().lower()
    for vendor in ("nvidia", "geforce", "amd", "instinct", "intel", "apple"):
        word = word.replace(vendor, "")
    return "".join(c for c in word if c.isalnum())


def _read(body: Mapping[str, Any]) -> Device:
    flops = body["matrix_flops"]
    sources = {name: body[name]["source"] for name in _AMOUNTS}
    sources |= {f"matrix_flops.{dtype}": fact["source"] for dtype, fact in flops.items()}
    peer = body.get("peer_link_bytes_per_s", body["host_link_bytes_per_s"])
    sources["peer_link_bytes_per_s"] = peer["source"]
    multiprocessors = body.get("multiprocessors", {"value": 0})
    if "source" in multiprocessors:
        sources["multiprocessors"] = multiprocessors["source"]
    eager = body.get("eager_context_bytes", {"value": 0, "source": "not known"})
    sources["eager_context_bytes"] = eager["source"]
    measured = {name: body.get(name, {"value": {}}) for name in ("shares", "elements_per_s")}
    sources |= {name: fact["source"] for name, fact in measured.items() if "source" in fact}
    return Device(
        **{name: body[name] for name in ("name", "title", "kind", "compute_capability", "note")},
        **{name: body[name]["value"] for name in _AMOUNTS},
        aliases=tuple(body["aliases"]),
        matrix_flops={dtype: float(fact["value"]) for dtype, fact in flops.items()},
        sources=sources,
        rates={key: tuple((x, y) for x, y in points) for key, points in body.get("rates", {}).items()},
        op_us=body.get("op_us"),
        cold_us=body.get("cold_us", 0.0),
        error_fraction=body.get("error_fraction", Device.error_fraction),
        peer_link_bytes_per_s=peer["value"],
        multiprocessors=multiprocessors["value"],
        eager_context_bytes=eager["value"],
        shares={key: tuple((x, y) for x, y in points) for key, points in measured["shares"]["value"].items()},
        elements_per_s=measured["elements_per_s"]["value"],
    )


def _here() -> Device:
    path = calibration_path()
    try:
        body = json.loads(read_file(path))
        if body["version"] != _CALIBRATION_VERSION:
            raise ValueError(f"it is of version {body['version']}, not {_CALIBRATION_VERSION}")
        return _read(body)
    except FileNotFoundError:
        raise UnknownDeviceError("device='here': this machine has not been measured. Run: lowtide calibrate") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnknownDeviceError(
            f"device='here': {path} cannot be used ({error}). Measure again: lowtide calibrate"
        ) from error
