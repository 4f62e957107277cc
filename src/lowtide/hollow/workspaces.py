"""What a kernel allocates beside its outputs, and writes though its schema does not say so.

Both are functions of an op's signature. On a CPU each is run once, on synthetic inputs, where it fits in
``limit_bytes``; a CUDA device's are formulas (``cuda_workspaces.py``).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.hollow.cuda_workspaces import workspace_bytes
from lowtide.hollow.devices import TargetDevice
from lowtide.hollow.kept_workspaces import are_given_back, product_workspace_bytes
from lowtide.hollow.memory import is_hollow
from lowtide.hollow.output_specs import OutputSpecs, spec_of
from lowtide.measurement.allocator import measuring
from lowtide.measurement.op_inputs import COLLECTIVES, NotRebuildableError, rebuild, tensor_bytes

LIMIT_BYTES = 1 << 25
# They read a state of their own library out of an input, and crash on any other.
_NEED_REAL_INPUTS = frozenset({
    "aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward", "aten._cudnn_rnn_backward", "aten.miopen_rnn_backward",
})  # fmt: skip
# Parts of names of ops that cuDNN runs on a CUDA device where it is on.
_CUDNN = ("convolution", "cudnn", "_rnn", "lstm", "gru")
# Of kernels too large to run: what they write undeclared, by the names of their arguments.
_STATISTICS = ("running_mean", "running_var")
_STATISTICS_WRITERS = frozenset({"aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm"})


class Workspaces:
    """Facts of signatures, found at their first use."""

    def __init__(self, specs: OutputSpecs, target: TargetDevice, limit_bytes: int = LIMIT_BYTES) -> None:
        """``specs``: of the same kernels, which are corrected by what ran. Those of a CUDA device are not here."""
        self._specs = specs
        self._target = target
        self._limit_bytes = limit_bytes
        self._by_cudnn: dict[str, int] = {}  # op name -> signatures
        self.unmeasured: dict[str, int] = {}  # op name -> signatures whose workspace is taken as 0

    def facts(self, signature: Mapping[str, Any], func: Any, args: tuple, kwargs: dict) -> tuple[int, list[int]]:
        """(workspace bytes, positions among the call's tensors that are written undeclared)."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if func.namespace in COLLECTIVES:
            return 0, list(range(len(tensors))) if func.namespace == "c10d" else []
        writes = _declared_nowhere(func, args)
        if func.is_view or func is torch.ops.aten._unsafe_view.default:
            return 0, writes
        if self._target.kernels == "cuda":
            if torch.backends.cudnn.enabled and any(word in func.name() for word in _CUDNN):
                name = str(func.overloadpacket).removeprefix("aten.")
                self._by_cudnn[name] = self._by_cudnn.get(name, 0) + 1
            size = workspace_bytes(func, args, self._target)
            if are_given_back():
                size += product_workspace_bytes(str(func.overloadpacket), args, self._target)
            return size, writes
        runnable = func.namespace == "aten" and str(func.overloadpacket) not in _NEED_REAL_INPUTS
        if runnable and tensor_bytes(signature) <= self._limit_bytes:
            try:
                return self._run(signature, args, kwargs), writes
            except (NotRebuildableError, RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
                pass
        name = str(func.overloadpacket).removeprefix("aten.")
        self.unmeasured[name] = self.unmeasured.get(name, 0) + 1
        return 0, writes

    def unknown_on_device(self) -> list[str]:
        """What is not counted of a CUDA device's kernels that the step runs, in words."""
        lines = []
        if not self._target.multiprocessors:
            lines.append("the device's multiprocessors are not known: workspaces of its reductions count as 0")
        if ops := ", ".join(f"{op} ({count})" for op, count in sorted(self._by_cudnn.items())):
            lines.append(f"workspaces of cuDNN are not known and count as 0: {ops}")
        return lines

    def _run(self, signature: Mapping[str, Any], args: tuple, kwargs: dict) -> int:
        """Raises: whatever the kernel raises on synthetic inputs."""
        drawn = torch.get_rng_state()
        try:
            with _disable_current_modes(), torch.no_grad():
                func, synthetic, named = rebuild(signature, "cpu")
                synthetic = _with_real_integers(list(args), synthetic)
                named = {name: _with_real_integers(kwargs[name], value) for name, value in named.items()}
                with measuring("cpu") as counter:
                    output = func(*synthetic, **named)  # held: what it has made is no workspace
                tensors = [t for t in pytree.tree_leaves((synthetic, named)) if isinstance(t, torch.Tensor)]
                self._specs.correct(func, args, kwargs, spec_of(output, tensors))
                del output
                return 0 if counter is None else counter.workspace
        finally:
            torch.set_rng_state(drawn)


def _with_real_integers(given: Any, synthetic: Any) -> Any:
    """``synthetic``, with copies of the integers and masks of ``given`` that are there: sizes may depend on them."""
    if isinstance(given, torch.Tensor):
        exact = not (given.is_floating_point() or given.is_complex())
        return given.clone() if exact and not is_hollow(given) else synthetic
    if isinstance(given, (list, tuple)):
        return [_with_real_integers(g, s) for g, s in zip(given, synthetic, strict=True)]
    return synthetic


def _declared_nowhere(func: Any, args: tuple) -> list[int]:
    if str(func.overloadpacket) not in _STATISTICS_WRITERS or not any(a is True for a in args):
        return []
    position, found = 0, []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if isinstance(value, torch.Tensor):
            if argument.name in _STATISTICS:
                found.append(position)
            position += 1
    return found
