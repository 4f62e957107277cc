"""In which order CUDA's kernels ask for memory, and in how many blocks, where that is not as a graph has it.

A graph has the outputs of an op in the order of its schema, and its temporaries as one number. An allocator is asked
otherwise by some kernels, and where blocks lie decides what it reserves. Read off the allocator's own record of the
ops of ``benchmarks/hollow_counted_models.py`` (torch 2.14).
"""

from collections.abc import Sequence

from lowtide.simulation.caching_allocator import SMALL_BYTES

KERNELS_OF = "cuda"  # the type of device
_PAGE = 4096
# By operator: outputs by their place in the schema, in the order in which they are allocated.
_OUTPUTS = {
    "native_dropout": (1, 0),  # the mask comes first
    "_scaled_dot_product_efficient_attention": (2, 3, 0, 1),  # numbers of the generator
}
_ATTENTION = ("_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_flash_attention_backward")
_REDUCTIONS = ("sum", "mean", "amax", "amin", "norm", "linalg_vector_norm", "var", "std", "var_mean", "prod")


def output_order(op_name: str, count: int) -> Sequence[int]:
    """Places of the outputs in the order in which they are allocated."""
    order = _OUTPUTS.get(_packet(op_name), ())
    return order if len(order) == count else range(count)


def temporaries(op_name: str, size: int, outputs: Sequence[int]) -> tuple[int, ...]:
    """The blocks that make up ``size`` bytes, all of them there at once; small ones are not told apart.

    Args:
        outputs: Bytes of what the op makes.
    """
    if size <= SMALL_BYTES:
        return (size,) if size else ()
    packet = _packet(op_name)
    if packet in _ATTENTION:
        return _attention_blocks(size, max(outputs, default=0))
    rest = size % _PAGE if packet in _REDUCTIONS else 0
    return (size - rest, rest) if rest else (size,)


def _attention_blocks(size: int, query: int) -> tuple[int, ...]:
    """A number for each row, the query's gradient in float32, and copies as large as the query."""
    rows = size % SMALL_BYTES
    left = size - rows
    found = [rows, min(left, 2 * query)]
    left -= found[-1]
    while query and left >= query:
        found.append(query)
        left -= query
    return tuple(block for block in (*found, left) if block)


def _packet(op_name: str) -> str:
    """``"aten.mm.default" -> "mm"``."""
    return op_name.partition(".")[2].partition(".")[0]
