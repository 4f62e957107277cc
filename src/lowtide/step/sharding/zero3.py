"""DeepSpeed's ZeRO-3: parameters that have memory only while a module that reads them has fetched them.

A *window* is the time between a module's fetch and its release, forward and again in backward. The coordinator of
DeepSpeed's engine opens and closes it in hooks around the module. A parameter keeps its identity and is given other
memory each time (``param.data = ...``), which no version counter shows. So recipes name the parameter and the part of
it that was read (``GatheredView``), and hold none of its memory.

As with FSDP2 two rules let a recipe run only while what it reads is whole:

- By plan: what is made in a window and read outside it is saved, and so is what reads a parameter outside the windows
  of the modules that fetch it (``recording``).
- By guard: a recipe refuses a parameter that is not whole, or was written since, or may have been: an optimizer's step
  begins with ``release_and_reset_all`` (``whole_since``).
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.step.deepspeed_engines import is_partitioned
from lowtide.step.sharding.observer import Observed, begin_observing

_WHOLE, _FREED = "AVAILABLE", "NOT_AVAILABLE"  # names of a parameter's status

_gathered: weakref.WeakKeyDictionary[nn.Module, "GatheredParameters"] = weakref.WeakKeyDictionary()


class GatheredParameters:
    """The parameters of one engine that are whole, by the memory they have now.

    Attributes:
        optimizer_steps: How many have begun: from each on parameters are other ones.
    """

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self._at: dict[int, list[weakref.ref[nn.Parameter]]] = {}

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """A module has fetched these."""
        for p in parameters:
            if is_whole(p):
                here = self._at.setdefault(p.untyped_storage()._cdata, [])
                here[:] = [r for r in here if _has_memory_of(r(), p) and r() is not p]
                here.append(weakref.ref(p))

    def forget_memory(self) -> None:
        """Every parameter is about to be freed."""
        self._at.clear()

    def parameter_of(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """The whole parameter over whose memory ``tensor`` is; None for any other tensor."""
        try:
            here = self._at.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # no plain storage
            return None
        for reference in here or ():
            p = reference()
            if p is not None and _has_memory_of(p, tensor):
                first = p.data_ptr()  # one rank alone has all parameters in one storage
                if first <= tensor.data_ptr() < first + p.nbytes:
                    return p
        return None


def is_whole(parameter: Any) -> bool:
    """A partitioned parameter has its memory now, and all of it."""
    return bool(parameter.ds_status.name == _WHOLE)


def _has_memory_of(parameter: nn.Parameter | None, tensor: torch.Tensor) -> bool:
    # Addresses of storages that are gone are used again.
    return parameter is not None and parameter.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def gathered_parameters_of(model: nn.Module | None) -> GatheredParameters | None:
    """Where the parameters of a model are, while it is observed; None if ZeRO-3 has not partitioned it."""
    return None if model is None or not _gathered else _gathered.get(model)


def shards_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """What of partitioned parameters is always on this rank."""
    return [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]


def windows_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """By module, the parameters that are whole only while it runs: none of those that DeepSpeed never frees."""
    found: dict[str, list[nn.Parameter]] = {}
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(inside) and inside:
            continue
        freed = [p for p in _fetched_by(module) if not getattr(p, "ds_persist", False)]
        if freed:
            found[path] = freed
        if _is_leaf(module):
            inside = (*inside, f"{path}." if path else "")
    return found


def has_gathered(model: nn.Module) -> bool:
    """DeepSpeed has parameters gathered, or on their way, that it will free in the step."""
    return any(p.ds_status.name != _FREED for freed in windows_of(model).values() for p in freed)


def _fetched_by(module: Any) -> Iterator[nn.Parameter]:
    """What DeepSpeed gathers before ``module`` runs: its own parameters, and those of others that it reads."""
    own = module.parameters(recurse=_is_leaf(module))
    external = (p for _, p in module.ds_external_parameters()) if hasattr(module, "ds_external_parameters") else ()
    yield from (p for p in (*own, *external) if hasattr(p, "ds_status"))


def _is_leaf(module: nn.Module) -> bool:
    """DeepSpeed fetches all that is in it at once (``set_z3_leaf_modules``)."""
    return bool(getattr(module, "_z3_leaf", False))


def coordinators_of(model: nn.Module) -> list[Any]:
    """What opens and closes the windows of a model's modules: mostly one, found in the hooks that it has placed."""
    if not is_partitioned(model.parameters()):
        return []
    found: dict[int, Any] = {}
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            for cell in getattr(inspect.unwrap(hook), "__closure__", None) or ():
                coordinator = getattr(_contents(cell), "param_coordinator", None)
                if coordinator is not None:
                    found[id(coordinator)] = coordinator
    return list(found.values())


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def order_is_known(model: nn.Module) -> bool:
    """DeepSpeed has seen the order of the modules of a step: from now on it fetches ahead, and keeps what comes back.

    Until then a step takes other memory than later ones.
    """
    return all(coordinator.is_complete_trace() for coordinator in coordinators_of(model))


def observe_windows(model: nn.Module, thread_state: Any) -> Callable[[], None]:
    """Tell ``thread_state.observer`` (see ``module_calls``) of DeepSpeed's work on ``model``; returns the undo."""
    coordinators, owner = coordinators_of(model), weakref.ref(model)  # whoever holds the undo does not hold the model
    for coordinator in coordinators:
        begin_observing(coordinator, _ObservedCoordinator, thread_state, _lowtide_gathered=GatheredParameters())
        _gathered[model] = coordinator._lowtide_gathered
    if coordinators:
        _gathered[model].note(p for p in model.parameters() if hasattr(p, "ds_status"))

    def undo() -> None:
        if (observed := owner()) is not None:
            _gathered.pop(observed, None)
        while coordinators:  # a second call does nothing
            coordinator = coordinators.pop()
            coordinator._lowtide_observers -= 1
            if coordinator._lowtide_observers == 0:
                coordinator._stop_observing()

    return undo


class _ObservedCoordinator(Observed):
    """A coordinator while it is observed."""

    _lowtide_gathered: GatheredParameters

    def fetch_sub_module(self, current_submodule: nn.Module, forward: bool) -> None:
        with self._in_hook():
            super().fetch_sub_module(current_submodule, forward)  # type: ignore[misc]
        self._lowtide_gathered.note(_fetched_by(current_submodule))

    def release_sub_module(self, submodule: nn.Module, forward: bool = False) -> None:
        observer = self._observer()
        if forward and observer is not None:
            observer.closing()
        with self._in_hook():
            super().release_sub_module(submodule, forward)  # type: ignore[misc]

    def reset_step(self) -> None:
        with self._in_hook():
            super().reset_step()  # type: ignore[misc]

    def release_backward_leftovers(self) -> None:
        with self._in_hook():
            super().release_backward_leftovers()  # type: ignore[misc]

    def release_and_reset_all(self, module: nn.Module) -> None:
        self._lowtide_gathered.optimizer_steps += 1
        self._lowtide_gathered.forget_memory()
        with self._in_hook():
            super().release_and_reset_all(module)  # type: ignore[misc]
