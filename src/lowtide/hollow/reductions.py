"""What a reduction allocates on a CUDA device where several blocks of threads share the inputs of an output.

A reduction of many inputs to few outputs (``sum`` over rows for the gradient of a bias) is divided among blocks. Each
leaves its part in a buffer, so a [4096, 3072] gradient in bfloat16 takes four times its own bytes. The division is
``setReduceConfig`` of ``ATen/native/cuda/Reduce.cuh``, after ``TensorIterator`` has ordered and merged the dimensions
(``ATen/TensorIterator.cpp``); PyTorch 2.13 and 2.14 divide alike.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lowtide.hollow.devices import TargetDevice

_MOST_THREADS = 512
_WARP = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # per thread
_INPUT_VECTOR = 4
_INT32 = 2**31 - 1


class _Dim(NamedTuple):
    size: int
    stride: int  # of the input, in elements
    is_reduced: bool


def reduction_bytes(
    size: Sequence[int],
    stride: Sequence[int],
    reduced: Sequence[int],
    target: TargetDevice,
    *,
    element_bytes: int,
    accumulator_bytes: int = 4,
) -> int:
    """Bytes of the buffers, 0 where one block does for each output.

    Args:
        size: Of the input, and ``stride`` in elements.
        reduced: Dimensions that go; empty: all.
        element_bytes: Of the input.
        accumulator_bytes: Of what a thread adds up: 4 for sums of half precision too, 16 for variances and for maxima
            with their places.
    """
    if 0 in size or not target.multiprocessors:
        return 0
    gone = {d % max(len(size), 1) for d in reduced} or set(range(len(size)))
    dims = _merged([_Dim(n, s, d in gone) for d, (n, s) in enumerate(zip(size, stride)) if n != 1])
    parts = _indexed_by_32_bits(dims, element_bytes)
    found = max((_bytes(part, target, accumulator_bytes) for part in parts), default=0)
    if len(parts) > 1 and accumulator_bytes > element_bytes:  # what parts have added up does not fit into the output
        outputs = math.prod(d.size for d in dims if not d.is_reduced)
        found += target.in_blocks(accumulator_bytes * outputs)
    return found


def _merged(dims: list[_Dim]) -> list[_Dim]:
    """Reduced dimensions first, each kind from the smallest stride up; neighbours that are one run are one."""
    ordered = sorted(reversed(dims), key=lambda d: (not d.is_reduced, d.stride))
    merged: list[_Dim] = []
    for dim in ordered:
        last = merged[-1] if merged else None
        if last is not None and last.is_reduced == dim.is_reduced and last.size * last.stride == dim.stride:
            merged[-1] = _Dim(last.size * dim.size, last.stride, last.is_reduced)
        else:
            merged.append(dim)
    return merged


def _indexed_by_32_bits(dims: list[_Dim], element_bytes: int) -> list[list[_Dim]]:
    """The parts that a large reduction runs in: the dimension that spans most is halved until each part is small."""
    span = 1 + sum((d.size - 1) * d.stride * element_bytes for d in dims)
    if span <= _INT32 and math.prod(d.size for d in dims) <= _INT32:
        return [dims]
    widest = max(range(len(dims)), key=lambda i: ((dims[i].size - 1) * dims[i].stride, i))
    size = dims[widest].size
    return [
        part
        for half in (size // 2, size - size // 2)
        for part in _indexed_by_32_bits(
            [*dims[:widest], dims[widest]._replace(size=half), *dims[widest + 1 :]], element_bytes
        )
    ]


def _bytes(dims: list[_Dim], target: TargetDevice, accumulator_bytes: int) -> int:
    inputs = math.prod(d.size for d in dims if d.is_reduced)
    outputs = math.prod(d.size for d in dims if not d.is_reduced)
    kept = [d for d in dims if not d.is_reduced]
    summed = [d for d in dims if d.is_reduced]
    along_inputs = not kept or bool(summed and summed[0].stride < kept[0].stride)
    fastest = (summed if along_inputs else kept)[0].stride if dims else 1
    across, down = (inputs, outputs) if along_inputs else (outputs, inputs)
    vector = 1
    if fastest == 1:
        if along_inputs:
            if across > 128 and len(dims) == 1:
                across //= _INPUT_VECTOR
        else:
            vector = _output_vector(dims, kept)
            across //= vector
    most = _MOST_THREADS // vector
    wide, high = _power_below(across, most), _power_below(down, most)
    width = min(wide, _WARP)
    height = min(high, most // width)
    width = min(wide, most // height)

    each, per_block = inputs, 1  # inputs of a thread, outputs of a block
    if along_inputs:
        each = _ceil(each, width)
    else:
        per_block *= width
    is_split = each >= height * _FEWEST_VALUES or each >= _MOST_VALUES
    if is_split:
        each = _ceil(each, height)
    else:
        per_block *= height
    grid = _ceil(outputs // vector, per_block)
    room = target.multiprocessors * (target.threads_per_multiprocessor // (width * height))
    if not is_split or each < _MOST_VALUES or grid > room:
        return 0
    blocks = max(min(_ceil(room, grid), _ceil(each, _FEWEST_VALUES)), _ceil(each, _MOST_VALUES))
    if blocks <= 1:
        return 0
    parts = accumulator_bytes * outputs * blocks
    if not along_inputs:
        parts *= width * vector
    return target.in_blocks(parts) + target.in_blocks(4 * grid)  # and a counter for each output's blocks


def _output_vector(dims: list[_Dim], kept: list[_Dim]) -> int:
    """How many neighbouring outputs a thread works on."""
    vector = 4
    for count in (kept[0].size, *(d.stride for d in dims if d is not kept[0])):
        while count % vector:
            vector //= 2
    return vector


def _power_below(count: int, most: int) -> int:
    return most if count >= most else 1 << (max(count, 1).bit_length() - 1)


def _ceil(count: int, by: int) -> int:
    return -(-count // by)
