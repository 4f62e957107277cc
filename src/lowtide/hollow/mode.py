"""A dispatch mode under which a step runs on hollow tensors, without memory and without arithmetic.

- Views run: they are metadata.
- An op on solid tensors (those with memory) whose outputs are small runs as well. So masks, positions and whatever
  else derives from real data is exact, and with it the branches that it decides.
- All other outputs are hollow; fake kernels give their shape and type (``output_specs.py``).
- Where unknown values decide what happens, a plausible value is assumed and noted in ``assumed``.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree

from lowtide.device.autocast import casting_inside
from lowtide.device.dispatch import UncompiledMode, is_wrapper_type, may_run_others, tensors_in
from lowtide.hollow.memory import DRAWN, UNKNOWN, hollow, is_hollow, is_on_host, mark_on_host, mark_origin, origin_of
from lowtide.hollow.output_specs import DependsOnValues, OutputSpec, OutputSpecs, TensorSpec, spec_of
from lowtide.measurement.op_inputs import span
from lowtide.pytorch_internals import FORECASTS, is_unchecked

aten = torch.ops.aten
SOLID_BYTES = 1 << 22  # floats up to here are computed where all inputs are solid
_SOLID_INTEGER_BYTES = 1 << 28  # integers and masks: they decide shapes and branches
_INVENTED_BYTES = 1 << 22  # integers and masks made of unknown values are zeros up to here, else hollow
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_VIEWS = frozenset({
    aten.detach.default, aten.alias.default, aten._unsafe_view.default, aten._reshape_alias.default,
    aten.lift_fresh.default, aten.set_.source_Storage_storage_offset, aten.set_.source_Storage,
})  # fmt: skip
# Without a CPU kernel: hollow however small.
_OTHER_DEVICES = frozenset({
    aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
})  # fmt: skip


# Told no device, they make a tensor on the host.
FACTORIES = frozenset({torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor, torch.scalar_tensor})


class HollowMode(UncompiledMode):
    """Ops on hollow tensors give hollow tensors.

    Args:
        device: Whose kernels say what outputs look like, ``cpu`` or ``cuda``. Tensors are on the CPU either way.

    Attributes:
        assumed: What was assumed for unknown values: by sentence, how often and where first.
        where: The module call that runs; None where nothing has to be noted.
    """

    may_step_aside = False  # kernels would run on tensors that have no memory

    def __init__(self, device: str = "cpu", *, solid_bytes: int = SOLID_BYTES) -> None:
        super().__init__()
        is_unchecked(FORECASTS)  # says so
        self.specs = OutputSpecs(device)
        self.assumed: dict[str, tuple[int, str]] = {}
        self.where: Callable[[], str | None] = lambda: None
        self._solid_bytes = solid_bytes
        self._on_host: bool | None = None  # where numbers are made; None: where those are that they are made of
        self._has_numbers_on_host = False

    @contextmanager
    def numbers(self, *, on_host: bool) -> Iterator[None]:
        """Tensors of no dimension that are made inside lie in host memory, where a device's kernels read them, or not.

        What is made of nothing but numbers on the host is on the host, too.
        """
        before, self._on_host = self._on_host, on_host
        self._has_numbers_on_host |= on_host
        try:
            yield
        finally:
            self._on_host = before

    def note(self, sentence: str) -> None:
        """A value was assumed."""
        if (path := self.where()) is not None:
            count, first = self.assumed.get(sentence, (0, path))
            self.assumed[sentence] = count + 1, first

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(_FAKE) is not None:  # DTensor works out shapes
            return func(*args, **kwargs)
        if types and any(map(is_wrapper_type, types)):
            return NotImplemented
        if may_run_others(func) and (casting := casting_inside()) is not None:
            with casting:
                return self.__torch_dispatch__(func, types, args, kwargs)
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        output = self._run_op(func, args, kwargs, tensors)
        if self._has_numbers_on_host and self._on_host is not False:
            self._keep_on_host(tensors, list(tensors_in(output)))
        return output

    def _keep_on_host(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        if any(t.dim() or t.is_meta for t in (*given, *made)):
            return
        if self._on_host or (given and all(is_on_host(t.untyped_storage()) for t in given)):
            for tensor in made:
                mark_on_host(tensor)

    def _run_op(self, func: Any, args: tuple, kwargs: dict, tensors: list[torch.Tensor]) -> Any:
        if any(t.is_meta for t in tensors) or func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if func.is_view or func in _VIEWS or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return _collective(self, func, args, kwargs)
        if (
            not any(map(is_hollow, tensors))
            and func not in _OTHER_DEVICES
            and self._is_small(func, args, kwargs, tensors)
        ):
            return self._run(func, args, kwargs, tensors)
        if func in _ANSWERS:
            return _ANSWERS[func](self, func, args)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, tensors)
        if func in _CHOICES and (chosen := _CHOICES[func](self, func, args, kwargs)) is not None:
            return chosen
        return self._made(self._spec(func, args, kwargs, tensors), tensors)

    # -- solid

    def _run(self, func: Any, args: tuple, kwargs: dict, tensors: list[torch.Tensor]) -> Any:
        """Compute it; results of invented values are invented."""
        origins = [origin for t in tensors if (origin := origin_of(t))]
        if torch.Tag.nondeterministic_seeded in func.tags:
            origins.append(DRAWN)
        output = func(*args, **kwargs)
        if origins:
            origin = UNKNOWN if UNKNOWN in origins else DRAWN
            if _decides(func, args):
                self.note(f"{_name(func)} of {origin}: went as {_told(output)}")
            for tensor in tensors_in(output):
                mark_origin(tensor, origin)
        return output

    def _is_small(self, func: Any, args: tuple, kwargs: dict, tensors: list[torch.Tensor]) -> bool:
        """Whether what a call on solid tensors makes is small enough to be computed."""
        if func.namespace != "aten":
            return True
        if not tensors:
            size = args[0] if args and isinstance(args[0], (list, tuple)) else ()
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return self._fits(dtype, dtype.itemsize * math.prod(map(int, size)))
        if sum(t.untyped_storage().nbytes() for t in tensors) == 0:
            return True
        try:
            spec = self.specs.of(func, args, kwargs)
        except DependsOnValues:  # which are there
            return True
        return all(self._fits(o.dtype, o.storage_bytes) for o in spec.outputs if isinstance(o, TensorSpec))

    def _fits(self, dtype: torch.dtype, count: int) -> bool:
        exact = not (dtype.is_floating_point or dtype.is_complex)
        return count <= (_SOLID_INTEGER_BYTES if exact else self._solid_bytes)

    # -- hollow

    def _spec(self, func: Any, args: tuple, kwargs: dict, tensors: list[torch.Tensor]) -> OutputSpec:
        if func is aten.index.Tensor and any(map(_is_mask, args[1])):
            return self._masked_spec(args)
        try:
            return self.specs.of(func, args, kwargs)
        except DependsOnValues:
            # Ask the kernel, on zeros for what is hollow.
            if sum(span(t.shape, t.stride()) * t.element_size() for t in tensors) > _SOLID_INTEGER_BYTES:
                raise

        def filled(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not is_hollow(x):
                return x
            count = max(span(x.shape, x.stride()), 1)
            return torch.zeros(count, dtype=x.dtype, device="cpu").as_strided(x.shape, x.stride())

        args, kwargs = pytree.tree_map(filled, (args, kwargs))
        output = func(*args, **kwargs)
        self.note(f"{_name(func)} of {UNKNOWN}: taken as of zeros")
        return spec_of(output, [])

    def _masked_spec(self, args: tuple) -> OutputSpec:
        """Of ``x[mask]``: as many rows as the mask says, which may be real where ``x`` is hollow."""
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            if not _is_mask(index):
                indices.append(index)
                continue
            mask = torch.zeros(index.shape, dtype=torch.bool, device="cpu") if is_hollow(index) else index
            rows = mask.nonzero(as_tuple=True)
            indices += rows
            if origin := origin_of(index):
                self.note(f"index of {origin}: went as {rows[0].numel()} rows")
        return self.specs.of(aten.index.Tensor, (args[0], indices), {})

    def _made(self, spec: OutputSpec, tensors: list[torch.Tensor]) -> Any:
        """Outputs of these specs."""
        outputs: list[Any] = []
        for o in spec.outputs:
            if not isinstance(o, TensorSpec):
                outputs.append(o)
                continue
            if o.alias is not None:
                source = tensors[o.alias]
                same = source.shape == o.size and source.stride() == o.stride and not o.offset
                offset = source.storage_offset() + o.offset
                outputs.append(source if same else source.as_strided(o.size, o.stride, offset))
            elif o.dtype.is_floating_point or o.dtype.is_complex or o.storage_bytes > _INVENTED_BYTES:
                outputs.append(hollow(o.size, o.stride, o.dtype, o.storage_bytes))
            else:
                zeros = torch.zeros(o.storage_bytes // o.dtype.itemsize, dtype=o.dtype, device="cpu")
                mark_origin(zeros, UNKNOWN)
                outputs.append(zeros.as_strided(o.size, o.stride))
            if o.on_host:
                mark_on_host(outputs[-1])
        return pytree.tree_unflatten(outputs, spec.nesting)

    def _write(self, func: Any, args: tuple, kwargs: dict, tensors: list[torch.Tensor]) -> Any:
        """Write nothing, and return what the schema says of what it was given."""
        given: dict[str, Any] = {}
        for i, argument in enumerate(func._schema.arguments):
            alias = argument.alias_info
            if alias is not None and alias.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                given |= dict.fromkeys(alias.before_set, value)
        for tensor in tensors_in(given):
            if not is_hollow(tensor):
                mark_origin(tensor, UNKNOWN)
        returned = [
            next((given[n] for n in r.alias_info.before_set if n in given), None) if r.alias_info is not None else None
            for r in func._schema.returns
        ]
        if any(r is None for r in returned):
            return self._made(self._spec(func, args, kwargs, tensors), tensors)
        return returned[0] if len(returned) == 1 else tuple(returned) or None


def _decides(func: Any, args: tuple) -> bool:
    """Whether values decide what ``func`` returns beyond numbers: a shape, or a Python value."""
    if func in _ANSWERS:
        return True
    if func is aten.index.Tensor:
        return any(map(_is_mask, args[1]))
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _name(func: Any) -> str:
    return str(func.overloadpacket).removeprefix("aten.")


def _told(output: Any) -> str:
    return f"{list(output.shape)}" if isinstance(output, torch.Tensor) else repr(output)


def _collective(mode: HollowMode, func: Any, args: tuple, kwargs: dict) -> Any:
    """Nothing is sent: the group, a fake one, is asked with empty tensors for its Work."""
    if func is torch.ops.c10d.alltoall_base_.default:
        _receive_alike(mode, args)
    originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def empty(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        small = torch.empty(0, dtype=x.dtype, device="cpu")
        originals[id(small)] = small, x
        return small

    output = func(*pytree.tree_map(empty, args), **pytree.tree_map(empty, kwargs))
    return pytree.tree_map(lambda o: originals[id(o)][1] if id(o) in originals else o, output)


def _receive_alike(mode: HollowMode, args: tuple) -> None:
    """What each rank sends to this one: as much as this one keeps for itself. Counts decide shapes."""
    received, sent, group, received_sizes, sent_sizes = args[:5]
    if is_hollow(received) or is_hollow(sent) or received_sizes or sent_sizes:
        return
    from torch.distributed import ProcessGroup

    ranks, own = ProcessGroup.unbox(group).size(), ProcessGroup.unbox(group).rank()
    received.view(ranks, -1).copy_(sent.view(ranks, -1)[own].expand(ranks, -1))
    mark_origin(received, UNKNOWN)
    mode.note("counts from other ranks: each sends as this one does")


def _number(mode: HollowMode, func: Any, args: tuple) -> Any:
    """``.item()`` and ``bool()`` of a hollow tensor."""
    dtype = args[0].dtype
    value = 1.0 if dtype.is_floating_point else False if dtype == torch.bool else 0
    mode.note(f"a number read from {UNKNOWN}: taken as {value}")
    return value


def _equal(mode: HollowMode, func: Any, args: tuple) -> bool:
    same = bool(args[0].shape == args[1].shape)
    mode.note(f"equal of {UNKNOWN}: taken as {same}")
    return same


def _topk(mode: HollowMode, func: Any, args: tuple, kwargs: dict) -> Any:
    """Indices in turn: a router's experts are chosen equally often."""
    x, k = args[0], args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if dim not in (-1, x.dim() - 1):
        return None
    rows = x.numel() // max(x.shape[-1], 1)
    chosen = (torch.arange(rows * k, device="cpu") % max(x.shape[-1], 1)).view(*x.shape[:-1], k)
    mark_origin(chosen, UNKNOWN)
    mode.note(f"topk of {UNKNOWN}: each index equally often (balanced experts)")
    return hollow(chosen.shape, chosen.stride(), x.dtype), chosen


_ANSWERS: dict[Any, Callable[[HollowMode, Any, tuple], Any]] = {
    aten._local_scalar_dense.default: _number,
    aten.equal.default: _equal,
    aten.is_nonzero.default: _number,
}
_CHOICES: dict[Any, Callable[[HollowMode, Any, tuple, dict], Any]] = {aten.topk.default: _topk}
