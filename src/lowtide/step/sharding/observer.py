"""Reports to the current thread's observer what FSDP2 does: its hooks run, it takes memory, it frees memory.

The methods of a unit are replaced by a class of our own that is mixed in while the model is observed. ``zero3``
does the same for DeepSpeed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lowtide.step.sharding.units import units_of, was_gathered, whole_tensors
from lowtide.step.subclasses import plain_tensors


class ShardingObserver:
    """What has to know when parameters are gathered and freed."""

    def hook(self) -> AbstractContextManager[None]:
        """One of FSDP's hooks, or DeepSpeed's, runs inside."""
        return nullcontext()

    def gathering(self, whole: list[torch.Tensor]) -> None:
        """FSDP is about to take memory for these."""

    def gathering_done(self, whole: list[torch.Tensor], *, again: bool) -> None:
        """FSDP has gathered into these; ``again``: it will in backward, too."""

    def closing(self) -> None:
        """In forward: what the present module call has gathered is about to be freed."""

    def freed(self, whole: list[torch.Tensor]) -> None:
        """FSDP has freed the memory of these."""


class PauseDuringSharding(ShardingObserver):
    """The observer of a tape: gathering and freeing is no part of the step; ``other``: who is told of it as well."""

    def __init__(self, tape: Any, other: ShardingObserver | None = None) -> None:
        self._tape, self._other = tape, other or ShardingObserver()

    @contextmanager
    def hook(self) -> Iterator[None]:
        self._tape.pause()
        try:
            with self._other.hook():
                yield
        finally:
            self._tape.resume()

    def gathering(self, whole: list[torch.Tensor]) -> None:
        self._other.gathering(whole)

    def freed(self, whole: list[torch.Tensor]) -> None:
        self._other.freed(whole)


class Observed:
    """Mixed into the class of what shards a model, while it is observed."""

    _lowtide_kind: type
    _lowtide_observers: int
    _lowtide_thread_state: Any

    def _observer(self) -> ShardingObserver | None:
        observer = self._lowtide_thread_state.observer
        return None if observer is None else observer.sharding_observer

    def _in_hook(self) -> AbstractContextManager[None]:
        observer = self._observer()
        return nullcontext() if observer is None else observer.hook()

    def _stop_observing(self) -> None:
        self.__class__ = self._lowtide_kind
        for name in [name for name in vars(self) if name.startswith("_lowtide_")]:
            delattr(self, name)


def begin_observing(sharding: Any, mixin: type[Observed], thread_state: Any, **attributes: Any) -> None:
    """Mix ``mixin`` into the class of ``sharding``, with these attributes; or count one more observer."""
    if isinstance(sharding, mixin):
        sharding._lowtide_observers += 1
        return
    kind = type(sharding)
    vars(sharding).update(_lowtide_observers=1, _lowtide_thread_state=thread_state, **attributes)
    sharding.__class__ = type(kind.__name__, (mixin, kind), {"_lowtide_kind": kind})


def observe_units(model: nn.Module, thread_state: Any) -> Callable[[], None]:
    """Tell ``thread_state.observer`` (see ``module_calls``) of FSDP's work on the model's units; returns the undo."""
    units = units_of(model)
    for unit in units:
        begin_observing(unit, _ObservedUnit, thread_state, _lowtide_stamps={})

    def undo() -> None:
        while units:  # a second call does nothing
            unit = units.pop()
            unit._lowtide_observers -= 1
            # A backward may be to come that needs the versions back; then the next reshard ends it.
            if unit._lowtide_observers == 0 and not unit._post_forward_indices:
                unit._stop_observing()

    return undo


class _ObservedUnit(Observed):
    """A unit while it is observed."""

    _lowtide_stamps: dict[int, tuple[int, tuple]]  # id of a gathered tensor -> its version while whole, its shard then
    fsdp_params: list[Any]
    unshard_in_backward: bool

    def unshard(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_hook():
            return super().unshard(*args, **kwargs)  # type: ignore[misc]

    def wait_for_unshard(self) -> None:
        with self._in_hook():
            observer = self._observer() if self._all_gather_result else None  # type: ignore[attr-defined]
            if observer is not None:
                observer.gathering([t for t in whole_tensors(self) if not t.untyped_storage().nbytes()])
            super().wait_for_unshard()  # type: ignore[misc]
            if observer is not None:
                observer.gathering_done(whole_tensors(self), again=self.unshard_in_backward)

    def reshard(self) -> None:
        observer = self._observer()
        if observer is not None and torch._C._current_graph_task_id() == -1:
            observer.closing()
        with self._in_hook():
            super().reshard()  # type: ignore[misc]

    def post_backward(self, *args: Any) -> Any:
        with self._in_hook():
            return super().post_backward(*args)  # type: ignore[misc]

    def _to_unsharded(self) -> None:
        super()._to_unsharded()  # type: ignore[misc]
        self._restore_versions()

    def _to_sharded(self) -> None:
        self._free_by(super()._to_sharded)  # type: ignore[misc]

    def _to_sharded_post_forward(self) -> None:
        self._free_by(super()._to_sharded_post_forward)  # type: ignore[misc]

    def _free_by(self, free: Callable[[], None]) -> None:
        """Until it is whole again from the same shard, the parameter counts as changed."""
        whole = [t for t in whole_tensors(self) if t.untyped_storage().nbytes()]
        free()
        observer = self._observer()
        if observer is not None:
            observer.freed([t for t in whole if not t.untyped_storage().nbytes()])
        if self._lowtide_observers == 0:
            self._stop_observing()
            return
        for param in filter(was_gathered, self.fsdp_params):
            for tensor in plain_tensors(param._unsharded_param):
                if id(tensor) not in self._lowtide_stamps and not tensor.is_inference():
                    self._lowtide_stamps[id(tensor)] = tensor._version, _stamp(param)
                    _set_version(tensor, tensor._version + 1)

    def _stop_observing(self) -> None:
        self._restore_versions()
        super()._stop_observing()

    def _restore_versions(self) -> None:
        for param in filter(was_gathered, self.fsdp_params):
            for tensor in plain_tensors(param._unsharded_param):
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
