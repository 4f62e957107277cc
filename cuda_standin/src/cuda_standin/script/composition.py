"""What lived when most was allocated: by kind, by module and by line, from the allocator's own history.

The allocator notes each allocation with its Python frames (``_record_memory_history``). Addresses say which block is a
weight, a gradient or an optimizer's state (``labels``); frames say who allocated the rest.
"""

import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from cuda_standin.script import labels, record
from cuda_standin.script.module_names import ModuleNames, Named, Place

Entry = dict[str, Any]
found: dict[str, Any] = {}
KINDS = ("weights", "gradients", "optimizer", "activations", "workspaces", "other")
_MOST_LINES = 20
_PARTS_OF_CURVE = 300
# A block with such a frame is ...; the first that fits. Path, function ("" any), part, kind.
_BY_FRAME = (
    ("torch/distributed/fsdp/", "foreach_reduce", "gradients to be reduced", "gradients"),
    ("torch/distributed/fsdp/", "_post_backward_hook", "gradients to be reduced", "gradients"),
    ("torch/distributed/fsdp/", "", "gathered weights", "weights"),
    ("torch/distributed/_composable/fsdp/", "foreach_reduce", "gradients to be reduced", "gradients"),
    ("torch/distributed/_composable/fsdp/", "", "gathered weights", "weights"),
    ("torch/nn/parallel/distributed.py", "__init__", "buckets of gradients", "gradients"),
    ("torch/nn/parallel/distributed.py", "_pre_forward", "buckets of gradients", "gradients"),  # in the order of use
    ("deepspeed/runtime/zero/partition_parameters.py", "", "gathered weights", "weights"),
    ("deepspeed/runtime/zero/", "__init__", "buffers of the sharded optimizer", "optimizer"),
    ("deepspeed/runtime/zero/stage", "", "gradients of the sharded optimizer", "gradients"),
    ("deepspeed/runtime/fp16/", "step", "temporaries of the optimizer", "optimizer"),
    ("megatron/core/distributed/", "__init__", "buckets of gradients", "gradients"),
    ("torch/optim/", "", "temporaries of the optimizer", "optimizer"),
    ("bitsandbytes/optim/", "", "temporaries of the optimizer", "optimizer"),
    ("deepspeed/ops/adam", "", "temporaries of the optimizer", "optimizer"),
    ("torch/nn/utils/clip_grad.py", "", "temporaries of gradient clipping", "gradients"),
)


def take(torch: ModuleType, snapshot: str) -> None:
    """Read the history, keep what the peak consists of, and write ``snapshot`` for PyTorch's memory viewer."""
    began = time.perf_counter()
    try:
        if snapshot:
            torch.cuda.memory._dump_snapshot(snapshot)
            found["snapshot"] = snapshot
        traces = torch.cuda.memory._snapshot().get("device_traces") or [[]]
        if any(traces):
            names = ModuleNames(labels.modules(torch))
            found.update(composition(max(traces, key=len), _workspace_bytes(torch), names))
    except Exception as error:  # the report lacks a part then, and says so; the script goes on
        record.notes.add(f"what the peak consists of is not known: {type(error).__name__}: {error}")
    found["composition_seconds"] = round(time.perf_counter() - began, 2)


def _workspace_bytes(torch: ModuleType) -> int:
    """Of what cuBLAS keeps for each stream and thread: 4096 KiB x 2 + 16 KiB x 8, and 32 MiB from Hopper on."""
    return 32 << 20 if torch.cuda.get_device_capability()[0] >= 9 else (2 * 4096 + 8 * 16) << 10


def composition(trace: list[Entry], workspace_bytes: int, names: ModuleNames) -> dict[str, Any]:
    """``by_kind`` and ``by_part`` in bytes asked for (without rounding), ``by_module``, ``by_line``, and ``curve``."""
    blocks = _blocks(trace, workspace_bytes)
    at, curve = _curve(trace, blocks)
    kinds: Counter[str] = Counter()
    parts: Counter[tuple[str, str]] = Counter()
    modules: Counter[Named] = Counter()
    lines: Counter[str] = Counter()
    for block in blocks:
        if not block.begins <= at < block.ends:
            continue
        kinds[block.kind] += block.size
        parts[block.part, block.kind] += block.size
        if block.part not in KINDS:
            frames = trace[block.begins]["frames"]
            lines[_line(frames)] += block.size
            if block.kind == "activations":
                modules[_module(frames, names)] += block.size
    return {
        "curve": curve,
        "peak_at": _place(trace[at]) if blocks else None,
        "by_kind": {kind: kinds[kind] for kind in KINDS},
        "by_part": [{"part": part, "kind": kind, "bytes": taken} for (part, kind), taken in parts.most_common()],
        "by_module": [{**named._asdict(), "bytes": taken} for named, taken in modules.most_common(_MOST_LINES)],
        "by_line": [{"line": line, "bytes": taken} for line, taken in lines.most_common(_MOST_LINES)],
        "peak_of_history_bytes": sum(kinds.values()),
    }


@dataclass
class _Block:
    """Alive in the history from position ``begins`` until before ``ends``."""

    size: int
    begins: int
    ends: int
    part: str = ""
    kind: str = ""


def _blocks(trace: list[Entry], workspace_bytes: int) -> list[_Block]:
    blocks: list[_Block] = []
    open_blocks: dict[int, _Block] = {}
    for position, entry in enumerate(trace):
        if entry["action"] == "alloc":
            open_blocks[entry["addr"]] = block = _Block(entry["size"], position, len(trace))
            blocks.append(block)
        elif entry["action"] == "free_requested" and entry["addr"] in open_blocks:
            open_blocks.pop(entry["addr"]).ends = position
    for block in blocks:
        entry = trace[block.begins]
        freed = trace[block.ends].get("time_us", 0) if block.ends < len(trace) else None
        labelled = _label(entry["addr"], entry, freed)
        block.part, block.kind = (labelled, labelled) if labelled else _by_frames(entry)
    _mark_workspaces(trace, blocks, workspace_bytes)
    return blocks


def _mark_workspaces(trace: list[Entry], blocks: list[_Block], workspace_bytes: int) -> None:
    """The first block of a workspace's size that is never freed, of each stream, of forward and of backward.

    An activation of that very size may be kept as well, where memory ran out before it was freed.
    """
    found = set()
    for block in blocks:
        entry = trace[block.begins]
        key = entry.get("stream"), bool(entry["frames"])
        is_one = block.size == workspace_bytes and block.ends == len(trace) and block.part not in KINDS
        if is_one and key not in found:
            found.add(key)
            block.part, block.kind = "workspaces of cuBLAS", "workspaces"


def _curve(trace: list[Entry], blocks: list[_Block]) -> tuple[int, dict[str, Any]]:
    """The position of the peak, and bytes by kind over the history: of each of its parts, the moment with most.

    ``steps`` has the parts in which steps end.
    """
    changes: list[tuple[int, str, int]] = sorted(
        [(block.begins, block.kind, block.size) for block in blocks]
        + [(block.ends, block.kind, -block.size) for block in blocks if block.ends < len(trace)]
    )
    width = max(1, -(-len(trace) // _PARTS_OF_CURVE))
    now = dict.fromkeys(KINDS, 0)
    total = most = at = best = 0
    shown: list[dict[str, int]] = []
    held = dict(now)
    for position, kind, size in changes:
        while position >= (len(shown) + 1) * width:
            shown.append(held)
            held, best = dict(now), total
        now[kind] += size
        total += size
        if total > best:
            held, best = dict(now), total
        if total > most:
            most, at = total, position
    shown.append(held)
    times = [entry.get("time_us", 0) for entry in trace]
    ends = [bisect_left(times, step) // width for step in labels.step_ends]
    return at, {"by_kind": {kind: [part[kind] for part in shown] for kind in KINDS}, "steps": ends}


def _label(address: int, entry: Entry, freed: int | None) -> str:
    """What the address was while this block had it."""
    begins, ends = entry.get("time_us", 0), freed if freed is not None else 1 << 62
    for at, addresses in labels.noted:
        if begins <= at <= ends and address in addresses:
            return addresses[address]
    return ""


def _by_frames(entry: Entry) -> tuple[str, str]:
    return _by_stack(tuple((f["filename"], f["name"]) for f in entry["frames"]))


def _inside_forward(frames: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The frames up to the innermost forward of a module: what wraps that module did not ask for the block.

    A wrapper's own forward gathers weights before it calls the module's.
    """
    for position, (file, name) in enumerate(frames):
        if name == "forward" and not any(path in file for path, function, _, _ in _BY_FRAME if not function):
            return frames[:position]
    return frames


@cache
def _by_stack(frames: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    inner = _inside_forward(frames)
    for path, function, part, kind in _BY_FRAME:
        if any(path in file and function in ("", name) for file, name in inner):
            return part, kind
    names = {name for _, name in frames}
    if not frames or "_engine_run_backward" in names:
        return "temporaries of backward", "activations"
    if "forward" in names or "_call_impl" in names:
        return "activations of forward", "activations"
    return "outside modules: batches, losses, the loop's own", "other"


def _place(entry: Entry) -> dict[str, Any]:
    """Where the script was: its own line and the innermost one outside PyTorch; in backward the line that called it."""
    places = [(f["filename"], f["line"]) for f in entry["frames"] if f["filename"].startswith("/")]
    outside = [place for place in places if not record.is_machinery(place[0])]
    script = next((place for place in outside if not record.is_package(place[0])), None)
    if script is not None:
        line, inner = (f"{record.short(file)}:{number}" for file, number in (script, outside[0]))
        return {"line": line, "inner_line": inner, "is_backward": False}
    began = [line for at, line in record.backward_lines if at <= entry.get("time_us", 0)]
    line = began[-1] if began else ""
    return {"line": line, "inner_line": line, "is_backward": True}


def _line(frames: list[Entry]) -> str:
    for f in frames:
        if f["filename"].startswith("/") and not record.is_machinery(f["filename"]):
            return f"{record.short(f['filename'])}:{f['line']} {f['name']}"
    return f"{record.short(frames[0]['filename'])}:{frames[0]['line']}" if frames else "backward"


@cache
def _named(names: ModuleNames, places: tuple[Place, ...]) -> Named:
    return names.of(places)


def _module(frames: list[Entry], names: ModuleNames) -> Named:
    """The innermost module whose forward allocated it."""
    inside = tuple(Place(f["filename"], f["line"]) for f in frames if f["name"] in ("forward", "_forward"))
    if inside:
        return _named(names, inside)
    is_backward = not frames or any(f["name"] == "_engine_run_backward" for f in frames)
    return Named("backward" if is_backward else "outside modules")
