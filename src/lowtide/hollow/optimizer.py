"""What an optimizer keeps and needs, counted while its own ``step()`` runs on hollow parameters.

An optimizer that is there is copied, with hollow parameters in the place of its own: so settings count wherever they
are, in its groups, in its attributes or in what it has noted of a parameter. Code that it compiles runs uncompiled.

Known weakness: what a kernel takes inside itself is not seen, and compiled code takes less than the same uncompiled.
Both are temporaries of ``step()``, not state.
"""

import inspect
import sys
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.device.autocast import outside_autocast
from lowtide.device.dispatch import tensors_in
from lowtide.device.names import is_accelerator
from lowtide.errors import LowtideError
from lowtide.hollow.memory import hollow_like, is_on_host, mark_on_host
from lowtide.hollow.mode import FACTORIES, HollowMode

_LIFT = torch.ops.aten.lift_fresh.default  # what ``torch.tensor`` has made, unseen
_DEVICE = torch.device
_MOST_NESTED = 6  # containers and objects in one another
_HOLDS_NONE = (int, float, str, bytes, type(None), type, torch.Tensor, torch.nn.Module)
_PAGED_ELEMENTS = 100_000  # bitsandbytes' paged optimizers keep larger states in managed memory


def _is_wrapper(kind: type) -> bool:
    """Tensors of this type wrap plain ones, as DTensors and torchao's 8-bit states do: modes see ops on the parts."""
    return hasattr(kind, "__tensor_flatten__")


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that ``tensor`` wraps, whoever's wrapper it is; of a plain one itself."""
    if not _is_wrapper(type(tensor)):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), torch.Tensor):
            yield from parts_of(part)


class NotRehearsedError(LowtideError):
    """A rehearsal would have written what the training holds; it has written none of it."""


def optimizers_inside(optimizer: Any) -> list[Any]:
    """Those that ``optimizer`` keeps and steps itself: a copy of it would step them, and the real weights with them."""
    found: list[Any] = []
    seen: set[int] = set()

    def look_at(value: Any, depth: int) -> None:
        if depth > _MOST_NESTED or id(value) in seen or isinstance(value, _HOLDS_NONE):
            return
        seen.add(id(value))
        if value is not optimizer and hasattr(value, "param_groups") and hasattr(value, "step"):
            found.append(value)
            return
        for part in _parts_held(value):
            look_at(part, depth + 1)

    # Not what a copy leaves out: hooks, and what hides a method (``_hollow_copy``).
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state") and not callable(getattr(type(optimizer), name, None)):
            look_at(value, 0)
    return found


def _parts_held(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif callable(value):  # a method of it, or a function around it
        yield getattr(value, "__self__", None)
        yield from (getattr(value, "func", None), *getattr(value, "args", ()))
        for cell in getattr(value, "__closure__", None) or ():
            with suppress(ValueError):  # empty
                yield cell.cell_contents
    else:
        yield from list(getattr(value, "__dict__", {}).values())


def _storages_held(optimizers: Iterable[Any]) -> set[int]:
    """Of parameters, their gradients and all state."""
    held: set[int] = set()
    for optimizer in optimizers:
        tensors = [t for group in optimizer.param_groups for p in group["params"] for t in (p, p.grad)]
        tensors += [v for kept in optimizer.state.values() if isinstance(kept, dict) for v in kept.values()]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                held |= {part.untyped_storage()._cdata for part in parts_of(tensor) if part.layout == torch.strided}
    return held


class _Hollow(HollowMode):
    """``untouched``: storages of the training, which code that is rehearsed must not write, however it reaches them."""

    def __init__(self, kernels: str, untouched: Collection[int] = ()) -> None:
        super().__init__(kernels)
        self._untouched = untouched

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(map(_is_wrapper, types)):
            return NotImplemented
        if self._untouched and func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._check_written(value)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _check_written(self, value: Any) -> None:
        for tensor in tensors_in(value):
            if tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._untouched:
                raise NotRehearsedError("its step writes tensors of the training, by another way than its parameters")


class _Counting(TorchDispatchMode):
    """Live bytes of storages that are made inside.

    Args:
        counts_scalars: Tensors without a dimension count; on a CPU they are left out, as four bytes each.
    """

    def __init__(self, block_bytes: int, *, counts_scalars: bool) -> None:
        super().__init__()
        self._block_bytes, self._counts_scalars = block_bytes, counts_scalars
        self.live_bytes = self.peak_bytes = 0
        self.on_host = False  # what is made now lies on the host
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(map(_is_wrapper, types)):
            return NotImplemented
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs or {})) if func is not _LIFT}
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            is_counted = self._counts_scalars or tensor.dim() > 0
            if is_counted and not self.on_host and storage._cdata not in given and storage._cdata not in self._known:
                self._add(storage)
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // self._block_bytes) * self._block_bytes

        def died(_: Any) -> None:
            self._known.pop(key, None)
            self.live_bytes -= size

        self._known[key] = weakref.ref(storage, died)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @contextmanager
    def on_the_host(self, wanted: bool = True) -> Iterator[None]:
        before, self.on_host = self.on_host, wanted or self.on_host
        try:
            yield
        finally:
            self.on_host = before


class _HostTensors(TorchFunctionMode):
    """What lies on the host, though hollow tensors of a device are on the CPU as well.

    A factory that is told no device makes its tensor there, as ``torch.zeros(())`` for a step's number, unless the
    default device is another; so does one that is told ``"cpu"``: a parameter's device comes as a ``torch.device``.
    ``.to(...)`` brings it to the device.
    """

    def __init__(self, counting: _Counting, default: torch.device) -> None:
        super().__init__()
        self._counting = counting
        self._on_host = ("cpu",) if is_accelerator(default) else (None, "cpu")

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES and (device := kwargs.get("device")) in self._on_host and not isinstance(device, _DEVICE):
            with self._counting.on_the_host():
                made = func(*args, **kwargs)
            mark_on_host(made)
            return made
        output = func(*args, **kwargs)
        if func is torch.Tensor.to and _is_on_host(args[0]) and _is_on_host(output):
            target = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
            if isinstance(target, (_DEVICE, torch.Tensor)) and not _is_on_host(target):
                return output.clone()
        return output


def _is_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not _is_wrapper(type(value)) and is_on_host(value.untyped_storage())


def kernels_on(device: torch.device) -> str:
    """Whose choices of kernels optimizers make on ``device``: those for CUDA on any accelerator."""
    return "cuda" if is_accelerator(device) else "cpu"


def hollow_optimizer_bytes(
    kind: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    parameters: list[torch.nn.Parameter],
    *,
    kernels: str,
    block_bytes: int = 1,
) -> tuple[int, int]:
    """(state, temporaries of a ``step()``) in bytes of an optimizer that is not there yet.

    Args:
        kernels: On ``cuda`` most optimizers with neither ``foreach`` nor ``fused`` set run foreach kernels.
    """
    if not parameters:
        return 0, 0
    known = inspect.signature(kind).parameters
    own = [torch.nn.Parameter(hollow_like(p)) for p in parameters]
    for parameter in own:
        parameter.grad = hollow_like(parameter)

    def make() -> Any:
        return kind(own, **{name: value for name, value in settings.items() if name in known})

    return _rehearsed(kind, make, kernels=kernels, block_bytes=block_bytes)


def hollow_step_bytes(
    optimizer: torch.optim.Optimizer,
    trained: Collection[int],
    *,
    kernels: str,
    block_bytes: int = 1,
    beside: Iterable[Any] = (),
) -> tuple[int, int]:
    """As ``hollow_optimizer_bytes``, of ``optimizer`` as if it had made no step.

    Args:
        trained: Ids of the parameters that have a gradient.
        beside: Other optimizers, whose tensors its code might reach.

    Raises:
        NotRehearsedError: It steps another optimizer, or writes what the training holds.
    """
    if type(optimizer) is torch.optim.LBFGS:
        return _lbfgs_bytes(optimizer, trained, block_bytes)
    if inside := optimizers_inside(optimizer):
        raise NotRehearsedError(f"it steps another optimizer, {type(inside[0]).__name__}")
    with torch.device("cpu"), torch.no_grad():
        twin = _hollow_copy(optimizer, trained)
    untouched = _storages_held([optimizer, *beside])
    return _rehearsed(type(optimizer), lambda: twin, kernels=kernels, block_bytes=block_bytes, untouched=untouched)


def _lbfgs_bytes(optimizer: torch.optim.LBFGS, trained: Collection[int], block_bytes: int) -> tuple[int, int]:
    """With its whole history, whose pairs come one by one; what values decide cannot be rehearsed.

    Beside the pairs it keeps a direction and a gradient, and makes as many flat vectors again while it steps.
    """
    (group,) = optimizer.param_groups
    flat = sum(part.nbytes for p in group["params"] if id(p) in trained for part in parts_of(p))
    vector = -(-flat // block_bytes) * block_bytes
    return (2 * group["history_size"] + 2) * vector, 5 * vector


def _rehearsed(
    kind: type, make: Callable[[], Any], *, kernels: str, block_bytes: int, untouched: Collection[int] = ()
) -> tuple[int, int]:
    """(live bytes after the optimizer's first step, the most that a step takes beside them)."""
    on_cuda = kernels == "cuda"
    first, later = (_Counting(block_bytes, counts_scalars=on_cuda) for _ in range(2))
    default = torch.get_default_device()
    with ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))  # where hollow tensors are, whatever the default device is
        stack.enter_context(outside_autocast())
        stack.enter_context(_without_hooks())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # of the CPU, where there is none
        stack.enter_context(_Hollow(kernels, untouched))
        stack.enter_context(_capturable_here(kind) if on_cuda else nullcontext())
        with first, _HostTensors(first, default) if on_cuda else nullcontext():
            optimizer = make()  # some make their state here
            if on_cuda:
                _choose_lists(kind, optimizer.param_groups)
                _page(optimizer, first)
            _step(optimizer)
        state_bytes = first.live_bytes
        with later, _HostTensors(later, default) if on_cuda else nullcontext():
            _step(optimizer)
    return state_bytes, max(later.peak_bytes, first.peak_bytes - state_bytes)


def _step(optimizer: Any) -> None:
    needed = [
        p for p in inspect.signature(optimizer.step).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    optimizer.step(*([lambda: torch.zeros((), device="cpu")] if needed else []))  # LBFGS and SAM ask for a closure


def _hollow_copy(optimizer: Any, trained: Collection[int]) -> Any:
    """``optimizer`` before its first step, with hollow parameters of which those in ``trained`` have gradients."""
    kind = type(optimizer)
    if hasattr(optimizer, "check_overrides"):  # bitsandbytes finds parameters by identity: it notes their places
        optimizer.check_overrides()
    # Not what hides a method: learning rate schedulers put a ``step`` of the real optimizer there.
    shown = {name: value for name, value in vars(optimizer).items() if not callable(getattr(kind, name, None))}
    twin = object.__new__(kind)
    twin.__dict__.update({name: _apart(value) for name, value in shown.items()})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()
    if "initialized" in shown:
        twin.initialized = True  # bitsandbytes: the places are noted
    of: dict[int, torch.nn.Parameter] = {}
    twin.param_groups = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            of[id(p)] = _stand_in(p, has_gradient=id(p) in trained)
        settings = {name: _apart(value) for name, value in group.items() if name != "params"}
        twin.param_groups.append({**settings, "params": [of[id(p)] for p in group["params"]]})
    twin.state = defaultdict(dict)
    for p, noted in optimizer.state.items():
        if id(p) in of and isinstance(noted, dict) and all(isinstance(v, (int, float, str)) for v in noted.values()):
            twin.state[of[id(p)]] = {name: value for name, value in noted.items() if name != "step"}
    return twin


def _stand_in(p: torch.Tensor, *, has_gradient: bool) -> torch.nn.Parameter:
    if not has_gradient:
        return torch.nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
    parts = list(parts_of(p))
    part = parts[0] if len(parts) == 1 else torch.empty(sum(t.numel() for t in parts), dtype=p.dtype, device="meta")
    parameter = torch.nn.Parameter(hollow_like(part))
    parameter.grad = hollow_like(part)
    return parameter


def _apart(value: Any) -> Any:
    """``value``, so that a step on it writes nothing of the real optimizer's, and reads nothing on a device."""
    if isinstance(value, torch.Tensor):
        if is_accelerator(value.device):
            return hollow_like(value)
        return value.detach().clone() if value.dim() == 0 else value
    if type(value) in (dict, list, tuple, set, OrderedDict):
        made = {k: _apart(v) for k, v in value.items()} if isinstance(value, dict) else [_apart(v) for v in value]
        return type(value)(made)
    return value


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Those that see every optimizer's steps do not see these."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    with (
        patch.object(module, "_global_optimizer_pre_hooks", OrderedDict()),
        patch.object(module, "_global_optimizer_post_hooks", OrderedDict()),
    ):
        yield


def _page(optimizer: Any, counting: _Counting) -> None:
    """bitsandbytes: large states are in memory that no allocator of PyTorch counts."""
    if not getattr(optimizer, "is_paged", False):
        return
    buffer = optimizer.get_state_buffer

    def paged(p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with counting.on_the_host(p.numel() >= _PAGED_ELEMENTS):
            return buffer(p, dtype)

    optimizer.get_state_buffer = paged


def _choose_lists(kind: type, groups: list[dict[str, Any]]) -> None:
    """On CUDA foreach kernels are the default of the optimizers whose module asks which parameters they take."""
    if not any(hasattr(module, "_default_to_fused_or_foreach") for module in _modules(kind)):
        return  # Adafactor's does not ask, to save memory
    for group in groups:
        is_tensor = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
        if "foreach" in group and group["foreach"] is None and not group.get("fused") and not is_tensor:
            group["foreach"] = True


def _modules(kind: type) -> list[Any]:
    """Of the class and its bases, but for ``Optimizer``'s own."""
    return [sys.modules[base.__module__] for base in kind.__mro__ if base not in torch.optim.Optimizer.__mro__]


def _capturable_here(kind: type) -> AbstractContextManager[Any]:
    """``capturable=True`` asks for a CUDA device; inside, the CPU of the hollow parameters is one."""
    asked = "_get_capturable_supported_devices"
    module = next((module for module in _modules(kind) if hasattr(module, asked)), None)
    if module is None:
        return nullcontext()
    return patch.object(module, asked, lambda *args, **kwargs: ["cpu", "cuda"])
