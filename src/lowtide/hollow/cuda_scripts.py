"""Code that names a CUDA device, on a machine that has none: tensors stay hollow and on the CPU.

``.cuda()``, ``.to("cuda")``, ``device="cuda"``, ``torch.autocast("cuda")`` and ``torch.cuda.is_available()`` mean what
they mean on the device that is planned for. A number that is made without a device lies on the host, as there.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.amp.autocast_mode import autocast
from torch.overrides import TorchFunctionMode

from lowtide.hollow.memory import is_on_host
from lowtide.hollow.mode import FACTORIES, HollowMode

_CPU = torch.device("cpu")


def _on_cpu(value: Any) -> Any:
    """``value`` with the CPU in place of a CUDA device."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


class _CudaIsCpu(TorchFunctionMode):
    def __init__(self, hollow: HollowMode) -> None:
        super().__init__()
        self._hollow = hollow

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in FACTORIES and (kwargs or {}).get("device") is None:
            with self._hollow.numbers(on_host=True):
                return func(*args, **kwargs or {})
        moves = func is torch.Tensor.cuda or (func is torch.Tensor.to and _names_a_device(args[1:], kwargs or {}))
        if moves and not args[0].dim() and is_on_host(args[0].untyped_storage()):
            with self._hollow.numbers(on_host=False):
                args = args[0].clone(), *args[1:]
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        return func(*map(_on_cpu, args), **kwargs)


def _names_a_device(args: tuple, kwargs: dict) -> bool:
    return kwargs.get("device") is not None or any(isinstance(a, (str, torch.device, torch.Tensor)) for a in args)


@contextmanager
def cuda_means_cpu(hollow: HollowMode) -> Iterator[TorchFunctionMode]:
    """Inside, CUDA devices are the CPU; ``hollow``: under which code runs here.

    Yields:
        The mode for that. It is off inside ``Tensor.backward``, where checkpoints run the script's forward again.
    """
    enter, is_on, dtype_of = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def entered(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or dtype_of("cuda")
        enter(self, device_type, dtype, enabled, cache_enabled)

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return is_on("cpu" if device_type == "cuda" else device_type)

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return dtype_of("cpu" if device_type == "cuda" and is_on("cpu") else device_type)

    has_accelerator = torch.accelerator.is_available()
    mode = _CudaIsCpu(hollow)

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    with (
        patch.object(autocast, "__init__", entered),
        patch.multiple(
            torch,
            is_autocast_enabled=is_autocast_enabled,
            get_autocast_dtype=get_autocast_dtype,
            get_autocast_gpu_dtype=lambda: get_autocast_dtype("cuda"),
        ),
        # An optimizer that finds the accelerator of a CUDA build asks for its stream.
        nullcontext() if has_accelerator else patch.object(torch.accelerator, "current_accelerator", nothing),
        mode,
        patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            is_bf16_supported=lambda *args, **kwargs: True,
            synchronize=nothing,
            empty_cache=nothing,
            set_device=nothing,
        ),
    ):
        try:
            yield mode
        finally:
            # It remembers by name: asked inside for the module of "cuda", it would answer with the CPU's for ever.
            getattr(torch.get_device_module, "cache_clear", nothing)()
