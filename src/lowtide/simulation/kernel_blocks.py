"""In which order CUDA's kernels ask for memory, and in how many blocks, where that is not as a graph has it.

A graph has the outputs of an op in the order of its schema, and its temporaries as one number. An allocator is asked
otherwise by some kernels, and where blocks lie decides what it reserves. Read off the allocator's own record of the
ops of ``benchmarks/hollow_counted_models.py`` (torch 2.14).
"""

import math
from collections.abc import Sequence

from lowtide.simulation.caching_allocator import BLOCK_BYTES, SMALL_BYTES

KERNELS_OF = "cuda"  # the type of device
_PAGE = 4096
# By operator: outputs by their place in the schema, in the order in which they are allocated.
_OUTPUTS = {
    "native_dropout": (1, 0),  # the mask comes first
    "_scaled_dot_product_efficient_attention": (2, 3, 0, 1),  # numbers of the generator
}
_FLASH = "_scaled_dot_product_flash_attention_backward"
_EFFICIENT = "_scaled_dot_product_efficient_attention_backward"
_REDUCTIONS = ("sum", "mean", "amax", "amin", "norm", "linalg_vector_norm", "var", "std", "var_mean", "prod")


def output_order(op_name: str, count: int) -> Sequence[int]:
    """Places of the outputs in the order in which they are allocated."""
    order = _OUTPUTS.get(_packet(op_name), ())
    return order if len(order) == count else range(count)


def temporaries(
    op_name: str, size: int, outputs: Sequence[int], shapes: Sequence[Sequence[int]] = ()
) -> tuple[int, ...]:
    """The blocks that make up ``size`` bytes, all of them there at once; small ones are not told apart.

    Args:
        outputs: Bytes of what the op makes.
        shapes: Of the tensors that it is given, where they are known.
    """
    if size <= SMALL_BYTES:
        return (size,) if size else ()
    packet = _packet(op_name)
    if packet == _EFFICIENT and len(shapes) > 2 and outputs:
        query = shapes[1]
        return _efficient_blocks(size, query, shapes[2], round(outputs[0] / math.prod(query)))
    if packet in (_FLASH, _EFFICIENT):
        return _flash_blocks(size, max(outputs, default=0))
    rest = size % _PAGE if packet in _REDUCTIONS else 0
    return (size - rest, rest) if rest else (size,)


def _efficient_blocks(size: int, query: Sequence[int], key: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """A number for each row, then all sums in float32 as one block, which may be wider than the query.

    Where queries share keys, gradients of keys and values come for each head, and are added up at the end.
    """
    rows = _in_blocks(4 * math.prod(query[:-1]))
    if size == 2 * rows + _in_blocks(4 * math.prod(query)):
        return (size - 2 * rows, rows, rows)  # the product of gradient and output is more than the sums
    shared = key[1] != query[1]
    copies = [_in_blocks(query[0] * query[1] * key[2] * key[3] * itemsize)] * 2 if shared else []
    sums = size - rows - sum(copies)
    return (rows, sums, *copies) if sums > 0 else (size,)


def _flash_blocks(size: int, query: int) -> tuple[int, ...]:
    """A number for each row, the query's gradient in float32, and copies as large as the query."""
    rows = size % SMALL_BYTES
    left = size - rows
    found = [rows, min(left, 2 * query)]
    left -= found[-1]
    while query and left >= query:
        found.append(query)
        left -= query
    return tuple(block for block in (*found, left) if block)


def _in_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _packet(op_name: str) -> str:
    """``"aten.mm.default" -> "mm"``."""
    return op_name.partition(".")[2].partition(".")[0]
