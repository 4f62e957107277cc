"""How long each entry of a recorded step takes on a device that is not here, by the table of ``lowtide.estimation``.

Operators and Inductor's kernels go through the same roofline as those of a traced step; collectives through the links
(``links``). What is recorded beside a call is used: how many kernels it launched, and the bytes it wrote.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from lowtide.estimation.device_table import Device
from lowtide.estimation.op_work import Work, work_of
from lowtide.estimation.roofline import LAUNCH_US, LINK_SHARE, compute_s, memory_s
from lowtide.measurement.op_inputs import described_tensors, tensor_bytes
from lowtide.pretending.links import Links
from lowtide.pretending.step_clock import GRAPH_LAUNCH_US, Task
from lowtide.pretending.step_clock import LAUNCH_US as HOST_LAUNCH_US
from lowtide.pretending.step_record import Entry, StepRecord

_COPY_US = 5.0  # until a copy engine begins
_STAGED_BYTES_PER_S = 10e9  # the host copies pageable memory into the driver's own first
_IN_GRAPH = 0.5  # of a launch, that kernels of a graph take at least
_LAUNCHES_OF_CUDNN = 4  # as much of the host as one convolution takes
_FLOATS = {2: "bfloat16", 4: "float32", 8: "float64"}
_COPY = Work("copy", "float32", 0, 0)
# These write what they are given and do not read it.
_WRITTEN_ONLY = ("copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_")


class OpTime(NamedTuple):
    """Microseconds by what takes them; an op takes the longest of the three.

    Attributes:
        compute_us: At the table's rates; a measured step may say that they are others.
        least_us: Of its launches.
    """

    kind: str
    compute_us: float
    memory_us: float
    least_us: float
    flops: float = 0.0
    dtype: str = "float32"

    def us(self, speed: float) -> float:
        return max(self.compute_us / speed, self.memory_us, self.least_us)


class OpTimes:
    """Of one record on one device."""

    def __init__(self, record: StepRecord, device: Device, links: Links) -> None:
        self.record, self.device, self.links = record, device, links
        self._known: dict[tuple[str, int, int, int], OpTime] = {}

    def tasks(self, speed: float = 1.0) -> list[Task]:
        """In the order of the host, whose clock runs as in a step that was not recorded.

        Args:
            speed: Of matrix products and attention, as a share of the table's.
        """
        scale = self.record.host_ns / max(1, self.record.took_ns) / 1e3
        found: list[Task] = []
        grouped: set[tuple[int, int]] = set()
        for number, entry in enumerate(self.record.entries):
            at_us = entry.at_ns * scale
            if entry.kind == "replay":
                found += self._replayed(number, entry, at_us, speed)
            elif (task := self._task(entry, at_us, grouped, speed)) is not None:
                found.append(task)
        return found

    def all_entries(self) -> list[Entry]:
        """With those of the graphs that are replayed."""
        graphs = self.record.graphs
        return [e for entry in self.record.entries
                for e in (graphs.get(entry.a, ()) if entry.kind == "replay" else (entry,))]  # fmt: skip

    def op_time(self, entry: Entry) -> OpTime:
        """Of an operator or a kernel."""
        key = (entry.kind, entry.a, *((entry.b, entry.c) if entry.kind == "op" else (0, 0)))
        if key not in self._known:
            if entry.a < 0:
                self._known[key] = OpTime("kernels of others", 0.0, 0.0, LAUNCH_US)
            elif entry.kind == "kernel":
                self._known[key] = _of_kernel(self.record.signatures[entry.a], self.device, self.record.tf32)
            else:
                signature = self.record.signatures[entry.a]
                self._known[key] = _of_operator(signature, entry.b, entry.c, self.device, self.record.tf32)
        return self._known[key]

    def _task(self, entry: Entry, at_us: float, grouped: set[tuple[int, int]], speed: float) -> Task | None:
        kind, stream = entry.kind, entry.stream
        if kind in ("op", "kernel"):
            time = self.op_time(entry)
            us = time.us(speed)
            launches = _LAUNCHES_OF_CUDNN if time.kind == "conv" else max(1, entry.c if kind == "op" else 1)
            return Task("kernel", at_us, stream, us, launches, name=time.kind) if us else None
        if kind in ("to_device", "to_host"):
            us = _COPY_US + entry.a / (LINK_SHARE * self.device.host_link_bytes_per_s) * 1e6
            is_pinned = bool(entry.b)
            if not is_pinned:
                us = max(us, entry.a / _STAGED_BYTES_PER_S * 1e6)
            return Task("copy", at_us, stream, us, name="host copies", waits=kind == "to_host" and not is_pinned)
        if kind in ("on_device", "fill"):
            moved = entry.a * (2 if kind == "on_device" else 1)
            us = max(memory_s(_COPY, moved, self.device) * 1e6, LAUNCH_US)
            return Task("kernel", at_us, stream, us, name="memory")
        if kind == "collective":
            told = self.record.signatures[entry.a]
            together = (entry.c, entry.d)
            us = self.links.collective_us(
                told["op"], entry.b, told["ranks"], told["nodes"], has_begun=together in grouped
            )
            grouped.add(together)
            return Task("collective", at_us, stream, us, which=entry.c, name="communication")
        return Task(kind, at_us, stream, which=entry.a)

    def _replayed(self, number: int, entry: Entry, at_us: float, speed: float) -> list[Task]:
        """A graph's kernels, launched at once; its other streams are its own, and so are its events."""
        captured = self.record.graphs.get(entry.a, ())
        first = Counter(e.stream for e in captured).most_common(1)[0][0] if captured else entry.stream
        found: list[Task] = []
        grouped: set[tuple[int, int]] = set()
        launches = max(1, round(GRAPH_LAUNCH_US / HOST_LAUNCH_US))
        for e in captured:
            stream = entry.stream if e.stream == first else -(10**6 * (number + 1)) - e.stream
            task = self._task(e._replace(stream=stream), at_us, grouped, speed)
            if task is None or task.kind.startswith("host"):
                continue
            if task.kind in ("event", "wait"):
                task = task._replace(which=hash((number, task.which)))
            elif e.kind in ("op", "kernel"):
                time = self.op_time(e)
                task = task._replace(us=time._replace(least_us=time.least_us * _IN_GRAPH).us(speed))
            found.append(task._replace(launches=launches))
            launches = 0
        return found


def _of_operator(signature: Mapping[str, Any], written: int, kernels: int, device: Device, tf32: bool) -> OpTime:
    work = work_of(signature)
    base = signature["op"].split(".")[1]
    if work.kind == "conv" and not work.flops:
        work = replace(work, flops=_convolution_flops(signature, written))
    if not kernels and not work.computes:
        return OpTime("none", 0.0, 0.0, 0.0)  # a copy or a memset, which is an entry of its own
    read = work.read_bytes
    if base in _WRITTEN_ONLY or signature["op"].endswith("out"):
        read = max(0, read - written)  # an argument, and not read
    if "nll_loss" in base:  # one number of each row is read, and backward reads none
        read -= max(tensor_bytes(t) for t in described_tensors(signature["args"]))
    launches = 1 if work.computes else max(1, kernels)
    return OpTime(
        kind=work.kind if work.computes else "memory",
        compute_us=_compute_us(work, device, tf32),
        memory_us=memory_s(work, read + written, device) * 1e6,
        least_us=LAUNCH_US * launches,
        flops=float(work.flops),
        dtype=work.dtype,
    )


def _compute_us(work: Work, device: Device, tf32: bool) -> float:
    if tf32 and work.kind == "matmul" and work.dtype == "float32" and "tf32" in device.matrix_flops:
        work = replace(work, dtype="tf32")
    return compute_s(work, device) * 1e6


def _convolution_flops(signature: Mapping[str, Any], written: int) -> int:
    """Of PyTorch's own kernels, which the registry does not know: the first tensors are the input (or what comes from
    above) and the weight."""
    tensors = described_tensors(signature.get("args", []))
    backward = "backward" in signature["op"]
    weights = [t for t in tensors if len(t["t"]) >= 3][1 + backward :]
    if not weights:
        return 0
    each = 2 * math.prod(weights[0]["t"][1:])
    if backward:
        return 2 * each * math.prod(tensors[0]["t"])
    return each * written // _itemsize(weights[0]["dtype"])


def _itemsize(dtype: str) -> int:
    return 4 if dtype in ("float32", "tf32") else 8 if dtype == "float64" else 2


def _of_kernel(told: Mapping[str, Any], device: Device, tf32: bool) -> OpTime:
    """Of Triton's: by the bytes of its tensors, or as the product or attention that its name says it is."""
    name = told["name"]
    shapes: list[tuple[list[int], int]] = [(shape, size) for shape, size in told["shapes"]]
    sizes = [math.prod(shape) * size for shape, size in shapes]
    moved = sum(sizes) + told["again_bytes"]
    if "embedding" in name and sizes:
        moved -= max(sizes)  # the table: rows alone are read
    reduces = "_red_" in name or "_per_" in name
    memory_us = memory_s(Work("reduction" if reduces else "elementwise", "float32", 0, 0), moved, device) * 1e6
    work = _template(name, shapes)
    if work is None:
        return OpTime("memory", 0.0, memory_us, LAUNCH_US)
    return OpTime(work.kind, _compute_us(work, device, tf32), memory_us, LAUNCH_US, float(work.flops), work.dtype)


def _template(name: str, shapes: list[tuple[list[int], int]]) -> Work | None:
    """What Inductor's templates compute: ``flex_attention`` (taken as causal) and matrix products."""
    if "_tem_" not in name:
        return None
    if "flex_attention" in name or "flex_decoding" in name:
        four = [(shape, size) for shape, size in shapes if len(shape) == 4]
        if not four:
            return None
        (rows, heads, tokens, width), size = four[0]
        products = 5 if "backward" in name else 2
        flops = products * rows * heads * tokens * tokens * width  # 2 for a product and a sum, half of the scores
        return Work("attention", _FLOATS.get(size, "float32"), flops, 0, problems=rows * heads)
    largest = sorted((math.prod(shape) for shape, _ in shapes if len(shape) >= 2), reverse=True)[:3]
    if "mm" not in name or len(largest) < 3:
        return None
    return Work("matmul", _FLOATS.get(shapes[0][1], "float32"), 2 * math.isqrt(math.prod(largest)), 0)
