"""What an operator's outputs look like: size, stride, type and storage, from its fake kernel, once per signature.

Fake kernels speak for CUDA where kernels differ. A CPU's kernel that has run once corrects its spec; ``_CPU_RULES``
holds what the CPU's do otherwise, for those too large to run, ``_CUDA_RULES`` operators without a fake kernel, and
``_RULES`` what fake kernels know of neither.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten


class TensorSpec(NamedTuple):
    """One output.

    ``alias``: position among the call's tensors of the one whose storage it shares. ``on_host``: it lies in host
    memory, though the kernel is another device's.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage_bytes: int
    alias: int | None = None
    offset: int = 0
    on_host: bool = False


class OutputSpec(NamedTuple):
    """Outputs in order (``TensorSpec``, or a value that is no tensor), and how they are nested."""

    outputs: tuple[Any, ...]
    nesting: Any


class DependsOnValues(Exception):
    """No fake kernel can say what an operator returns for these arguments, mostly because their values decide."""


class OutputSpecs:
    """Specs of the outputs of calls on ``device``'s kernels; equal signatures are looked at once."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, OutputSpec | None] = {}  # None: depends on values

    def of(self, func: Any, args: tuple, kwargs: dict) -> OutputSpec:
        """What ``func`` returns for arguments of these specs.

        Raises:
            DependsOnValues: there is no fake kernel, or it fails.
        """
        signature = _signature(func, args, kwargs)
        try:
            known = signature in self._known
        except TypeError:  # an argument that has no hash
            signature, known = (), False
        if not known:
            try:
                found = self._ask(func, args, kwargs)
            except Exception as error:
                self._known[signature] = None
                raise DependsOnValues(f"{func}: {error}") from error
            if not signature:
                return found
            self._known[signature] = found
        spec = self._known[signature]
        if spec is None:
            raise DependsOnValues(str(func))
        return spec

    def correct(self, func: Any, args: tuple, kwargs: dict, real: OutputSpec) -> None:
        """The kernel itself has run on such arguments, and its outputs were ``real``: strides and storages are its own.

        Where it gave other sizes, its inputs were not alike enough, and nothing is learned.
        """
        try:
            believed = self.of(func, args, kwargs)
        except DependsOnValues:
            return
        if list(map(_size_and_type, believed.outputs)) == list(map(_size_and_type, real.outputs)):
            with contextlib.suppress(TypeError):  # an argument that has no hash
                self._known[_signature(func, args, kwargs)] = real

    def _ask(self, func: Any, args: tuple, kwargs: dict) -> OutputSpec:
        device = torch.device(self.device)

        def fake(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
            return device if isinstance(x, torch.device) and x.type == "cpu" else x

        with _disable_current_modes(), self._fake:
            args, kwargs = pytree.tree_map(fake, (args, kwargs))
            rule = (_CPU_RULES if self.device == "cpu" else _CUDA_RULES).get(func)
            output = func(*args, **kwargs) if rule is None else rule(func, args, kwargs)
        return spec_of(output, [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)])


def spec_of(output: Any, inputs: list[torch.Tensor]) -> OutputSpec:
    """The spec of what a kernel returned for ``inputs``."""
    leaves, nesting = pytree.tree_flatten(output)
    place = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(inputs)))}
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            found.append(
                TensorSpec(
                    tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, storage.nbytes(),
                    place.get(storage._cdata), leaf.storage_offset(),
                    leaf.is_cpu and any(not t.is_cpu for t in inputs),
                )
            )  # fmt: skip
        else:
            found.append(leaf)
    return OutputSpec(tuple(found), nesting)


def _size_and_type(output: Any) -> Any:
    return (output.size, output.dtype) if isinstance(output, TensorSpec) else output


def _signature(func: Any, args: tuple, kwargs: dict) -> tuple:
    key: list[Any] = [func, torch.get_default_dtype()]  # of what factories make, and of integers divided
    _describe(args, key)
    _describe(kwargs, key)
    return tuple(key)


def _describe(value: Any, key: list[Any]) -> None:
    """Append to ``key`` what decides a spec."""
    if isinstance(value, torch.Tensor):
        key.append((value.shape, value.stride(), value.dtype))
    elif isinstance(value, (list, tuple)):
        key.append(len(value))
        for item in value:
            _describe(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            key.append(name)
            _describe(item, key)
    else:
        key.append((type(value), repr(value) if isinstance(value, float) else value))  # nan is not itself


def _statistics_in_float32(func: Any, args: tuple, kwargs: dict) -> Any:
    """The CPU keeps statistics of a bfloat16 input as float32 where the weights are float32."""
    output, mean, deviation = func(*args, **kwargs)
    weight = args[2] if func is aten.native_layer_norm.default else args[1]
    if weight is not None and weight.dtype != args[0].dtype and mean.dtype != torch.float32:
        mean, deviation = mean.float(), deviation.float()
    return output, mean, deviation


def _grouped_mm_any_type(func: Any, args: tuple, kwargs: dict) -> Any:
    """The fake kernel takes bfloat16 alone; the CPU's takes float32 too."""
    dtype = args[0].dtype
    if dtype == torch.bfloat16:
        return func(*args, **kwargs)
    narrow = [a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    return func(*narrow, **kwargs).to(dtype)


def _rms_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    x, normalized = args[0], args[1]
    rows = [*x.shape[: x.dim() - len(normalized)], *[1] * len(normalized)]
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


def _rms_norm_backward(func: Any, args: tuple, kwargs: dict) -> Any:
    wanted = args[-1]
    return torch.empty_like(args[1]), torch.empty_like(args[4]) if wanted[1] else None


def _dense_layer_norm_backward(func: Any, args: tuple, kwargs: dict) -> Any:
    """The gradient of the input lies row after row, however the input lies."""
    grad, *others = func(*args, **kwargs)
    return None if grad is None else grad.new_empty(grad.shape), *others


def _efficient_attention(func: Any, args: tuple, kwargs: dict) -> Any:
    """With dropout, seed and offset are numbers on the CPU."""
    output, sums, *drawn = func(*args, **kwargs)
    if len(args) > 5 and args[5] > 0:
        drawn = [torch.empty((), dtype=torch.int64, device="cpu") for _ in drawn]
    return output, sums, *drawn


def _batch_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    """The fake kernel writes running statistics, for which a PyTorch without CUDA has no copy."""
    x = args[0]
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=wide), x.new_empty(x.shape[1], dtype=wide)


def keeps_all_losses(func: Any, args: tuple) -> bool:
    """Whether the one loss that ``func`` gives lies in the memory of a loss for each element."""
    reduction_at = _REDUCED_IN_PLACE.get(func)
    return reduction_at is not None and (len(args) <= reduction_at or args[reduction_at] != 0)


def _reduced_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """The kernel makes a loss for each element and leaves their mean or sum in that memory, whatever its shape says."""
    loss = func(*args, **kwargs)
    if not keeps_all_losses(func, args):
        return loss
    return loss.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape)).as_strided((), ())


Rule = Callable[[Any, tuple, dict], Any]
_REDUCED_IN_PLACE = {  # places of the argument that says how
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
_RULES: dict[Any, Rule] = dict.fromkeys(_REDUCED_IN_PLACE, _reduced_in_place)  # CPU and CUDA alike
_CPU_RULES: dict[Any, Rule] = {
    **_RULES,
    aten.native_layer_norm.default: _statistics_in_float32,
    aten.native_batch_norm.default: _statistics_in_float32,
    aten.native_group_norm.default: _statistics_in_float32,
    aten._grouped_mm.default: _grouped_mm_any_type,
}
_CUDA_RULES: dict[Any, Rule] = {
    **_RULES,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.native_layer_norm_backward.default: _dense_layer_norm_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    aten._grouped_mm.default: _grouped_mm_any_type,
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
}
