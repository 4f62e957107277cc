"""The step of a deep model from that of a shallow one whose layers are alike: one of them is repeated.

Tracing takes time by the layer. Where two neighbours in the middle of a shallow model do exactly the same (ops,
storages, what autograd stores, the order of all events, in forward and in backward), more layers between them do it
again. What is compared is everything that a graph says; where anything differs, there is no answer, and the deep
model has to be traced.

Labels: an op of forward belongs to the layer that its module path names, one of backward to the layer whose saved
tensor was taken out last; where neither says anything, to the layer of the op before. So what runs before the first
layer belongs to that, and what runs after the last one to the last. A *run* is an unbroken stretch
of one table (ops, storages, frames, saved tensors, events) with one label. Forward meets the layers in ascending
order, backward in descending order, so each layer has several runs. An item is named by its label, the number of its
run within the label, and its place in that run.

References to the layer itself and to its two neighbours move with the layer; those to the first and last stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from lowtide.graph.step_graph import (
    DROP,
    FREE,
    NEW_GRADIENT,
    PACK,
    RELEASE,
    RUN,
    UNPACK,
    Frame,
    Op,
    StepGraph,
    Storage,
)  # fmt: skip

SHALLOW_LAYERS = 6  # first, one that only neighbours refer to, two that are compared, another one, last
_REPEATED = 2
_LAYER = re.compile(r"^(?:.*?\.)?(\d+)(?=\.|$)")
_COUNTED = re.compile(r"\((\d+) times, first in ")
_PARTS = {"parameter": "parameters", "gradient": "gradients", NEW_GRADIENT: "gradients", "buffer": "buffers"}

_Place = tuple[int, int, int]  # label, number of its run within the label, place in the run


class _NotAlikeError(Exception):
    """The layers cannot be repeated."""


def with_layers(graph: StepGraph, layers: int) -> StepGraph | None:
    """Return the graph of the same model with ``layers`` layers; ``graph`` is that of ``SHALLOW_LAYERS``.

    Equal to a trace of the deep model, provenance included. None where the layers in the middle are not alike.
    """
    more = layers - SHALLOW_LAYERS
    if more < 0 or graph.written_parameters or graph.recorded_ms or graph.retained_backwards:
        return None
    try:
        return _Lengthening(_in_order(graph), more).result()
    except _NotAlikeError:
        return None


@dataclass(frozen=True)
class _Table:
    """Items of one kind: where each one is, and the runs in order."""

    places: list[_Place]
    runs: list[tuple[int, range]]  # label, places in the table

    @classmethod
    def of(cls, labels: Sequence[int]) -> _Table:
        places: list[_Place] = []
        runs: list[tuple[int, range]] = []
        met: Counter[int] = Counter()
        for label, same in groupby(labels):
            count = sum(1 for _ in same)
            runs.append((label, range(len(places), len(places) + count)))
            places += [(label, met[label], at) for at in range(count)]
            met[label] += 1
        return cls(places, runs)

    def lengthened(self, more: int) -> Iterator[tuple[int, range]]:
        """Runs of the deep model: their labels there, and the shallow one's items that they repeat."""
        for number, (label, items) in enumerate(self.runs):
            if label != _REPEATED:
                yield label + more * (label > _REPEATED), items
                continue
            before = self.runs[number - 1][0] if number else None
            after = self.runs[number + 1][0] if number + 1 < len(self.runs) else None
            if (before, after) not in ((label - 1, label + 1), (label + 1, label - 1)):
                raise _NotAlikeError
            copies = range(label, label + more + 1)
            for copy in copies if before == label - 1 else reversed(copies):
                yield copy, items


class _Lengthening:
    """One graph on its way."""

    def __init__(self, graph: StepGraph, more: int) -> None:
        self.graph, self.more = graph, more
        frames = _filled([_layer_of(f.path) for f in graph.frames])
        ops, events, storages, saved = self._labels_by_event()
        self.frames, self.ops, self.events = _Table.of(frames), _Table.of(ops), _Table.of(events)
        self.storages, self.saved = _Table.of(storages), _Table.of(saved)
        # Ids of the deep model, by place there.
        self._new = {id(t): self._numbered(t) for t in (self.frames, self.ops, self.storages, self.saved)}

    def _labels_by_event(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Labels of ops, events, storages and saved tensors: of the layer in which each is first met."""
        graph, label = self.graph, 0
        ops, events, saved = [0] * len(graph.ops), [], [0] * len(graph.saved)
        storages: dict[int, int] = {}
        for kind, number in graph.events:
            if kind == RUN:
                op = graph.ops[number]
                named = None if op.backward else _layer_of(graph.scope(op))
                label = ops[number] = label if named is None else named
                for s in (*op.reads, *op.makes, *op.writes):
                    storages.setdefault(s, label)
            elif kind == PACK:
                saved[number] = label
            elif kind == UNPACK:
                label = saved[number]
            of = label
            if kind in (FREE, DROP, RELEASE) and label in (0, SHALLOW_LAYERS - 1):
                of = storages.get(number, label) if kind == FREE else saved[number]  # all layers' in one sweep
            events.append(of)
        by_storage, last = [], 0
        for storage in graph.storages:
            # A gradient is listed with its parameter, which its layer reads first.
            last = last if storage.kind == "gradient" else storages.get(storage.id, last)
            by_storage.append(last)
        if any(label >= SHALLOW_LAYERS for label in ops):
            raise _NotAlikeError
        return ops, events, by_storage, saved

    def _numbered(self, table: _Table) -> dict[_Place, int]:
        met: Counter[int] = Counter()
        found: dict[_Place, int] = {}
        for label, items in table.lengthened(self.more):
            for at in range(len(items)):
                found[label, met[label], at] = len(found)
            met[label] += 1
        return found

    def result(self) -> StepGraph:
        """The deep model's graph, once two layers turned out alike."""
        if self._described(_REPEATED) != self._described(_REPEATED + 1):
            raise _NotAlikeError
        graph = self.graph
        frames = [self._frame(graph.frames[at], at, new) for at, new in self._items(self.frames)]
        storages = [self._storage(graph.storages[at], at, new) for at, new in self._items(self.storages)]
        ops = [self._op(graph.ops[at], at, new) for at, new in self._items(self.ops)]
        saved = [self._moved(self.storages, graph.saved[at], of, new)
                 for at, new in self._items(self.saved) for of in (self.saved.places[at][0],)]  # fmt: skip
        events = [
            (kind, self._moved(self._table_of(kind), number, self.events.places[at][0], new))
            for at, new in self._items(self.events)
            for kind, number in (graph.events[at],)
        ]
        return replace(
            graph,
            resident=self._resident(),
            frames=tuple(frames),
            storages=tuple(replace(s, id=number) for number, s in enumerate(storages)),
            ops=tuple(replace(op, id=number) for number, op in enumerate(ops)),
            saved=tuple(saved),
            events=tuple(events),
            provenance=graph.provenance | {"assumed": self._assumed()} if "assumed" in graph.provenance
            else graph.provenance,
        )  # fmt: skip

    def _items(self, table: _Table) -> Iterator[tuple[int, int]]:
        """(item of the shallow model, label in the deep one) in the deep one's order."""
        for label, items in table.lengthened(self.more):
            for at in items:
                yield at, label

    def _table_of(self, kind: int) -> _Table:
        if kind == RUN:
            return self.ops
        return self.storages if kind == FREE else self.saved

    # -- references -------------------------------------------------------------------------------------------

    def _moved(self, table: _Table, number: int, label: int, new: int) -> int:
        """The deep model's id of what an item of layer ``label`` refers to, where that layer is ``new``."""
        target, run, at = table.places[number]
        place = (new + target - label if self._moves(target, label) else self._kept(target, label), run, at)
        if place not in self._new[id(table)]:
            raise _NotAlikeError
        return self._new[id(table)][place]

    def _moves(self, target: int, label: int) -> bool:
        return 0 < target < SHALLOW_LAYERS - 1 and 0 < label < SHALLOW_LAYERS - 1 and abs(target - label) <= 1

    def _kept(self, target: int, label: int) -> int:
        """The deep model's label of a target that does not move with who refers to it."""
        inner = range(1, SHALLOW_LAYERS - 1)
        if target in inner and (label in inner or abs(target - label) > 1):
            raise _NotAlikeError  # nobody can say which of the repeated layers is meant
        return target + self.more * (target > _REPEATED)

    def _described(self, label: int) -> list:
        """Everything that the graph says of one layer, such that equal layers say the same."""
        graph = self.graph

        def of(table: _Table) -> Iterator[int]:
            return (at for number, items in table.runs if number == label for at in items)

        def to(table: _Table) -> Callable[[int], tuple]:
            def named(number: int) -> tuple:
                target, run, at = table.places[number]
                moves = self._moves(target, label)
                if not moves:
                    self._kept(target, label)
                return moves, target - label if moves else target, run, at

            return named

        op, storage, frame = to(self.ops), to(self.storages), to(self.frames)
        return [
            [len(items) for table in self._tables for number, items in table.runs if number == label],
            [
                (o.name, frame(o.frame), o.backward, *(tuple(map(storage, s)) for s in (o.reads, o.makes, o.writes)),
                 o.workspace_bytes, o.rng_bytes, o.signature, o.dynamic,
                 None if o.completes_inplace is None else op(o.completes_inplace))
                for o in (graph.ops[at] for at in of(self.ops))
            ],
            [
                (s.bytes, s.kind, None if s.op is None else op(s.op), s.output, s.fixed)
                for s in (graph.storages[at] for at in of(self.storages))
            ],
            [(frame(f.parent), _with_layer(f.path, 0), f.ordinal) for f in (graph.frames[i] for i in of(self.frames))],
            [storage(graph.saved[at]) for at in of(self.saved)],
            [(kind, to(self._table_of(kind))(n)) for kind, n in (graph.events[at] for at in of(self.events))],
        ]  # fmt: skip

    @property
    def _tables(self) -> tuple[_Table, ...]:
        return self.ops, self.storages, self.frames, self.saved, self.events

    # -- items ------------------------------------------------------------------------------------------------

    def _frame(self, frame: Frame, at: int, new: int) -> Frame:
        label = self.frames.places[at][0]
        path = frame.path if _layer_of(frame.path) is None else _with_layer(frame.path, new)
        parent = frame.parent if frame.parent < 0 else self._moved(self.frames, frame.parent, label, new)
        return Frame(parent, path, frame.ordinal)

    def _storage(self, storage: Storage, at: int, new: int) -> Storage:
        label = self.storages.places[at][0]
        return storage if storage.op is None else replace(storage, op=self._moved(self.ops, storage.op, label, new))

    def _op(self, op: Op, at: int, new: int) -> Op:
        label = self.ops.places[at][0]

        def moved(numbers: Sequence[int]) -> tuple[int, ...]:
            return tuple(self._moved(self.storages, s, label, new) for s in numbers)

        joined = op.completes_inplace
        return replace(
            op, frame=self._moved(self.frames, op.frame, label, new), reads=moved(op.reads), makes=moved(op.makes),
            writes=moved(op.writes),
            completes_inplace=None if joined is None else self._moved(self.ops, joined, label, new),
        )  # fmt: skip

    def _resident(self) -> dict[str, int]:
        """Each layer more has the parameters, gradients and buffers of the repeated one."""
        found = dict(self.graph.resident)
        for storage, (label, _, _) in zip(self.graph.storages, self.storages.places):
            if label == _REPEATED and storage.kind in _PARTS:
                found[_PARTS[storage.kind]] += self.more * storage.bytes
        return found

    def _assumed(self) -> str:
        """With the deep model's counts: so many in each layer, and fewer than layers outside them."""

        def counted(match: re.Match[str]) -> str:
            each, besides = divmod(int(match[1]), SHALLOW_LAYERS)
            return f"({each * (SHALLOW_LAYERS + self.more) + besides} times, first in "

        return _COUNTED.sub(counted, self.graph.provenance["assumed"])


def _in_order(graph: StepGraph) -> StepGraph:
    """``graph`` with storages that die at one moment in the order of their ids.

    Autocast's cache lets its casts go in the order of their addresses.
    """
    events: list[tuple[int, int]] = []
    for kind, same in groupby(graph.events, key=lambda event: event[0]):
        moment = list(same)
        events += sorted(moment) if kind == FREE else moment
    return replace(graph, events=tuple(events))


def _layer_of(path: str) -> int | None:
    found = _LAYER.match(path)
    return None if found is None else int(found[1])


def _with_layer(path: str, layer: int) -> str:
    found = _LAYER.match(path)
    return path if found is None else f"{path[: found.start(1)]}{layer}{path[found.end(1) :]}"


def _filled(layers: Sequence[int | None]) -> list[int]:
    """Where no layer is named, the one before; 0 at the beginning."""
    found, last = [], 0
    for layer in layers:
        last = last if layer is None else layer
        if last >= SHALLOW_LAYERS:
            raise _NotAlikeError
        found.append(last)
    return found
