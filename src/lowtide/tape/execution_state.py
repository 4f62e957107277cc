"""Global state that decides an op's bits: random generators, numeric flags, threads, autocast."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.tracing.subclasses import WrapperVersions, wrapped_parameters


class GeneratorState:
    """State of one device's default generator, taken before a random op runs."""

    __slots__ = ("_get", "_set", "_state")

    def __init__(self, device: torch.device) -> None:
        cpu = device.type == "cpu"
        self._get = torch.get_rng_state if cpu else partial(torch.cuda.get_rng_state, device)
        self._set = torch.set_rng_state if cpu else partial(torch.cuda.set_rng_state, device=device)
        self._state = self._get()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the generator has this state; afterwards, the present one again."""
        now = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._set(now)


class ExecutionState:
    """What a replay needs to know of its forward pass: the model, and the global flags.

    Another thread count, TF32 or determinism setting gives other bits.

    Attributes:
        flags: The global ones.
        on_difference: In a rehearsal: called with each op whose replay gives other bits, which is no error there.
    """

    __slots__ = ("_model", "_versions", "flags", "on_difference")

    def __init__(self, model: Callable[[], nn.Module | None], *, wrapped: bool = False) -> None:
        self.flags = _read()
        self._model = model
        owner = model() if wrapped else None
        self._versions = None if owner is None else WrapperVersions(wrapped_parameters(owner))
        self.on_difference: Callable[[Any], None] | None = None

    @property
    def is_sharded(self) -> bool:
        """Parameters are parts of sharded ones."""
        return self._versions is not None

    def steps_in_backward(self) -> bool:
        """Whether an optimizer may be fused into backward.

        Then a second backward finds other weights, and a write through ``.data`` changes no version.
        """
        model = self._model()
        return model is not None and any(p._post_accumulate_grad_hooks for p in model.parameters())

    def restored(self) -> AbstractContextManager[None]:
        """Inside, the flags are as they were in the forward pass."""
        if self._versions is not None:
            self._versions.catch_up()
        return nullcontext() if _read() == self.flags else self._restored()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        now = _read()
        _write(self.flags)
        try:
            yield
        finally:
            _write(now)


def _read() -> tuple[Any, ...]:
    # The C functions under torch.backends and torch.are_deterministic_algorithms_enabled(): this runs for each burst.
    return (
        torch.get_num_threads(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_float32_matmul_precision(),
        torch._C._get_cudnn_allow_tf32(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
    )


def _write(flags: tuple[Any, ...]) -> None:
    threads, deterministic, warn_only, precision, tf32, benchmark, cudnn_deterministic = flags
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    if precision != torch.get_float32_matmul_precision():
        torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.deterministic = cudnn_deterministic


def no_autocast() -> AbstractContextManager[None]:
    """Switch autocast off: recipes hold casts as ops, and autocast around ``backward()`` must not add others."""
    return torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else nullcontext()
