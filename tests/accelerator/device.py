"""The device module, ``torch.standin``, and how the device behaves. Importing this builds and registers it."""

import atexit
import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from accelerator.build import library
from accelerator.schedules import EARLY, Policy

NAME = "standin"
_path = str(library())
torch.ops.load_library(_path)
_c = ctypes.CDLL(_path)

_i32, _i64, _f64, _text, _address = ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_char_p, ctypes.c_void_p
for _name, _arguments in {
    "schedule": [_i32, _i32, ctypes.c_uint64],
    "set_capacity": [_i32, _i64],
    "set_unit": [_i64],
    "set_poisoned": [_i64],
    "set_expandable_segments": [_i64],
    "set_fused_attention": [_i64],
    "set_kept_workspace": [_i64],
    "set_workspace": [_text, _i64],
    "set_times": [_i64, _i64, _f64],
    "set_op_time": [_text, _i64],
    "host_works": [_i64],
    "set_pin_limit": [_i64],
    "host_register": [_address, _i64],
    "host_unregister": [_address],
    "host_address": [_address],
}.items():
    getattr(_c, f"standin_{_name}").argtypes = _arguments
for _name in (
    "capacity", "unit", "poisoned", "expandable_segments", "fused_attention", "host_ns", "pin_limit", "pinned_bytes",
    "launched", "synchronized", "unregistered_in_use",
):  # fmt: skip
    getattr(_c, f"standin_{_name}").restype = _i64
_c.standin_host_address.restype = _address


# ---- what torch and libraries ask a device module for


class _Module:
    """What ``torch.get_device_module("standin")`` gives."""

    __name__ = f"torch.{NAME}"
    _initialized = True  # torch.utils.checkpoint keeps no generator's state without it
    Stream, Event = torch.Stream, torch.Event
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = staticmethod(lambda: None)
    device_count = staticmethod(_c.standin_device_count)
    current_device = staticmethod(_c.standin_current_device)
    get_device_name = staticmethod(lambda device=None: NAME)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    is_bf16_supported = staticmethod(lambda including_emulation=True: True)
    empty_cache = staticmethod(torch.accelerator.empty_cache)
    set_stream = staticmethod(torch.accelerator.set_stream)

    def __init__(self) -> None:
        self.default_generators = tuple(torch.ops.standin.default_generator(i) for i in range(self.device_count()))

    def _index(self, device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current_device() if index is None else index

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(self._index(device))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        with torch.accelerator.device_index(self._index(device)):
            yield

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(self._index(device))

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(self._index(device))

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        return self.default_generators[self._index(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        self.default_generators[self._index(device)].set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [g.get_state() for g in self.default_generators]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self.default_generators, states, strict=True):
            generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.default_generators[self.current_device()].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(self._index(device))

    def __getattr__(self, name: str) -> Any:
        if name.endswith(("memory_allocated", "memory_reserved", "memory_stats")):
            return lambda device=None: getattr(torch.accelerator, name)(self._index(device))
        raise AttributeError(f"module 'torch.{NAME}' has no attribute {name!r}")


# ---- how it behaves


@contextmanager
def schedule(default_stream: Policy, other_streams: Policy, seed: int = 0) -> Iterator[None]:
    """The default streams, and all others, run their work so. Everything queued runs before and after."""
    _c.standin_schedule(default_stream, other_streams, seed)
    try:
        yield
    finally:
        _c.standin_schedule(EARLY, EARLY, 0)


@contextmanager
def _setting(name: str, value: int, *key: int) -> Iterator[None]:
    before = getattr(_c, f"standin_{name}")(*key)
    set_it = getattr(_c, f"standin_set_{name}")
    set_it(*key, value)
    try:
        yield
    finally:
        set_it(*key, before)


def capacity(count_bytes: int, device: int = 0) -> Any:
    """The device has so many bytes, of which reserved memory takes. 1 GiB without it."""
    return _setting("capacity", count_bytes, device)


def allocator_unit(count_bytes: int) -> Any:
    """What 1 MiB is to CUDA's allocator (most of a small block; segments are 2 and 20) is this. Empties the cache."""
    torch.accelerator.empty_cache()
    return _setting("unit", count_bytes)


@contextmanager
def expandable_segments(on: bool) -> Iterator[None]:
    """Whether each pool has one segment that grows, as with CUDA's setting of that name; none does without this.

    The environment says so too, as it does where a process starts with the setting. What a block leaves over is free
    for others then; else up to ``unit`` of it stays with a large block, and counts as allocated.
    """
    before = os.environ.get("PYTORCH_ALLOC_CONF")
    os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{on}"
    try:
        with _setting("expandable_segments", on):
            yield
    finally:
        del os.environ["PYTORCH_ALLOC_CONF"]
        if before is not None:
            os.environ["PYTORCH_ALLOC_CONF"] = before


def poison(on: bool) -> Any:
    """Whether memory is overwritten when it is handed out and given back; it is without this."""
    return _setting("poisoned", on)


def fused_attention(on: bool) -> Any:
    """Whether scaled_dot_product_attention takes the fused kernel where it can; it does without this."""
    return _setting("fused_attention", on)


def pin_limit(count_bytes: int) -> Any:
    """At most so many bytes of host memory are pinned, allocated so or registered."""
    return _setting("pin_limit", count_bytes)


@contextmanager
def workspaces(kept_bytes: int = 0, bytes_by_op: Mapping[str, int] | None = None) -> Iterator[None]:
    """Kernels take memory beside their outputs, from the same allocator.

    Args:
        kept_bytes: By the first matrix product on each stream, and kept, as cuBLAS does.
        bytes_by_op: By an op of this name while it is enqueued, as cuDNN does ("aten::convolution_overrideable").
    """
    given = dict(bytes_by_op or {})
    _c.standin_set_kept_workspace(kept_bytes)
    for op, count_bytes in given.items():
        _c.standin_set_workspace(op.encode(), count_bytes)
    try:
        yield
    finally:
        _c.standin_set_kept_workspace(0)
        for op in given:
            _c.standin_set_workspace(op.encode(), 0)


@contextmanager
def times(
    op_ms: float = 0.01,
    copy_bytes_per_ms: float = 1e7,
    launch_ms: float = 0,
    ms_by_op: Mapping[str, float] | None = None,
) -> Iterator[None]:
    """What the device's clock counts, instead of 0.01 ms an op and 10 GB/s; the real time of a kernel is nothing to it.

    Args:
        op_ms: One kernel. Kernels of one device follow one another, also from several streams.
        copy_bytes_per_ms: A copy between host and device; one at a time in each direction, beside kernels.
        launch_ms: The host's own time to enqueue one.
        ms_by_op: Kernels that take another time ("aten::mm").
    """
    given = dict(ms_by_op or {})
    _c.standin_set_times(round(op_ms * 1e6), round(launch_ms * 1e6), 1e6 / copy_bytes_per_ms)
    for op, ms in given.items():
        _c.standin_set_op_time(op.encode(), round(ms * 1e6))
    try:
        yield
    finally:
        _c.standin_set_times(10_000, 0, 0.1)
        for op in given:
            _c.standin_set_op_time(op.encode(), -1)


def host_clock_ms() -> float:
    """The device's clock as the host sees it: it moves when the host waits for the device, launches, or works."""
    return _c.standin_host_ns() / 1e6


def host_works(ms: float) -> None:
    """The host is busy elsewhere for so long."""
    _c.standin_host_works(round(ms * 1e6))


def host_register(address: int, count_bytes: int) -> int:
    """Pin host memory; CUDA's error numbers: 0, 2 (out of memory), 712 (already registered)."""
    return _c.standin_host_register(address, count_bytes)


def host_unregister(address: int) -> int:
    """Unpin it; 0 or 713 (not registered). ``unregistered_in_use`` counts copies that were queued on it."""
    return _c.standin_host_unregister(address)


def host_address(address: int) -> int:
    """Where the host reads and writes what is at this device address: for kernels that torch knows nothing of."""
    return _c.standin_host_address(address)


pinned_bytes = _c.standin_pinned_bytes
launched = _c.standin_launched
synchronized = _c.standin_synchronized
unregistered_in_use = _c.standin_unregistered_in_use
# A thread that wants Python's lock during the interpreter's end dies, and takes the process with it (README.md).
finish_backward_threads = _c.standin_finish_backward_threads
atexit.register(finish_backward_threads)


torch.utils.rename_privateuse1_backend(NAME)
module = _Module()
torch._register_device_module(NAME, module)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
