"""What steps of different shapes share: the same ops over the same storages, in the same order.

Not part of it: bytes of storages, workspaces, operator arguments, times. Which storages live at an event follows from
the structure alone, so decisions that suit one graph suit every graph of its structure.
"""

import hashlib
import re

from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import EVENT_NAMES, Op, StepGraph, Storage

NUMBERS = re.compile(r"(?<![A-Za-z0-9])[0-9]+")  # not those of a dtype, such as int64


@once_per_graph
def structure_hash(graph: StepGraph) -> str:
    """Equal for graphs of the same structure."""
    return hashlib.sha256(repr([rows for _, rows in _tables(graph)]).encode()).hexdigest()[:16]


def structure_difference(graph: StepGraph, other: StepGraph) -> str:
    """The first thing in which the structures differ, in words; "" if they are the same."""
    if structure_hash(graph) == structure_hash(other):
        return ""
    for (name, expected), (_, found) in zip(_tables(graph), _tables(other), strict=True):
        if len(expected) != len(found) and name not in ("op", "event"):
            return f"{len(found)} {name}s, not {len(expected)}"
        for at, (a, b) in enumerate(zip(expected, found)):
            if a != b:
                return f"{name} {at} is {_in_words(name, b)}, not {_in_words(name, a)}"
        if len(expected) != len(found):
            return f"{len(found)} {name}s, not {len(expected)}"
    return "the structures differ"


def _tables(graph: StepGraph) -> list[tuple[str, list]]:
    """Everything that counts, by name in the singular, as rows that compare."""
    about = (
        graph.device, graph.device_name, graph.region, graph.written_parameters, sorted(graph.resident),
        graph.retained_backwards,
    )  # fmt: skip
    # An input's dtype or a flag decides which ops run; its sizes are what a family varies.
    calls = [NUMBERS.sub("#", call) for call in graph.calls]
    return [
        ("fact", list(map(repr, about))),
        ("call", calls),
        ("op", list(map(_op_row, graph.ops))),
        ("frame", [(f.parent, f.path, f.ordinal) for f in graph.frames]),
        ("storage", list(map(_storage_row, graph.storages))),
        ("saved tensor", list(graph.saved)),
        ("event", list(map(tuple, graph.events))),
    ]


def _op_row(op: Op) -> tuple:
    return (
        op.name, op.frame, op.backward, tuple(op.reads), tuple(op.makes), tuple(op.writes), op.rng_bytes, op.dynamic,
        op.completes_inplace,
    )  # fmt: skip


def _storage_row(storage: Storage) -> tuple:
    return storage.kind, storage.op, storage.output, storage.fixed


def _in_words(name: str, row: object) -> str:
    if name == "op" and isinstance(row, tuple):
        return f"{row[0]} (reads {list(row[3])}, makes {list(row[4])})"
    if name == "event" and isinstance(row, tuple):
        return f"{EVENT_NAMES[row[0]]} {row[1]}"
    return str(row)
