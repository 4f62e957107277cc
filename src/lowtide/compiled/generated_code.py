"""What generated code allocates, read from the code itself: its Python is run on stand-ins that hold no memory.

Inductor turns a graph into a Python function ``call``. It allocates buffers, calls kernels and deletes what it no
longer needs, so the order of these lines is the true order of allocations, with buffer reuse, fusion and scheduling.
Here the same function runs with kernels that do nothing and buffers that only count bytes. Python's own references
decide what lives. A kernel that allocates its results (attention) runs on ``meta`` tensors for their sizes.

The same run tells the time, as far as that follows from shapes: each kernel moves the bytes of its buffers, and each
call has its price.

Known weakness: the spelling of the code is no interface of PyTorch's. A name that is not known here is an error
(``UnreadableCodeError``), never a guess. Memory that compiled kernels take past PyTorch's allocator is not seen.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.compiled import collectives
from lowtide.compiled.sizes import FIXED, Sizes
from lowtide.device.block_size import in_blocks
from lowtide.device.names import is_accelerator
from lowtide.errors import LowtideError
from lowtide.measurement.op_inputs import span

OPAQUE = "an object without memory, as a mesh of ranks is"


class UnreadableCodeError(LowtideError):
    """Generated code spells something in a way that is not known here, so its peak cannot be promised."""


@dataclass(frozen=True)
class BufferSpec:
    """Size, stride (in elements) and type of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of the memory that it spans."""
        return span(self.size, self.stride) * self.dtype.itemsize

    @staticmethod
    def of(tensor: torch.Tensor, sizes: Sizes = FIXED) -> BufferSpec:
        return BufferSpec(tuple(map(sizes.of, tensor.shape)), tuple(map(sizes.of, tensor.stride())), tensor.dtype)


@dataclass(frozen=True)
class InputMemory:
    """A graph input, and the memory that goes when the function lets go of it.

    Attributes:
        spec: A number for a size; None for any other number; ``OPAQUE`` for what has no memory.
        block: Which memory it lies in; inputs with the same one share it.
        bytes: Of that memory; 0 where something else holds it.
    """

    spec: BufferSpec | int | str | None
    block: object
    bytes: int = 0


@dataclass(frozen=True)
class CodeMemory:
    """What one run of a function allocates, in bytes.

    Attributes:
        peak_bytes: Most that lives at once, beyond what lives when it begins.
        end_bytes: What lives when it returns, beyond that; negative where it frees more of its inputs than it makes.
        returned: By returned value, the block that it lies in: new blocks count from 0, an input has its name, and None
            is no tensor.
        block_bytes: Size of each new block that is returned.
        ms: Of its kernels and calls, one after the other, where prices were given.
    """

    peak_bytes: int
    end_bytes: int
    returned: tuple[int | str | None, ...]
    block_bytes: dict[int, int]
    ms: float = 0.0


@dataclass(frozen=True)
class VariantMemory:
    """Bytes of one variant of a layer, read from its code.

    Attributes:
        stored_bytes: Made in forward and held until backward, beyond what the layer returns.
        forward_peak_bytes, forward_end_bytes: Beyond what lives when forward begins.
        backward_peak_bytes, backward_end_bytes: Beyond what lives when backward begins.
        saved_output_bytes: Of what the layer returns, that backward holds as well: it counts where no next layer holds
            it as an input. The variant that stores least holds every input that any other does.
    """

    stored_bytes: int
    forward_peak_bytes: int
    forward_end_bytes: int
    backward_peak_bytes: int
    backward_end_bytes: int
    saved_output_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Of forward and backward, where nothing else runs between them."""
        return max(self.forward_peak_bytes, self.stored_bytes + self.backward_peak_bytes)


class _Counter:
    def __init__(self, device_type: str) -> None:
        self.live = self.peak = self.blocks = 0
        self.device_type = device_type

    def make(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def passing(self, size: int) -> None:
        """``size`` more bytes, for a moment."""
        self.peak = max(self.peak, self.live + size)


class _Block:
    """Memory of one allocation: it goes with the last stand-in in it."""

    def __init__(self, counter: _Counter, size: int, name: str | None = None) -> None:
        self.size = in_blocks(size, counter.device_type)
        self.counter, self.name = counter, name  # the name of the input that was there before
        self.number = counter.blocks
        counter.blocks += 1
        counter.make(self.size)

    def __del__(self) -> None:
        self.counter.live -= self.size


class _StandIn:
    """A tensor of generated code: what it looks like, and the block that it lies in.

    Its methods are those that the code uses to add up partial sums, which a kernel leaves in its workspace, and to copy
    from another device.
    """

    def __init__(self, reader: _Reader, block: _Block, spec: BufferSpec) -> None:
        self.reader, self.block, self.spec = reader, block, spec

    def __getattr__(self, name: str) -> Any:
        raise UnreadableCodeError(f"generated code uses Tensor.{name}, whose memory is not known here.")

    def __getitem__(self, index: Any) -> _StandIn:
        return self._seen_as(self.meta()[index])

    def view(self, *size: Any) -> _StandIn:
        return self._seen_as(self.meta().view(*size))

    def sum(self, *, dim: int) -> _StandIn:
        made: _StandIn = self.reader.operator(torch.ops.aten.sum.dim_IntList, (self, [dim]), {})
        return made

    def to(self, dtype: torch.dtype) -> _StandIn:
        if dtype == self.spec.dtype:
            return self
        made: _StandIn = self.reader.operator(torch.ops.aten.to.dtype, (self, dtype), {})
        return made

    def zero_(self) -> _StandIn:
        """Of a kernel's workspace."""
        return self

    def copy_(self, source: _StandIn, non_blocking: bool = False) -> _StandIn:
        _Kernel(self.reader)(self, source)
        return self

    def _seen_as(self, view: torch.Tensor) -> _StandIn:
        return _StandIn(self.reader, self.block, BufferSpec.of(view))

    def meta(self) -> torch.Tensor:
        return torch.empty_strided(self.spec.size, self.spec.stride, dtype=self.spec.dtype, device="meta")


Workspace = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], int]


@dataclass(frozen=True)
class Prices:
    """Milliseconds.

    Attributes:
        kernel: Of a fused kernel, by the bytes that it reads and writes.
        call: Of an operator, by itself, its arguments and the bytes that it makes.
    """

    kernel: Callable[[int], float]
    call: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any], int], float]


class _Operators:
    """``torch.ops`` and what lies below it: operators that run on ``meta`` tensors."""

    def __init__(self, reader: _Reader, target: Any, path: str) -> None:
        self._reader, self._target, self._path = reader, target, path

    def __getattr__(self, name: str) -> _Operators:
        found = getattr(self._target, name, None)
        if found is None:
            raise UnreadableCodeError(f"generated code uses {self._path}.{name}, which does not exist here.")
        return _Operators(self._reader, found, f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._reader.operator(self._target, args, kwargs)


class _Torch:
    """``torch`` in generated code: its types and its operators, and nothing else."""

    def __init__(self, reader: _Reader) -> None:
        self.ops = _Operators(reader, torch.ops, "torch.ops")
        self._device_type = reader.counter.device_type

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name, None)
        if isinstance(found, torch.dtype):
            return found
        if name == self._device_type and is_accelerator(name):
            return _Device()
        raise UnreadableCodeError(f"generated code uses torch.{name}, whose memory is not known here.")


class _Device:
    """The module of an accelerator in generated code: which device is the current one."""

    def _DeviceGuard(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def set_device(self, index: int) -> None:
        """Allocates nothing."""


class _Kernel:
    """A kernel that writes into buffers that are there: C++ is called, Triton's is run. It allocates nothing."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._reader.prices is not None:
            moved = {id(a.block): a.spec.bytes for a in args if isinstance(a, _StandIn)}
            self._reader.ms += self._reader.prices.kernel(sum(moved.values()))

    run = __call__


_KERNELS = ("cpp_fused", "triton_", "cpp_", "assert_")  # they write into buffers that are there


class _Names(dict):
    """Global names of generated code."""

    def __init__(self, reader: _Reader, **known: Any) -> None:
        super().__init__(known)
        self._kernel = _Kernel(reader)

    def __missing__(self, name: str) -> Any:
        if name.startswith(_KERNELS):
            return self._kernel
        raise UnreadableCodeError(f"generated code uses {name!r}, whose memory is not known here.")


class _Reader:
    def __init__(self, workspace: Workspace, device_type: str, prices: Prices | None) -> None:
        self.counter, self._workspace = _Counter(device_type), workspace
        self.prices, self.ms = prices, 0.0

    def names(self) -> _Names:
        import builtins

        from torch._inductor.select_algorithm import extern_kernels

        operators = {name: getattr(torch.ops, name) for name in ("aten", "prims", "inductor")}
        # Among the global names: those that are missing there are never looked for among the built-in ones.
        numbers = {name: getattr(builtins, name) for name in ("len", "int", "float", "max", "min", "abs", "range")}
        return _Names(
            self,
            __builtins__={},
            **numbers,
            torch=_Torch(self),
            empty_strided_cpu=self._empty,
            empty_strided_cuda=self._empty,
            empty_strided_xpu=self._empty,
            reinterpret_tensor=self._reinterpret,
            copy_if_misaligned=lambda tensor: tensor,  # from the allocator, all is aligned
            get_raw_stream=lambda index: 0,
            device=lambda *args, **kwargs: torch.device("meta"),
            extern_kernels=_Operators(self, extern_kernels, "extern_kernels"),
            math=math,  # of sizes
            inf=float("inf"),
            nan=float("nan"),
            **{name: _Operators(self, found, name) for name, found in operators.items()},
        )

    def _empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> _StandIn:
        spec = BufferSpec(tuple(size), tuple(stride), dtype)
        return _StandIn(self, _Block(self.counter, spec.bytes), spec)

    def _reinterpret(self, of: _StandIn, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> _StandIn:
        return _StandIn(self, of.block, BufferSpec(tuple(size), tuple(stride), of.spec.dtype))

    def operator(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operator that allocates its own results, or writes into ``out``."""
        if collectives.returns_its_input(target):
            return args[0]
        extra = 0 if collectives.name_of(target) else self._workspace(target, args, kwargs)
        if "out" in kwargs:
            self.counter.passing(extra)
            self._pay(target, args, kwargs, kwargs["out"])
            return kwargs["out"]
        try:
            made = target(*map(_as_meta, args), **{name: _as_meta(value) for name, value in kwargs.items()})
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise UnreadableCodeError(f"generated code calls {target}, whose results have no known size.") from error
        results = made if isinstance(made, (tuple, list)) else (made,)
        stand_ins = tuple(
            _StandIn(self, _Block(self.counter, BufferSpec.of(t).bytes), BufferSpec.of(t))
            if isinstance(t, torch.Tensor)
            else t
            for t in results
        )
        self.counter.passing(extra)
        if not collectives.name_of(target):
            self._pay(target, args, kwargs, stand_ins)
        return stand_ins if isinstance(made, (tuple, list)) else stand_ins[0]

    def _pay(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        if self.prices is not None:
            results = made if isinstance(made, (tuple, list)) else (made,)
            made_bytes = sum(t.spec.bytes for t in results if isinstance(t, _StandIn))
            self.ms += self.prices.call(target, args, kwargs, made_bytes)


def _as_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_meta, value))
    return value.meta() if isinstance(value, _StandIn) else value


def read_code(
    source: str,
    inputs: Mapping[str, InputMemory],
    workspace: Workspace | None = None,
    device_type: str = "cpu",
    prices: Prices | None = None,
) -> CodeMemory:
    """Run the function ``call`` of ``source`` on stand-ins and return what it allocates, and takes.

    Args:
        source: The module that Inductor wrote.
        inputs: By name.
        workspace: Bytes that an operator takes for a moment beyond its results; default none.
        device_type: Whose allocator gives the buffers.
        prices: Of what it runs; default: nobody asks for the time.

    Raises:
        UnreadableCodeError: the code uses a name, or has a form, that is not known here.
    """
    reader = _Reader(workspace or (lambda target, args, kwargs: 0), device_type, prices)
    function, taken = _call_of(source)
    if not set(taken) <= set(inputs):
        raise UnreadableCodeError(f"generated code takes {sorted(set(taken) - set(inputs))}, which the graph has not.")
    names = reader.names()
    exec(compile(ast.Module([function], []), "<generated code>", "exec"), names)
    counter, blocks = reader.counter, dict[object, _Block]()
    args: list[Any] = []
    for name in taken:
        given = inputs[name]
        if given.spec is None:
            raise UnreadableCodeError(f"generated code takes the number {name!r}, which is no size.")
        if isinstance(given.spec, int | str):
            args.append(given.spec)
            continue
        if given.block not in blocks:
            blocks[given.block] = _Block(counter, given.bytes, name)
        args.append(_StandIn(reader, blocks[given.block], given.spec))
    start = counter.peak = counter.live
    blocks.clear()
    try:
        returned = names["call"](None, args)
    except (TypeError, AttributeError, IndexError, RuntimeError) as error:
        said = str(error).splitlines()[0]
        raise UnreadableCodeError(f"generated code has a form that is not known here: {said}.") from error
    args.clear()
    found: list[int | str | None] = []
    sizes: dict[int, int] = {}
    for value in returned:
        if not isinstance(value, _StandIn):
            found.append(None)
        elif value.block.name is not None:
            found.append(value.block.name)
        else:
            found.append(value.block.number)
            sizes[value.block.number] = value.block.size
    return CodeMemory(counter.peak - start, counter.live - start, tuple(found), sizes, reader.ms)


def _call_of(source: str) -> tuple[ast.FunctionDef, list[str]]:
    """The function ``call``, and the names of its inputs in order."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "call"]
    if len(functions) != 1:
        raise UnreadableCodeError(f"generated code has {len(functions)} functions named call, not one.")
    for statement in functions[0].body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name) and statement.value.id == "args":
            target = statement.targets[0]
            if isinstance(target, ast.Tuple):
                return functions[0], [e.id for e in target.elts if isinstance(e, ast.Name)]
    return functions[0], []
