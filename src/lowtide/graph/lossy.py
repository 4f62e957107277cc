"""Storages kept inexactly: what they take packed. The numbers that the judge and the tape share; no torch here.

A tensor is cut into blocks; of each the largest magnitude is kept as a scale in float32, and every element as one byte:
an integer (``int8``), or a float of three mantissa bits (``fp8``, e4m3). After Dettmers et al. 2022, "8-bit Optimizers
via Block-wise Quantization", https://arxiv.org/abs/2110.02861; for activations ActNN, https://arxiv.org/abs/2104.14129,
and COAT, https://arxiv.org/abs/2410.19313.

Differs: what is kept inexactly is read by backward's own formulas only. No replay reads it, so nothing is computed
from it that could take another branch than the forward pass did.
"""

from __future__ import annotations

from lowtide.graph.step_graph import StepGraph, once_per_graph

BLOCK = 128  # elements with one scale
CHUNK = 1 << 16  # elements packed at a time: what they need meanwhile stays in a cache
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of the dtypes that are packed
_SCALE_BYTES = 4
_NUMBER_BYTES = 12  # a plain number that an op is given becomes a tensor, twice
# Their backward raises e to what they made: an error there is a factor in every gradient.
_EXPONENTS = frozenset({"aten._log_softmax.default"})


def packed_bytes(size: int, dtype: str) -> int:
    """What ``size`` bytes of ``dtype`` take packed, scales included."""
    count = size // ITEM_BYTES[dtype]
    return count + _SCALE_BYTES * -(-count // BLOCK)


def packing_bytes(size: int, dtype: str) -> int:
    """What packing needs for itself meanwhile."""
    return 4 * min(size // ITEM_BYTES[dtype], CHUNK) + _NUMBER_BYTES


def unpacking_bytes(size: int, dtype: str) -> int:
    """What unpacking needs for itself meanwhile: float32 is worked on in place."""
    return 0 if dtype == "float32" else 4 * min(size // ITEM_BYTES[dtype], CHUNK)


@once_per_graph
def packable(graph: StepGraph) -> frozenset[int]:
    """Storages that a plan may keep inexactly, where the user allows it.

    Floating activations that are made from something trained and from floats alone, and that autograd stores: no
    inputs, parameters, indices, masks (made from integers, or drawn), statistics (a number a row; the tracer gives
    those no ``dtype``).
    """
    trained = {s.id for s in graph.storages if s.kind == "parameter"}
    found: set[int] = set()
    for op in graph.forward_ops:
        if trained.isdisjoint(op.reads):
            continue
        trained.update(op.makes)
        if not op.rng_bytes and op.name not in _EXPONENTS:
            found.update(s for s in op.makes if graph.storages[s].dtype in ITEM_BYTES)
    return frozenset(s for s in found & graph.stored if not graph.storages[s].fixed)
