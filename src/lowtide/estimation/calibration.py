"""``calibrate``: rates of this machine by class of op, dtype and size, measured on two dozen kernels.

What is measured is found again as ``roofline`` looks it up: the signature of each timed call is described and counted
as those of a traced step are. On a CPU the time is the process's own with one thread, and caches are swept before each
call on much data, as ``lowtide.measure`` does.
"""

import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.cache_files import write_file
from lowtide.device.memory import available_bytes
from lowtide.device.names import device_name
from lowtide.estimation.device_table import Device, calibration_path, device_named
from lowtide.estimation.op_work import CACHED_BYTES, work_of
from lowtide.gc_control import gc_disabled
from lowtide.measurement.op_inputs import describe

ERROR_FRACTION = 0.35  # above the worst of benchmarks/results/estimate_cpu.jsonl (0.26) and of other runs of it (0.31)
_SWEPT_BYTES = 1 << 24
_SAMPLE_S = 0.0005
_CALL_S = 0.25  # time for one kernel at one size
# Channels given and made, side, kernel, stride: a residual network's, from its first layer to its last.
_CONVOLUTIONS = ((3, 64, 64, 7, 2), (3, 64, 64, 16, 16), (64, 64, 24, 3, 1), (64, 128, 28, 3, 2), (64, 128, 28, 1, 2),
                 (128, 128, 12, 3, 1), (256, 256, 6, 3, 1), (256, 256, 14, 3, 1), (512, 512, 3, 3, 1))  # fmt: skip
_SQUARES = (32, 64, 128, 256, 512, 1024)
_COUNTS = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)  # elements of ops that move bytes
_DTYPES = (torch.float32, torch.bfloat16)
_aten = torch.ops.aten


def calibrate(*, seconds: float = 45.0, progress: Callable[[int, int], None] | None = None) -> Device:
    """Measure this machine's CPU and keep the result as device ``here``.

    Args:
        seconds: About how long it may take; the more, the steadier the medians.
        progress: Called after each kernel with the number done and the number in all.

    Raises:
        OSError: the cache directory cannot be written.
    """
    with torch.device("cpu"):  # whatever the default device is
        return _calibrated(seconds, progress)


def _calibrated(seconds: float, progress: Callable[[int, int], None] | None) -> Device:
    cases = list(_cases())
    sweep = torch.zeros(_SWEPT_BYTES, dtype=torch.uint8)
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    most_s = min(_CALL_S, seconds / (len(cases) + 10))
    gc.collect()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), gc_disabled():
            x = torch.zeros(1)
            floor_s = _seconds(lambda: _aten.add.Tensor(x, x), most_s, None)
            for done, make in enumerate(cases, start=1):
                func, args = make()
                work = work_of(describe(func, args, {}))
                made = func(*args)
                moved = work.read_bytes + _bytes_of(made)
                del made
                took_s = _seconds(lambda: func(*args), most_s, sweep if moved >= CACHED_BYTES else None)  # noqa: B023
                amount = work.flops if work.computes else moved
                size = amount / work.problems if work.computes else moved
                points[work.keys[0]].append((size, amount / max(took_s - floor_s, 0.1 * took_s)))
                if progress is not None:
                    progress(done, len(cases))
        op_us, cold_us = _op_us(), 1e6 * _cold_s(sweep)
    finally:
        torch.set_num_threads(threads)
    body = _as_file({key: _merged(found) for key, found in sorted(points.items())}, op_us, cold_us)
    write_file(calibration_path(), json.dumps(body, indent=1).encode())
    return device_named("here")


def _seconds(call: Callable[[], Any], most_s: float, sweep: torch.Tensor | None) -> float:
    """Median process time of ``call``; ``sweep``: written before each, so that caches hold something else."""
    call()
    start = time.process_time()
    call()
    first_s = time.process_time() - start
    calls = 1 if sweep is not None else max(1, min(50, int(_SAMPLE_S / max(first_s, 1e-7))))
    samples = []
    for _ in range(max(3, min(15, int(most_s / max(first_s * calls, 1e-6))))):
        if sweep is not None:
            sweep.add_(1)
        start = time.process_time()
        for _ in range(calls):
            call()
        samples.append((time.process_time() - start) / calls)
    return statistics.median(samples)


def _cases() -> Iterator[Callable[[], tuple[Any, list[Any]]]]:
    """Each makes an operator and its arguments; made one after another, so that little memory is taken."""
    for d in _DTYPES:
        squares = [(n, n, n) for n in _SQUARES]
        for m, n, k in (*squares, (256, 768, 768), (512, 256, 1024), (192, 1024, 384), (128, 512, 64)):
            for variant in ("nn", "nt", "tn"):
                yield partial(_mm, m, n, k, variant, d)
        for m, n, k in ((128, 128, 64), (256, 512, 256), (512, 1024, 512)):
            yield partial(_grouped, m, n, k, d)
            yield partial(_grouped_weights, m, n, k, d)
        for b, n, k in ((2, 16, 16), (8, 32, 32), (16, 64, 32), (16, 128, 64), (16, 256, 64)):
            yield partial(_bmm, b, n, k, n, d)
            yield partial(_bmm, b, n, n, k, d)
        for shape in _CONVOLUTIONS:
            yield partial(_conv, *shape, d=d)
            yield partial(_conv_backward, _conv, *shape, d=d)
        for channels, length in ((64, 64), (256, 256), (512, 512)):
            yield partial(_conv_1d, channels, length, d)
            yield partial(_conv_backward, _conv_1d, channels, length, d=d)
        for heads, length in ((16, 32), (16, 65), (16, 96), (8, 128), (8, 256), (8, 512)):
            yield partial(_attention, heads, length, d)
            yield partial(_attention_backward, heads, length, d)
        for count in _COUNTS:
            for make in _BY_BYTES:
                yield partial(make, count, d)


def _r(*shape: int, d: torch.dtype) -> torch.Tensor:
    return torch.rand(shape).add_(0.5).to(d)


def _rows(count: int, d: torch.dtype) -> torch.Tensor:
    return _r(count // 512, 512, d=d)


def _mm(m: int, n: int, k: int, variant: str, d: torch.dtype) -> tuple[Any, list[Any]]:
    left = _r(k, m, d=d).t() if variant == "tn" else _r(m, k, d=d)
    return _aten.mm.default, [left, _r(n, k, d=d).t() if variant == "nt" else _r(k, n, d=d)]


def _bmm(b: int, m: int, k: int, n: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    return _aten.bmm.default, [_r(b, m, k, d=d), _r(b, k, n, d=d)]


def _offsets(rows: int) -> torch.Tensor:
    return torch.arange(rows // 4, rows + 1, rows // 4, dtype=torch.int32)


def _grouped(rows: int, n: int, k: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    return _aten._grouped_mm.default, [_r(rows, k, d=d), _r(4, n, k, d=d).transpose(1, 2), _offsets(rows)]


def _grouped_weights(rows: int, n: int, k: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    return _aten._grouped_mm.default, [_r(rows, k, d=d).t(), _r(rows, n, d=d), _offsets(rows)]


def _max_pool(n: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    return _aten.max_pool2d_with_indices.default, [_r(1, max(1, n // 256), 16, 16, d=d), [3, 3], [2, 2], [1, 1]]


def _max_pool_backward(n: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    forward, (x, *where) = _max_pool(n, d)
    made, indices = forward(x, *where)
    return _aten.max_pool2d_with_indices_backward.default, [made, x, *where, [1, 1], False, indices]


def _conv(given: int, made: int, s: int, k: int, stride: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    x, w = _r(4, given, s, s, d=d), _r(made, given, k, k, d=d)
    return _aten.convolution.default, [x, w, None, [stride] * 2, [k // 2] * 2, [1, 1], False, [0, 0], 1]


def _conv_1d(c: int, n: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    x, w = _r(2, c, n, d=d), _r(c, 1, 4, d=d)
    return _aten.convolution.default, [x, w, None, [1], [3], [1], False, [0], c]


def _conv_backward(make: Callable[..., Any], *shape: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    forward, (x, w, _, *rest) = make(*shape, d=d)
    return _aten.convolution_backward.default, [forward(x, w, None, *rest), x, w, None, *rest, [True, True, False]]


def _attention(h: int, n: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    return _aten._scaled_dot_product_flash_attention_for_cpu.default, [_r(2, h, n, 64, d=d) for _ in range(3)]


def _attention_backward(h: int, n: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    forward, (q, k, v) = _attention(h, n, d)
    out, log_sum = forward(q, k, v)
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return backward, [out, q, k, v, out, log_sum, 0.0, False]


def _embedding(n: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    return _aten.embedding.default, [_r(4096, 128, d=d), torch.randint(0, 4096, (max(1, n // 128),))]


def _layer_norm(n: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    return _aten.native_layer_norm.default, [_rows(n, d), [512], _r(512, d=d), _r(512, d=d), 1e-5]


def _layer_norm_backward(n: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    forward, (x, shape, w, b, eps) = _layer_norm(n, d)
    _, mean, rstd = forward(x, shape, w, b, eps)
    return _aten.native_layer_norm_backward.default, [x.clone(), x, shape, mean, rstd, w, b, [True, True, True]]


def _batch_norm(n: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    c = 64
    x = _r(2, c, max(1, n // (2 * c)), 1, d=d)
    return _aten.native_batch_norm.default, [x, _r(c, d=d), _r(c, d=d), None, None, True, 0.1, 1e-5]


def _batch_norm_backward(n: int, d: torch.dtype) -> tuple[Any, list[Any]]:
    forward, args = _batch_norm(n, d)
    x, w = args[:2]
    _, mean, rstd = forward(*args)
    return _aten.native_batch_norm_backward.default, [
        x.clone(), x, w, None, None, mean, rstd, True, 1e-5, [True, True, True]
    ]  # fmt: skip


_BY_BYTES: tuple[Callable[[int, torch.dtype], tuple[Any, list[Any]]], ...] = (
    lambda n, d: (_aten.add.Tensor, [_r(n, d=d), _r(n, d=d)]),
    lambda n, d: (_aten.mul.Tensor, [_r(n, d=d), _r(n, d=d)]),
    lambda n, d: (_aten.gelu.default, [_r(n, d=d)]),
    lambda n, d: (_aten.silu.default, [_r(n, d=d)]),
    lambda n, d: (_aten.exp.default, [_r(n, d=d)]),
    lambda n, d: (_aten.gelu_backward.default, [_r(n, d=d), _r(n, d=d)]),
    lambda n, d: (_aten.silu_backward.default, [_r(n, d=d), _r(n, d=d)]),
    lambda n, d: (_aten.sum.dim_IntList, [_rows(n, d), [-1], True]),
    lambda n, d: (_aten.sum.dim_IntList, [_rows(n, d), [0], True]),
    lambda n, d: (_aten._softmax.default, [_rows(n, d), -1, False]),
    lambda n, d: (_aten._log_softmax.default, [_rows(n, d), -1, False]),
    lambda n, d: (_aten._softmax_backward_data.default, [_rows(n, d), _rows(n, d), -1, d]),
    lambda n, d: (_aten.bernoulli_.float, [_r(n, d=d), 0.9]),
    lambda n, d: (_aten._to_copy.default, [_rows(n, d)]),
    lambda n, d: (_aten.clone.default, [_r(n // 512, 8, 64, d=d).transpose(0, 1)]),
    lambda n, d: (_aten.add_.Tensor, [_r(n, d=d), _r(n, d=d)]),
    lambda n, d: (_aten.fill_.Scalar, [_r(n, d=d), 0.0]),
    _embedding,
    _layer_norm,
    _layer_norm_backward,
    _batch_norm,
    _batch_norm_backward,
    _max_pool,
    _max_pool_backward,
)


def _bytes_of(made: Any) -> int:
    if isinstance(made, torch.Tensor):
        return made.nbytes
    return sum(map(_bytes_of, made)) if isinstance(made, (tuple, list)) else 0


def _merged(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points in order; those within a factor of 1.5 become one, in the mean of their logarithms."""
    groups: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        if groups and point[0] < 1.5 * groups[-1][0][0]:
            groups[-1].append(point)
        else:
            groups.append([point])
    means = [map(statistics.geometric_mean, zip(*group)) for group in groups]
    return [(round(size, 1), round(rate, 1)) for size, rate in means]


class _Counting(TorchDispatchMode):
    """Counts ops."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


class _Block(torch.nn.Module):
    """So small that its step is all Python, autograd and dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(self.norm(x)).view(2, 2, 2, 4).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return x + self.down(torch.nn.functional.silu(mixed.transpose(1, 2).reshape(2, 2, 8)) * x)


def _op_us() -> float:
    """Microseconds of an op in a step that computes next to nothing."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        model = torch.nn.Sequential(*(_Block() for _ in range(12)))
        x = torch.rand(2, 2, 8)

        def step() -> None:
            model(x).square().mean().backward()

        step()
        with _Counting() as counting:
            step()
        samples = []
        for _ in range(15):
            start = time.process_time()
            step()
            samples.append(time.process_time() - start)
    return statistics.median(samples) * 1e6 / counting.ops


def _cold_s(sweep: torch.Tensor) -> float:
    """Seconds that a view takes longer where the ops before it have left the caches full of their data."""
    x = torch.zeros(8, 8)
    samples: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(41):
        for cold, taken in samples.items():
            if cold:
                sweep.add_(1)
            start = time.process_time()
            x.view(64)
            taken.append(time.process_time() - start)
    return max(0.0, statistics.median(samples[True]) - statistics.median(samples[False]))


def _as_file(rates: dict[str, list[tuple[float, float]]], op_us: float, cold_us: float) -> dict[str, Any]:
    def fact(value: float) -> dict[str, Any]:
        return {"value": value, "source": "measured"}

    def fastest(key: str) -> float:
        return max(rate for _, rate in rates[key])

    copied = fastest("copy.float32")
    flops = {str(d).removeprefix("torch."): fastest(f"matmul.{str(d).removeprefix('torch.')}") for d in _DTYPES}
    return {
        "version": 1,
        "name": "here",
        "title": device_name(),
        "kind": "cpu",
        "aliases": [],
        "compute_capability": None,
        "note": f"one thread, torch {torch.__version__}",
        "memory_bytes": fact(psutil.virtual_memory().total),
        "usable_bytes": fact(available_bytes() or 0),
        "bandwidth_bytes_per_s": fact(copied),
        "matrix_flops": {dtype: fact(rate) for dtype, rate in flops.items()},
        "host_link_bytes_per_s": fact(copied),
        "context_bytes": fact(0),
        "block_bytes": fact(64),
        "blas_workspace_bytes": fact(0),
        "rates": rates,
        "op_us": op_us,
        "cold_us": cold_us,
        "error_fraction": ERROR_FRACTION,
    }
