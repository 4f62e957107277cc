"""FSDP2 (``fully_shard``): parameters that are whole only while FSDP has gathered them.

A *unit* is what one ``fully_shard`` call shards together: an ``FSDPParamGroup``. FSDP gathers it before its modules run
forward and again before they run backward, and frees it after each, all in its own hooks. What runs in those hooks is
no part of the step: the tape must not take it for ops of the model, and no replay may set it off.

A recipe that reads a gathered parameter can run only while that parameter is whole. Two things see to it. By plan,
what is made in a unit's call and read outside it is saved, so replays for one unit never reach into another. And as a
guard, a parameter that FSDP frees counts as changed until it is gathered again from the very shard that it was made of:
then a replay, or an unpack, that comes at the wrong moment is a named error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from lowtide.tracing.subclasses import parts

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


class Gatherer(Protocol):
    """What has to know about FSDP's work."""

    def work(self) -> AbstractContextManager[None]: ...
    def gathers(self, whole: list[torch.Tensor]) -> None: ...
    def frees(self, whole: list[torch.Tensor]) -> None: ...


class Pausing(Protocol):
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class PauseDuringFsdp:
    """For a watcher to whom FSDP's work is no part of the step, and memory nobody's business: it pauses."""

    def __init__(self, watcher: Pausing) -> None:
        self._watcher = watcher

    @contextmanager
    def work(self) -> Iterator[None]:
        self._watcher.pause()
        try:
            yield
        finally:
            self._watcher.resume()

    def gathers(self, whole: list[torch.Tensor]) -> None:
        pass

    def frees(self, whole: list[torch.Tensor]) -> None:
        pass


class Active(Protocol):
    watcher: Any


def states_of(model: nn.Module) -> list[tuple[str, Any]]:
    """(path, FSDP state) of each sharded module."""
    known = sys.modules.get(_STATE)
    if known is None:  # nothing can have been sharded; importing it would take longer than asking
        return []
    found = ((path, known._get_module_fsdp_state(m)) for path, m in model.named_modules())
    return [(path, state) for path, state in found if state is not None]


def units_of(model: nn.Module) -> list[Any]:
    """Every ``FSDPParamGroup`` of the model."""
    return list({id(u): u for _, state in states_of(model) for u in state._fsdp_param_groups}.values())


def refusal(model: nn.Module) -> str:
    """What of the model's sharding is not carried out; "" if all is."""
    for unit in units_of(model):
        where = ", ".join(sorted({p._param_fqn or p._module_info.param_name for p in unit.fsdp_params})[:3])
        if any(p.offload_to_cpu and p.device.type != "cpu" for p in unit.fsdp_params):
            return f"FSDP keeps {where} in CPU memory (CPUOffloadPolicy)"
        if any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in unit.fsdp_params):
            return f"FSDP gathers {where} in a form of its own (fsdp_pre_all_gather)"
    return ""


def whole_tensors(unit: Any) -> list[torch.Tensor]:
    """What FSDP gathers into: flat, empty while the unit is sharded. Parameters are views of them."""
    return [t for p in unit.fsdp_params for t in p.all_gather_outputs]


def settle(model: nn.Module) -> None:
    """Shard every unit, and gather each once that never was: the tensors it gathers into are then there to be known.

    A collective: every rank has to call it.
    """
    for _, state in states_of(model):
        for unit in state._fsdp_param_groups:
            if any(not hasattr(p, "_unsharded_param") for p in unit.fsdp_params):
                unit.lazy_init()
                unit.unshard()
                unit.wait_for_unshard()
            unit.reshard()


@contextmanager
def preserve_fsdp_state(model: nn.Module) -> Iterator[None]:
    """Inside, a step may run or fail; afterwards FSDP waits for the next one, with the gradients it had not reduced."""
    units = units_of(model)
    params = [p for unit in units for p in unit.fsdp_params]
    pending = [(p, p._unsharded_param.grad, p.unsharded_accumulated_grad) for p in params if _was_gathered(p)]
    partial = [(unit, unit._partial_reduce_output) for unit in units]
    for p, _, _ in pending:
        p._unsharded_param.grad = p.unsharded_accumulated_grad = None
    for unit in units:
        unit._partial_reduce_output = None
    try:
        yield
    except BaseException:
        for _, state in states_of(model):
            if state._is_root:
                state._reset_iter_state()
        raise
    finally:
        for p, grad, accumulated in pending:
            p._unsharded_param.grad, p.unsharded_accumulated_grad = grad, accumulated
        for unit, output in partial:
            unit._partial_reduce_output = output


def _was_gathered(param: Any) -> bool:
    return hasattr(param, "_unsharded_param")


# -- watching ---------------------------------------------------------------------------------------------------


def watch(model: nn.Module, active: Active) -> Callable[[], None]:
    """Have FSDP's work on the model's units told to ``active.watcher``; returns the undo."""
    units = units_of(model)
    for unit in units:
        if isinstance(unit, _Watched):
            unit._lowtide_watches += 1
            continue
        kind = type(unit)
        unit._lowtide_watches, unit._lowtide_active, unit._lowtide_stamps = 1, active, {}
        unit.__class__ = type(kind.__name__, (_Watched, kind), {"_lowtide_kind": kind})

    def undo() -> None:
        for unit in units:
            unit._lowtide_watches -= 1
            # A backward may be to come that needs the versions back; then the next reshard lets go.
            if unit._lowtide_watches == 0 and not unit._post_forward_indices:
                unit._let_go()

    return undo


class _Watched:
    """Mixed into a unit's class while somebody watches it."""

    _lowtide_kind: type
    _lowtide_watches: int
    _lowtide_active: Active
    _lowtide_stamps: dict[int, tuple[int, tuple]]  # id of a gathered tensor -> its version while whole, its shard then
    fsdp_params: list[Any]

    def unshard(self, *args: Any, **kwargs: Any) -> Any:
        with self._work():
            return super().unshard(*args, **kwargs)  # type: ignore[misc]

    def wait_for_unshard(self) -> None:
        with self._work():
            gatherer = self._gatherer()
            if gatherer is not None and self._all_gather_result:  # type: ignore[attr-defined]
                gatherer.gathers([t for t in whole_tensors(self) if not t.untyped_storage().nbytes()])
            super().wait_for_unshard()  # type: ignore[misc]

    def reshard(self) -> None:
        with self._work():
            super().reshard()  # type: ignore[misc]

    def post_backward(self, *args: Any) -> Any:
        with self._work():
            return super().post_backward(*args)  # type: ignore[misc]

    def _to_unsharded(self) -> None:
        super()._to_unsharded()  # type: ignore[misc]
        self._whole_again()

    def _to_sharded(self) -> None:
        whole = [t for t in whole_tensors(self) if t.untyped_storage().nbytes()]
        super()._to_sharded()  # type: ignore[misc]
        self._freed(whole)

    def _to_sharded_post_forward(self) -> None:
        whole = [t for t in whole_tensors(self) if t.untyped_storage().nbytes()]
        super()._to_sharded_post_forward()  # type: ignore[misc]
        self._freed(whole)

    def _gatherer(self) -> Gatherer | None:
        watcher = self._lowtide_active.watcher
        return None if watcher is None else watcher.gathering

    def _work(self) -> AbstractContextManager[None]:
        gatherer = self._gatherer()
        return nullcontext() if gatherer is None else gatherer.work()

    def _freed(self, whole: list[torch.Tensor]) -> None:
        """Until it is whole again from the same shard, whatever reads the parameter is told that it has changed."""
        gatherer = self._gatherer()
        if gatherer is not None:
            gatherer.frees([t for t in whole if not t.untyped_storage().nbytes()])
        if self._lowtide_watches == 0:
            self._let_go()
            return
        for param in self.fsdp_params:
            if _was_gathered(param):
                for tensor in parts(param._unsharded_param):
                    if id(tensor) not in self._lowtide_stamps and not tensor.is_inference():
                        self._lowtide_stamps[id(tensor)] = tensor._version, _stamp(param)
                        _set_version(tensor, tensor._version + 1)

    def _let_go(self) -> None:
        self._whole_again()
        self.__class__ = self._lowtide_kind
        del self._lowtide_watches, self._lowtide_active, self._lowtide_stamps

    def _whole_again(self) -> None:
        for param in filter(_was_gathered, self.fsdp_params):
            for tensor in parts(param._unsharded_param):
                version, stamp = self._lowtide_stamps.pop(id(tensor), (None, None))
                if version is not None and stamp == _stamp(param):
                    _set_version(tensor, version)


def _stamp(param: Any) -> tuple:
    """Equal as long as the shard that a parameter is gathered from has not been written, or exchanged."""
    shard = param.sharded_param
    local = shard._local_tensor
    return id(shard), shard._version, id(local), local._version, param._sharded_param_data._version


def _set_version(tensor: torch.Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
