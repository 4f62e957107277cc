"""The graph of an input shape that no step has run yet, derived from the graphs of two or three shapes that have.

Graphs of a *family* have the same ops in the same order. They differ in how many bytes storages and workspaces take,
and each of these sizes is a polynomial in a few dimensions, such as batch and length (``interpolation.py``). A derived
graph is *confirmed* if each of its sizes had more examples than the polynomial has coefficients, and *consistent* if
some had just as many. When a step of the derived shape does run, ``check`` compares the two graphs.

On an accelerator, sizes are multiples of a 512-byte block, so the examples only bound the polynomial
(``block_rounding.py``). The graph then has the largest value of each size, and ``slack_bytes`` says by how much all of
them together can be too large.

Known weaknesses:

- A confirmation is evidence, no proof.
- Kernels choose workspaces by thresholds. On a CPU, attention takes another one from lengths 192 and 768 on, which
  shorter examples do not show. ``extrapolated`` is True where that can happen.
- A size that a kernel pads to a multiple of something is no polynomial.
- On an accelerator, a small storage may be one block larger than derived.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowtide.device.block_size import BLOCK_BYTES
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import GONE_GRADIENT, NEW_GRADIENT, StepGraph, Storage
from lowtide.graph.structure import NUMBERS, structure_difference
from lowtide.shapes.block_rounding import estimate_in_blocks
from lowtide.shapes.derived_costs import interpolated_costs
from lowtide.shapes.dimensions import Vector
from lowtide.shapes.interpolation import Estimate, Interpolation
from lowtide.shapes.plain_peak import PlainPeak

_MOST_REMEMBERED = 256  # shapes whose sizes are remembered
_OF_THE_MODEL = (
    "parameter",
    "gradient",
    NEW_GRADIENT,
    GONE_GRADIENT,
    "buffer",
)  # kinds of storages that are the same for all shapes
_NO_SIZES_OF_THE_SHAPE = ("batch", "optimizer", "other")  # resident parts: of the inputs, or of how far training is


@dataclass(frozen=True)
class Example:
    """One watched shape. ``costs`` is None where no times were taken."""

    dimensions: Vector
    graph: StepGraph
    costs: Costs | None = None


@dataclass(frozen=True)
class DerivedGraph:
    """The graph of a shape that nobody has watched.

    Attributes:
        confirmed: Each size has more examples than coefficients, and no other polynomial as simple gives another value.
        unconfirmed: How many sizes are only consistent with the examples.
        extrapolated: Some dimension lies outside its range in the examples. There a kernel may switch to another
            workspace.
        least: The least that each of the graph's sizes can be, which is the size itself on a CPU.
        costs: Of its ops, where every example had times.
    """

    dimensions: Vector
    graph: StepGraph
    confirmed: bool
    unconfirmed: int
    extrapolated: bool
    least: tuple[int, ...]
    costs: Costs | None = None

    @property
    def slack_bytes(self) -> int:
        """By how much all sizes together can be too large; 0 on a CPU."""
        return sum(_sizes(self.graph)) - sum(self.least)

    def check(self, graph: StepGraph) -> str:
        """What the real ``graph`` of these dimensions has otherwise, in words; "" where all is as derived.

        Compared are structure, bytes of storages, workspaces and resident bytes, but for what training adds.
        The batch's are those of its storages. A size in blocks may lie in its range, or a block beside it.
        """
        beside = 0 if graph.device == "cpu" else BLOCK_BYTES
        ranges = [(low - beside, most + beside) for low, most in zip(self.least, _sizes(self.graph), strict=True)]
        return structure_difference(self.graph, graph) or _difference_in_sizes(ranges, graph)


class ShapeFamily:
    """Graphs of one structure, and what follows from them for other shapes.

    Give every example and question its dimensions in the same order, as ``Dimensions.of`` does. A dimension may stay
    the same in all examples; nothing is known then about other values of it.
    """

    def __init__(self) -> None:
        self._examples: list[Example] = []
        self._interpolation: Interpolation | None = None
        self._table: _SizeTable | None = None
        self._signatures: _SignatureTable | None = None
        self._plain_peak: PlainPeak | None = None

    @property
    def examples(self) -> tuple[Example, ...]:
        return tuple(self._examples)

    def fits(self, graph: StepGraph) -> bool:
        """Whether ``graph`` has the structure of the examples; any graph fits a family without examples."""
        return not self._examples or not structure_difference(self._examples[0].graph, graph)

    def add(self, dimensions: Vector, graph: StepGraph, costs: Costs | None = None) -> None:
        """Take a watched step as an example. Of dimensions that are there already, nothing changes.

        Raises:
            ValueError: another structure or number of dimensions, or other sizes at dimensions seen before.
        """
        if not self._examples:
            self._take(Example(dimensions, graph, costs))
            return
        self._check_length(dimensions)
        first = self._examples[0].graph
        if difference := structure_difference(first, graph):
            raise ValueError(f"the graph of {dimensions} is of another family: {difference}. Start a new one for it.")
        for example in self._examples:
            if example.dimensions == dimensions:
                if difference := _difference_in_sizes([(s, s) for s in _sizes(example.graph)], graph):
                    raise ValueError(
                        f"two graphs of {dimensions} differ: {difference}. Sizes depend on more than these dimensions; "
                        "watch each step of this model."
                    )
                return
        self._take(Example(dimensions, graph, costs))

    def _take(self, example: Example) -> None:
        self._examples.append(example)
        self._interpolation = Interpolation([e.dimensions for e in self._examples])
        self._table = self._signatures = self._plain_peak = None

    @property
    def _sizes(self) -> "_SizeTable":
        """Made when it is asked for: examples come several at a time."""
        if self._table is None:
            assert self._interpolation is not None
            self._table = _SizeTable(self._examples, self._interpolation)
        return self._table

    def confirms(self, dimensions: Vector) -> bool:
        """Whether ``derive`` gives a confirmed graph, without making it."""
        if any(example.dimensions == dimensions for example in self._examples):
            return True
        if self._why_unvaried(dimensions):
            return False
        return all(e is not None and e.confirmed and e.value >= 0 for e in self._sizes.at(dimensions))

    def plain_bytes(self, dimensions: Vector) -> tuple[int, int] | None:
        """Peak of the plain step and resident bytes, as of the derived graph, in a fraction of a millisecond.

        None where the examples do not determine them.
        """
        if self._why_unvaried(dimensions):
            return None
        estimates = self._sizes.at(dimensions)
        if any(e is None or e.value < 0 for e in estimates):
            return None
        sizes = [e.value for e in estimates if e is not None]
        graph = self._examples[0].graph
        of_all = [sizes[n] for n in self._sizes.class_of]
        num_storages = len(graph.storages)
        if self._plain_peak is None:
            self._plain_peak = PlainPeak(graph, self._sizes.class_of)
        resident = sum(of_all[num_storages + len(graph.ops) :])
        resident += sum(size for size, s in zip(of_all, graph.storages) if s.kind == "input")
        for part in ("optimizer", "other"):
            resident += max(e.graph.resident.get(part, 0) for e in self._examples)
        made = sum(size for size, s in zip(of_all, graph.storages) if s.kind == NEW_GRADIENT)
        return resident - made + self._plain_peak.peak_bytes(sizes), resident

    def derive(self, dimensions: Vector) -> DerivedGraph | None:
        """The graph of ``dimensions``; None where the examples do not determine it (``why_not`` says why).

        Floats in operator arguments are those of the nearest example: they change times, if anything, and no bytes.
        """
        found = self._derive(dimensions)
        return found if isinstance(found, DerivedGraph) else None

    def why_not(self, dimensions: Vector) -> str:
        """Why ``derive`` gives None and what would settle it; "" where it gives a graph."""
        found = self._derive(dimensions)
        return found if isinstance(found, str) else ""

    def _check_length(self, dimensions: Vector) -> None:
        expected = len(self._examples[0].dimensions)
        if len(dimensions) != expected:
            raise ValueError(f"dimensions={dimensions} are {len(dimensions)}, the family has {expected}.")

    def _derive(self, dimensions: Vector) -> DerivedGraph | str:
        if self._interpolation is None:
            return "no shape was watched yet: watch one"
        self._check_length(dimensions)
        for example in self._examples:
            if example.dimensions == dimensions:
                least = tuple(_sizes(example.graph))
                return DerivedGraph(dimensions, example.graph, True, 0, False, least, example.costs)
        if reason := self._why_unvaried(dimensions):
            return reason
        if self._signatures is None:
            self._signatures = _SignatureTable(self._examples)
        return _Derivation(self._examples, self._interpolation, self._sizes, self._signatures, dimensions).result()

    def _why_unvaried(self, dimensions: Vector) -> str:
        if self._interpolation is None:
            return "no shape was watched yet: watch one"
        for at, value in self._interpolation.unvaried.items():
            if dimensions[at] != value:
                return f"dimension {at} was {value} in every example: watch {dimensions}"
        return ""


class _SizeTable:
    """The sizes of a graph in every example. Many are equal in all of them: those are one class.

    Attributes:
        class_of: Of each entry of ``_sizes``.
    """

    def __init__(self, examples: Sequence[Example], interpolation: Interpolation) -> None:
        graph = examples[0].graph
        self._interpolation = interpolation
        in_blocks = [s.kind not in _OF_THE_MODEL for s in graph.storages] + [True] * len(graph.ops)
        in_blocks += [False] * len(_parts_of_a_size(graph))
        columns = zip(*(_sizes(e.graph) for e in examples), strict=True)
        keys = [(values, rounded and graph.device != "cpu") for values, rounded in zip(columns, in_blocks, strict=True)]
        number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        self._classes = list(number)
        self.class_of = [number[key] for key in keys]
        self._at: dict[Vector, list[Estimate | None]] = {}  # asked for several times at each step

    def at(self, dimensions: Vector) -> list[Estimate | None]:
        """The size of each class; None where the examples leave it open."""
        if dimensions not in self._at:
            if len(self._at) == _MOST_REMEMBERED:
                self._at.clear()
            self._at[dimensions] = [self._estimate(values, b, dimensions) for values, b in self._classes]
        return self._at[dimensions]

    def _estimate(self, values: tuple[int, ...], in_blocks: bool, dimensions: Vector) -> Estimate | None:
        if in_blocks:
            return estimate_in_blocks(self._interpolation, values, dimensions, BLOCK_BYTES)
        return self._interpolation.estimate(values, dimensions)


class _SignatureTable:
    """The ops' signatures in every example. Ops that are equal in all of them share one.

    Attributes:
        of_ops: Which signature each op has.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        self._graphs = [e.graph for e in examples]
        numbers: dict[tuple[int, ...], int] = {}
        self.of_ops = [0] * len(self._graphs[0].ops)
        if all(graph.signatures for graph in self._graphs):
            keys = zip(*([op.signature for op in graph.ops] for graph in self._graphs))
            self.of_ops = [numbers.setdefault(key, len(numbers)) for key in keys]
        self._keys = list(numbers)
        self._varying = [_varying(tuple(g.signatures[at] for g, at in zip(self._graphs, key))) for key in self._keys]

    def at(self, nearest: int, integer: Callable[[tuple[int, ...]], Estimate | None]) -> tuple[dict, ...]:
        """Those of the example ``nearest``, with the integers that vary as ``integer`` gives them."""
        graph = self._graphs[nearest]
        return tuple(
            _filled(graph.signatures[key[nearest]], varying, integer) for key, varying in zip(self._keys, self._varying)
        )

    def recorded_ms(self, nearest: int) -> dict[int, float]:
        known = self._graphs[nearest].recorded_ms
        return {number: known[key[nearest]] for number, key in enumerate(self._keys) if key[nearest] in known}


def _varying(found: tuple[Any, ...]) -> Any:
    """Where JSON values of one form differ in an integer: its values, in dicts by key or index; None: nowhere.

    Where forms differ, nothing is said.
    """
    base = found[0]
    parts: Iterable[tuple[Any, tuple[Any, ...]]]
    if isinstance(base, dict) and all(isinstance(v, dict) and v.keys() == base.keys() for v in found):
        parts = ((key, tuple(v[key] for v in found)) for key in base)
    elif isinstance(base, list) and all(isinstance(v, list) and len(v) == len(base) for v in found):
        parts = enumerate(zip(*found))
    else:
        return found if all(type(v) is int for v in found) and len(set(found)) > 1 else None
    return {key: varying for key, values in parts if (varying := _varying(values)) is not None} or None


def _filled(base: Any, varying: Any, integer: Callable[[tuple[int, ...]], Estimate | None]) -> Any:
    """``base`` with other integers where they vary; what does not is shared with it."""
    if varying is None:
        return base
    if isinstance(varying, tuple):
        estimate = integer(varying)
        return base if estimate is None else estimate.value
    copy = base.copy()
    for key, part in varying.items():
        copy[key] = _filled(base[key], part, integer)
    return copy


class _Derivation:
    """One graph on its way; ``unconfirmed`` counts sizes that the examples do not confirm."""

    def __init__(
        self,
        examples: Sequence[Example],
        interpolation: Interpolation,
        sizes: _SizeTable,
        signatures: _SignatureTable,
        dimensions: Vector,
    ) -> None:
        self._examples = examples
        self._interpolation = interpolation
        self._sizes, self._signatures = sizes, signatures
        self._dimensions = dimensions
        self._integers: dict[tuple[int, ...], Estimate | None] = {}  # in arguments: few differ
        self._nearest_at = min(range(len(examples)), key=lambda at: distance(examples[at].dimensions, dimensions))
        self._nearest = examples[self._nearest_at].graph

    def result(self) -> DerivedGraph | str:
        base = self._nearest
        found: list[int] = []
        least: list[int] = []
        unconfirmed = 0
        estimates = self._sizes.at(self._dimensions)
        for at, number in enumerate(self._sizes.class_of):
            estimate = estimates[number]
            if estimate is None or estimate.value < 0:
                values = [_sizes(e.graph)[at] for e in self._examples]
                return (
                    f"{_size_name(base, at)} has {values} bytes in the examples, which leaves open what it has "
                    f"here: watch {self._dimensions}"
                )
            unconfirmed += not estimate.confirmed
            found.append(estimate.value)
            least.append(estimate.least)
        num_storages, num_ops = len(base.storages), len(base.ops)
        storages = tuple(s if s.bytes == size else replace(s, bytes=size) for s, size in zip(base.storages, found))
        workspaces = found[num_storages : num_storages + num_ops]
        ops = tuple(
            op
            if (op.workspace_bytes, op.signature) == (workspace, number)
            else replace(op, workspace_bytes=workspace, signature=number)
            for op, workspace, number in zip(base.ops, workspaces, self._signatures.of_ops)
        )
        resident = dict(zip(_parts_of_a_size(base), found[num_storages + num_ops :]))
        if "batch" in base.resident:
            resident["batch"] = self._batch_bytes(storages)
        for part in ("optimizer", "other"):  # what the process held besides: no function of the shape
            resident[part] = max(e.graph.resident.get(part, 0) for e in self._examples)
        graph = replace(
            base,
            resident={part: resident[part] for part in base.resident},
            signatures=self._signatures.at(self._nearest_at, self._integer),
            storages=storages,
            ops=ops,
            calls=tuple(map(self._text, zip(*(e.graph.calls for e in self._examples)))),
            optimizer_step_bytes=max(e.graph.optimizer_step_bytes for e in self._examples),
            recorded_ms=self._signatures.recorded_ms(self._nearest_at),
            provenance=self._provenance(),
        )
        known = [(e.graph, e.costs) for e in self._examples if e.costs is not None]
        costs = interpolated_costs(known, graph) if len(known) == len(self._examples) else None
        ranges = zip(self._dimensions, zip(*(e.dimensions for e in self._examples)))
        extrapolated = any(not min(seen) <= size <= max(seen) for size, seen in ranges)
        return DerivedGraph(self._dimensions, graph, not unconfirmed, unconfirmed, extrapolated, tuple(least), costs)

    def _batch_bytes(self, storages: Sequence[Storage]) -> int:
        """Resident bytes of the batch: of its storages, or, where it lies on another device, as in the examples."""
        known = tuple(e.graph.resident["batch"] for e in self._examples)
        if known == tuple(_input_bytes(e.graph.storages) for e in self._examples):
            return _input_bytes(storages)
        estimate = self._interpolation.estimate(known, self._dimensions)
        return max(known) if estimate is None else estimate.value

    def _integer(self, values: tuple[int, ...]) -> Estimate | None:
        if values not in self._integers:
            self._integers[values] = self._interpolation.estimate(values, self._dimensions)
        return self._integers[values]

    def _text(self, texts: tuple[str, ...]) -> str:
        """``texts``, which differ in numbers alone, with the numbers of these dimensions."""
        columns = list(zip(*(map(int, NUMBERS.findall(text)) for text in texts)))
        found = [self._interpolation.estimate(column, self._dimensions) for column in columns]
        values = iter([column[-1] if e is None else e.value for column, e in zip(columns, found)])
        return NUMBERS.sub(lambda _: str(next(values)), texts[0])

    def _provenance(self) -> dict[str, str]:
        found = dict(self._nearest.provenance)
        batches = tuple(e.graph.provenance.get("batch", "") for e in self._examples)
        if len({NUMBERS.sub("#", batch) for batch in batches}) == 1:
            found["batch"] = self._text(batches)
        shapes = ", ".join(str(e.dimensions) for e in self._examples)
        return found | {"derived": f"for {self._dimensions} from {shapes}"}


def _input_bytes(storages: Iterable[Storage]) -> int:
    return sum(s.bytes for s in storages if s.kind == "input")


def _sizes(graph: StepGraph) -> list[int]:
    """Every byte count of a graph that a shape decides: storages, workspaces, resident parts."""
    resident = [graph.resident[part] for part in _parts_of_a_size(graph)]
    return [s.bytes for s in graph.storages] + [op.workspace_bytes for op in graph.ops] + resident


def _parts_of_a_size(graph: StepGraph) -> list[str]:
    """Resident parts that are functions of the shape, and not only of the storages of its inputs."""
    return [part for part in sorted(graph.resident) if part not in _NO_SIZES_OF_THE_SHAPE]


def _difference_in_sizes(ranges: Sequence[tuple[int, int]], graph: StepGraph) -> str:
    """Where a size of ``graph`` is not in its range, in words; "" where nowhere."""
    sizes = _sizes(graph)
    wrong = [at for at, (size, (low, high)) in enumerate(zip(sizes, ranges, strict=True)) if not low <= size <= high]
    if not wrong:
        return ""
    low, high = ranges[wrong[0]]
    expected = f"{low}" if low == high else f"{low} to {high}"
    name = _size_name(graph, wrong[0])
    return f"{len(wrong)} of {len(sizes)} sizes; {name} has {sizes[wrong[0]]} bytes, not {expected}"


def _size_name(graph: StepGraph, at: int) -> str:
    """What entry ``at`` of ``_sizes`` belongs to."""
    if at < len(graph.storages):
        storage = graph.storages[at]
        maker = storage.kind if storage.op is None else graph.ops[storage.op].name
        return f"storage {at} ({maker})"
    at -= len(graph.storages)
    if at < len(graph.ops):
        return f"the workspace of op {at} ({graph.ops[at].name})"
    return f"resident {_parts_of_a_size(graph)[at - len(graph.ops)]}"


def distance(a: Vector, b: Vector) -> float:
    """0 for equal vectors; a factor of two in one dimension is one."""
    return sum(max(x, y) / max(min(x, y), 1) - 1 for x, y in zip(a, b, strict=True))
