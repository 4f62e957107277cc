"""Default random generators of devices: their states, got and set."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from lowtide.device.names import index_of, is_accelerator, module_of
from lowtide.errors import DeviceError


class GeneratorStates:
    """The states of the CPU's generator and of those on all accelerators that ``tensors`` lie on."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        kinds = {t.device.type for t in tensors if is_accelerator(t.device)}
        devices = [torch.device(kind, i) for kind in sorted(kinds) for i in range(module_of(kind).device_count())]
        self._states = [(device, state_of(device)) for device in (torch.device("cpu"), *devices)]

    def restore(self) -> None:
        for device, state in self._states:
            set_state(device, state)

    def have_moved(self) -> bool:
        """Whether one of the generators has another state now."""
        return any(not torch.equal(state_of(device), state) for device, state in self._states)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the generators have these states; afterwards, the present ones again."""
        with ExitStack() as stack:
            for device, state in self._states:
                stack.enter_context(with_state(device, state))
            yield


def state_of(device: torch.device) -> torch.Tensor:
    """A copy of the state, in host memory. Raises: DeviceError: the device does not give it."""
    if not is_accelerator(device):
        return torch.get_rng_state()
    return _module(device.type).get_rng_state(index_of(device))


def set_state(device: torch.device, state: torch.Tensor) -> None:
    if is_accelerator(device):
        _module(device.type).set_rng_state(state, index_of(device))
    else:
        torch.set_rng_state(state)


@contextmanager
def with_state(device: torch.device, state: torch.Tensor) -> Iterator[None]:
    """Inside, the generator of ``device`` has this state; afterwards, the present one again."""
    now = state_of(device)
    set_state(device, state)
    try:
        yield
    finally:
        set_state(device, now)


@cache
def state_bytes(device: torch.device) -> int:
    """What a copy of the state takes of the memory of ``device``: nothing of an accelerator's."""
    return 0 if is_accelerator(device) else torch.get_rng_state().numel()


def forked(device: torch.device) -> AbstractContextManager[None]:
    """Inside, random numbers are drawn as ever; afterwards CPU and ``device`` are as they were."""
    if is_accelerator(device):
        return torch.random.fork_rng(devices=[index_of(device)], device_type=device.type)
    return torch.random.fork_rng(devices=[])


@cache
def _module(device_type: str) -> Any:
    module = module_of(device_type)
    if not hasattr(module, "get_rng_state") or not hasattr(module, "set_rng_state"):
        raise DeviceError(f"{device_type} does not give the state of its random generator, which replays need.")
    return module
