"""Dimension vectors: the sizes of a step's inputs that vary, each once, such as (batch, length)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Shapes = Sequence[Sequence[int]]  # of the flattened tensor arguments, in order
Vector = tuple[int, ...]


@dataclass(frozen=True)
class Dimensions:
    """Which sizes of the inputs vary, and which of them are always equal.

    Attributes:
        ranks: Number of sizes of each input tensor.
        constants: Position in the flattened sizes -> its one value.
        groups: Positions that vary together, a group for each dimension, in the order of their first position.
    """

    ranks: tuple[int, ...]
    constants: dict[int, int]
    groups: tuple[tuple[int, ...], ...]

    def of(self, shapes: Shapes) -> Vector:
        """The dimension vector of ``shapes``.

        Raises:
            ValueError: ``shapes`` has other tensors, moves a size that never moved, or tells equal sizes apart. Infer
                the dimensions anew, with these shapes among them.
        """
        if reason := self.why_not(shapes):
            raise ValueError(f"{reason}. Infer the dimensions anew with these shapes among them.")
        sizes = _flat(shapes)
        return tuple(sizes[group[0]] for group in self.groups)

    def why_not(self, shapes: Shapes) -> str:
        """Why ``shapes`` has no vector here, with the values; "" if it has one."""
        if tuple(map(len, shapes)) != self.ranks:
            return f"the inputs have {[len(s) for s in shapes]} sizes, not {list(self.ranks)}"
        sizes = _flat(shapes)
        for position, value in self.constants.items():
            if sizes[position] != value:
                return f"size {position} of the inputs is {sizes[position]} and was always {value}"
        for group in self.groups:
            if len({sizes[position] for position in group}) > 1:
                found = [sizes[position] for position in group]
                return f"sizes {list(group)} of the inputs are {found} and were always equal"
        return ""


def varying_dimensions(examples: Iterable[Shapes]) -> Dimensions:
    """The dimensions in which ``examples`` differ; sizes that are equal in every example are one dimension.

    ``input_ids``, ``labels`` and ``attention_mask`` of shape (batch, length) give two dimensions, or one where the
    batch stays the same.

    Raises:
        ValueError: no example, or examples with different numbers of tensors or sizes.

    Example:
        >>> found = varying_dimensions([[(2, 48), (2, 48)], [(2, 64), (2, 64)]])
        >>> found.of([(2, 96), (2, 96)])
        (96,)
    """
    seen = list(examples)
    ranks = {tuple(map(len, shapes)) for shapes in seen}
    if len(ranks) != 1:
        raise ValueError(
            f"the inputs have {len(ranks)} different forms ({sorted(ranks)}), not one. Give examples of the same call."
        )
    groups: dict[Vector, list[int]] = {}
    constants: dict[int, int] = {}
    for position, column in enumerate(zip(*map(_flat, seen))):
        if len(set(column)) == 1:
            constants[position] = column[0]
        else:
            groups.setdefault(column, []).append(position)
    return Dimensions(ranks.pop(), constants, tuple(map(tuple, groups.values())))


def covers(larger: Vector, smaller: Vector) -> bool:
    """Whether ``larger`` is at least ``smaller`` in every dimension. A partial order: (2, 96) and (4, 48) have none."""
    return all(a >= b for a, b in zip(larger, smaller, strict=True))


def join(vectors: Iterable[Vector]) -> Vector:
    """The least vector that covers all of ``vectors``."""
    return tuple(map(max, zip(*vectors, strict=True)))


def _flat(shapes: Shapes) -> Vector:
    return tuple(size for shape in shapes for size in shape)
