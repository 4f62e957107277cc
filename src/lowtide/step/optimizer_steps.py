"""Steps of optimizers, whoever makes them: PyTorch tells of each step of each ``torch.optim.Optimizer``.

A weight that has been written since the forward pass no replay may read. Fused and foreach kernels count no version of
what they write, and kernels of other libraries pass no dispatcher: that an optimizer has stepped is all that shows.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch._C import _current_graph_task_id as graph_task
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.step.module_calls import never_compiled
from lowtide.step.operators import storage_of
from lowtide.step.subclasses import plain_tensors

count = 0  # steps seen so far, of all optimizers
_is_watching = False
_observers: list[Callable[[Any], None]] = []
# Numbers of the last steps. In backward, one optimizer a parameter steps, and replays ask at once: by storage. Outside,
# steps are many and nobody asks, mostly: by optimizer.
_in_backward: dict[int, int] = {}
_outside: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def watch() -> None:
    """See steps from now on. What is noted of them holds nothing, so nothing ends it."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_post_hook(_note)


def seen() -> list[Any]:
    """All optimizers that have stepped outside of backward, and live."""
    return list(_outside)


def observe(observer: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``observer`` with each optimizer that has stepped; returns what ends that."""
    watch()
    _observers.append(observer)

    def end() -> None:
        with suppress(ValueError):
            _observers.remove(observer)

    return end


def written_since(steps: int, tensor: torch.Tensor, *, in_backward: bool = False) -> bool:
    """Whether an optimizer has stepped, as far as that shows, on the storage of ``tensor`` when ``count`` was more.

    Args:
        in_backward: Only what stepped while a backward ran.
    """
    if count == steps or (storage := storage_of(tensor)) is None:
        return False
    if _in_backward.get(storage._cdata, 0) > steps:
        return True
    since = [] if in_backward else [optimizer for optimizer, last in list(_outside.items()) if last > steps]
    return any(storage._cdata in _storages(optimizer) for optimizer in since)


@never_compiled
def _note(optimizer: Any, args: Any, kwargs: Any) -> None:
    global count
    count += 1
    if graph_task() == -1:
        _outside[optimizer] = count
    else:  # it may step one parameter at a time, as gradients come
        _in_backward.update(dict.fromkeys(_storages(optimizer, with_gradient=True) or _storages(optimizer), count))
    for observer in list(_observers):
        observer(optimizer)


def _storages(optimizer: Any, *, with_gradient: bool = False) -> set[int]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = [p for p in parameters if p.grad is not None] if with_gradient else parameters
    return {s._cdata for t in plain_tensors(*parameters) if (s := storage_of(t)) is not None}
