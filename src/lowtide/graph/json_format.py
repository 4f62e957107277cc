"""Graphs and costs from JSON, checked before anything believes them.

What is wrong is a ``GraphFormatError`` that names the field: from a damaged graph a solver would return a wrong plan.
Beyond types and ranges this checks what solvers and the simulator rely on: ops run once, in the order of their ids; a
storage is read, freed or packed only after it was made; a saved tensor is unpacked after it was packed.
Reads and writes version 2.
"""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lowtide.errors import GraphFormatError
from lowtide.graph.costs import SOURCES, TIERS, Costs, Link
from lowtide.graph.step_graph import (
    DROP,
    EVENT_NAMES,
    FREE,
    GONE_GRADIENT,
    NEW_GRADIENT,
    PACK,
    RELEASE,
    RUN,
    UNPACK,
    VERSION,
    Frame,
    Op,
    StepGraph,
    Storage,
    to_dict,
)

COSTS_VERSION = 2
MADE_KINDS = ("activation", "backward", NEW_GRADIENT, GONE_GRADIENT)
RESIDENT_KINDS = ("parameter", "gradient", "buffer", "input", "other")
REGIONS = ("model", "step")


def save(graph: StepGraph, path: str | Path) -> None:
    """Write ``graph`` as JSON, gzipped if ``path`` ends in ``.gz``; the same graph gives the same bytes."""
    _write(to_dict(graph), path)


def load(path: str | Path) -> StepGraph:
    """Read what ``save`` wrote.

    Raises:
        GraphFormatError: damaged, truncated, or of another version; the message names the field.
        OSError: the file cannot be read.
    """
    return from_dict(_read(path, "a graph", "Save the graph again."))


def save_costs(costs: Costs, path: str | Path) -> None:
    """Write ``costs`` as ``save`` writes a graph."""
    _write(costs_to_dict(costs), path)


def load_costs(path: str | Path) -> Costs:
    """Read what ``save_costs`` wrote; raises as ``load`` does."""
    return costs_from_dict(_read(path, "costs", "Save the costs again."))


def _write(body: dict, path: str | Path) -> None:
    text = json.dumps(body, separators=(",", ":")).encode()
    Path(path).write_bytes(gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)


def _read(path: str | Path, what: str, way_out: str) -> Any:
    data = Path(path).read_bytes()
    try:
        if str(path).endswith(".gz"):
            data = gzip.decompress(data)
        return json.loads(data)
    except (OSError, EOFError, zlib.error) as error:
        raise GraphFormatError(f"not {what}: {path} is not a whole gzip file ({error}). {way_out}") from error
    except (ValueError, RecursionError) as error:
        raise GraphFormatError(f"not {what}: {path} is not whole JSON ({error}). {way_out}") from error


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Checker:
    """Says in one form what is wrong: the field, its value, what it should be, the way out.

    Its methods take a field and a value, and return the value.
    """

    def __init__(self, what: str, way_out: str) -> None:
        self.what, self.way_out = what, way_out

    def that(self, holds: bool, field: str, value: Any, expected: str) -> None:
        if not holds:
            shown = repr(value)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            raise GraphFormatError(f"not {self.what}: field {field!r} is {shown}, not {expected}. {self.way_out}")

    def fields(self, body: Any, kind: type[StepGraph | Costs], version: int) -> None:
        """An object with the version and every field of the dataclass ``kind``, and no others."""
        if not isinstance(body, dict):
            raise GraphFormatError(f"not {self.what}: a {type(body).__name__}, not an object. {self.way_out}")
        # The version first: a file of another version misses fields too, and this says why.
        found = body.get("version")
        self.that(found == version, "version", found, f"{version}, the version known here")
        names = ["version", *(field.name for field in dataclasses.fields(kind))]
        for name in names:
            if name not in body:
                raise GraphFormatError(f"not {self.what}: field {name!r} is missing. {self.way_out}")
        for name in body:
            self.that(name in names, str(name), body[name], f"a field of {self.what}")

    def many(self, field: str, value: Any, check: Callable[[str, Any], Any] | None = None) -> list:
        """A list whose items ``check`` accepts."""
        self.that(isinstance(value, list), field, value, "a list")
        return value if check is None else [check(f"{field}[{i}]", item) for i, item in enumerate(value)]

    def named(self, field: str, value: Any, check: Callable[[str, Any], Any]) -> dict:
        """An object whose values ``check`` accepts."""
        self.object(field, value)
        return {key: check(f"{field}.{key}", item) for key, item in value.items()}

    def row(self, field: str, value: Any, **columns: Callable[[str, Any], Any]) -> list:
        """A list with an item for each of ``columns``, which say what checks it."""
        holds = isinstance(value, list) and len(value) == len(columns)
        self.that(holds, field, value, f"a list of {len(columns)}: {', '.join(columns)}")
        return [check(f"{field}.{name}", item) for (name, check), item in zip(columns.items(), value)]

    def object(self, field: str, value: Any) -> dict:
        self.that(isinstance(value, dict), field, value, "an object")
        return value

    def text(self, field: str, value: Any) -> str:
        self.that(isinstance(value, str), field, value, "text")
        return value

    def flag(self, field: str, value: Any) -> bool:
        self.that(value in (0, 1) and isinstance(value, int), field, value, "0 or 1")
        return bool(value)

    def integer(self, field: str, value: Any) -> int:
        self.that(_is_int(value), field, value, "an integer")
        return value

    def count(self, field: str, value: Any) -> int:
        self.that(_is_int(value) and value >= 0, field, value, "an integer of 0 or more")
        return value

    def time(self, field: str, value: Any) -> float:
        # NaN compares false with everything, so one chain of comparisons refuses it and infinity too.
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        self.that(number and 0 <= value < 1e300, field, value, "a finite time of 0 or more")
        return float(value)

    def index(self, field: str, value: Any, *, limit: int) -> int:
        self.that(_is_int(value) and 0 <= value < limit, field, value, f"an id from 0 to {limit - 1}")
        return value

    def index_or_none(self, field: str, value: Any, *, limit: int) -> int | None:
        return None if value is None else self.index(field, value, limit=limit)

    def ids(self, field: str, value: Any, *, limit: int) -> tuple[int, ...]:
        return tuple(self.index(f"{field}[{i}]", v, limit=limit) for i, v in enumerate(self.many(field, value)))


def from_dict(body: Any) -> StepGraph:
    """Build the graph that ``step_graph.to_dict`` described.

    Raises:
        GraphFormatError: a field is missing, unknown, of the wrong type, out of range, or contradicts another.
    """
    check = _Checker("a graph", "Trace the step again, or restore the file.")
    if isinstance(body, dict):
        body = {"retained_backwards": [], **body}  # only steps of several backward passes have some
    check.fields(body, StepGraph, VERSION)
    frames = _frames(check, body["frames"])
    signatures = tuple(check.many("signatures", body["signatures"], check.object))
    num_ops = len(check.many("ops", body["ops"]))
    storages = _storages(check, body["storages"], num_ops)
    ops = _ops(check, body["ops"], len(frames), storages, len(signatures))
    saved = check.ids("saved", body["saved"], limit=len(storages))
    check.that(body["region"] in REGIONS, "region", body["region"], f"one of {', '.join(REGIONS)}")
    signature = partial(check.index, limit=len(signatures))
    recorded = partial(check.row, signature=signature, ms=check.time)
    return StepGraph(
        device=check.text("device", body["device"]),
        device_name=check.text("device_name", body["device_name"]),
        resident=check.named("resident", body["resident"], check.count),
        signatures=signatures,
        frames=frames,
        storages=storages,
        ops=ops,
        saved=saved,
        events=_events(check, body["events"], ops, storages, saved),
        calls=tuple(check.many("calls", body["calls"], check.text)),
        region=body["region"],
        optimizer_step_bytes=check.count("optimizer_step_bytes", body["optimizer_step_bytes"]),
        written_parameters=tuple(check.many("written_parameters", body["written_parameters"], check.text)),
        retained_backwards=_retained_backwards(check, body["retained_backwards"], len(ops)),
        recorded_ms=dict(check.many("recorded_ms", body["recorded_ms"], recorded)),
        provenance=check.named("provenance", body["provenance"], check.text),
    )


def _retained_backwards(check: _Checker, rows: Any, num_ops: int) -> tuple[tuple[int, int], ...]:
    op = partial(check.index, limit=num_ops)
    found = [
        (first, last) for first, last in check.many("retained_backwards", rows, partial(check.row, first=op, last=op))
    ]
    before = -1
    for i, (first, last) in enumerate(found):
        check.that(
            before < first <= last, f"retained_backwards[{i}]", rows[i], "ops in order, behind those of the one before"
        )
        before = last
    return tuple(found)


def costs_to_dict(costs: Costs) -> dict:
    """Plain JSON types; ``costs_from_dict`` reads it back and checks it."""
    links = {tier: list(dataclasses.astuple(link)) for tier, link in costs.links.items()}
    body = {"version": COSTS_VERSION, **vars(costs), "op_ms": list(costs.op_ms), "links": links}
    if costs.error_fraction is None:  # measured: as files were before there were estimates
        del body["error_fraction"]
    if not costs.move_us:  # as files were before moves cost the host anything
        del body["move_us"]
    return body


def costs_from_dict(body: Any) -> Costs:
    """Build the costs that ``costs_to_dict`` described.

    Raises:
        GraphFormatError: a field is missing or unknown, or a time is negative, infinite or not a number.
    """
    check = _Checker("costs", "Measure again with lowtide.measure(graph).")
    if isinstance(body, dict):
        body = {"error_fraction": None, "move_us": 0.0, **body}  # only some have them
    check.fields(body, Costs, COSTS_VERSION)
    check.that(body["source"] in SOURCES, "source", body["source"], " or ".join(SOURCES))
    return Costs(
        op_ms=tuple(check.many("op_ms", body["op_ms"], check.time)),
        dispatch_us=check.time("dispatch_us", body["dispatch_us"]),
        record_us=check.time("record_us", body["record_us"]),
        replay_us=check.time("replay_us", body["replay_us"]),
        move_us=check.time("move_us", body["move_us"]),
        source=body["source"],
        device_name=check.text("device_name", body["device_name"]),
        links=_links(check, body["links"]),
        error_fraction=None if body["error_fraction"] is None else check.time("error_fraction", body["error_fraction"]),
    )


def _links(check: _Checker, rows: Any) -> dict[str, Link]:
    for tier in check.object("links", rows):
        check.that(tier in TIERS, "links", tier, f"one of {', '.join(TIERS)}")
    row = partial(check.row, store_bytes_per_s=check.time, fetch_bytes_per_s=check.time, latency_ms=check.time)
    found = check.named("links", rows, row)
    for tier, (store, fetch, _) in found.items():
        check.that(store > 0 and fetch > 0, f"links.{tier}", rows[tier], "speeds above 0")
    return {tier: Link(*row) for tier, row in found.items()}


def _frames(check: _Checker, rows: Any) -> tuple[Frame, ...]:
    row = partial(check.row, parent=check.integer, path=check.text, ordinal=check.count)
    frames = tuple(Frame(*values) for values in check.many("frames", rows, row))
    for i, frame in enumerate(frames):
        # Frame 0 is the step itself: it has no parent, written 0 or -1.
        before = -1 <= frame.parent <= 0 if i == 0 else 0 <= frame.parent < i
        check.that(before, f"frames[{i}].parent", frame.parent, "the index of an earlier frame")
    return frames


def _storages(check: _Checker, rows: Any, num_ops: int) -> tuple[Storage, ...]:
    def kind(field: str, value: Any) -> str:
        check.that(value in MADE_KINDS + RESIDENT_KINDS, field, value, "a kind of storage")
        return value

    op = partial(check.index_or_none, limit=num_ops)
    row = partial(check.row, bytes=check.count, kind=kind, op=op, output=check.count, fixed=check.text)
    storages = tuple(Storage(i, *values) for i, values in enumerate(check.many("storages", rows, row)))
    for s in storages:
        where = f"storages[{s.id}].op"
        check.that((s.op is not None) == (s.kind in MADE_KINDS), where, s.op, f"what a storage of kind {s.kind!r} has")
    return storages


def _ops(
    check: _Checker, rows: list, num_frames: int, storages: tuple[Storage, ...], num_signatures: int
) -> tuple[Op, ...]:
    storage_ids = partial(check.ids, limit=len(storages))
    # Graphs made by hand may carry no signatures at all; then every op says 0.
    frame, signature = partial(check.index, limit=num_frames), partial(check.index, limit=max(num_signatures, 1))
    checked = partial(
        check.row,
        name=check.text, frame=frame, backward=check.flag, reads=storage_ids, makes=storage_ids, writes=storage_ids,
        workspace_bytes=check.count, rng_bytes=check.count, signature=signature, dynamic=check.flag,
    )  # fmt: skip
    ops = []
    made: dict[int, int] = {}
    for i, row in enumerate(rows):
        where = f"ops[{i}]"
        op = Op(i, *checked(where, row, completes_inplace=partial(check.index_or_none, limit=i)))
        for s in op.makes:
            check.that(s not in made, f"{where}.makes", s, f"new: op {made.get(s)} made that storage before")
            check.that(storages[s].op == i, f"{where}.makes", s, f"made here: storages[{s}].op is {storages[s].op}")
            made[s] = i
        for field, ids in (("reads", op.reads), ("writes", op.writes)):
            for s in ids:
                there = storages[s].op is None or (s in made and s not in op.makes)
                check.that(there, f"{where}.{field}", s, "made before: the op would need what does not exist yet")
        ops.append(op)
    for storage in storages:
        if storage.op is not None:
            check.that(storage.id in made, f"storages[{storage.id}].op", storage.op, "the op whose makes names it")
    return tuple(ops)


def _events(
    check: _Checker, flat: Any, ops: tuple[Op, ...], storages: tuple[Storage, ...], saved: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    flat = check.many("events", flat)
    check.that(len(flat) % 2 == 0, "events", len(flat), "an even count: kind and id in turn")
    limits = {RUN: len(ops), FREE: len(storages)}
    events = []
    ran = 0
    freed: set[int] = set()
    packed: set[int] = set()
    released: set[int] = set()
    out = [0] * len(saved)
    for i in range(0, len(flat), 2):
        kind, subject = flat[i], flat[i + 1]
        where = f"events[{i // 2}]"
        check.index(f"{where}.kind", kind, limit=len(EVENT_NAMES))
        where += f" ({EVENT_NAMES[kind]})"
        check.index(where, subject, limit=limits.get(kind, len(saved)))
        if kind == RUN:
            check.that(subject == ran, where, subject, f"op {ran}: ops run once, in the order of their ids")
            ran += 1
        elif kind in (FREE, PACK):
            op = storages[subject if kind == FREE else saved[subject]].op
            check.that(op is None or op < ran, where, subject, f"after op {op}, which makes the storage")
            once = freed if kind == FREE else packed
            check.that(subject not in once, where, subject, "new: it happened before")
            once.add(subject)
        elif kind == UNPACK:
            check.that(subject in packed - released, where, subject, "between its pack and its release")
            out[subject] += 1
        elif kind == DROP:
            check.that(out[subject] > 0, where, subject, "unpacked before")
            out[subject] -= 1
        elif kind == RELEASE:
            check.that(subject in packed - released, where, subject, "between its pack and its only release")
            released.add(subject)
        events.append((kind, subject))
    check.that(ran == len(ops), "events", f"{ran} runs", f"one run for each of {len(ops)} ops")
    return tuple(events)
