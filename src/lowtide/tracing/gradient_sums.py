"""Undo a difference that recording makes: under a dispatch mode the engine adds gradients out of place.

Where a node's gradient arrives in parts, autograd adds the second part into the first when nothing else refers to
it. ``can_accumulate_inplace`` (torch/csrc/autograd/input_buffer.cpp) says no whenever a dispatch mode is on, so the
recorder sees ``add`` and a new storage where the plain step has neither. On a state-space model that was 9 % of
the peak. The sum whose part dies at once is therefore folded into that part. Likewise what backward formulas scatter
into zeros (of ``gather`` and ``topk``, say): ``areAnyTensorSubclassLike`` makes them write anew under a mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowtide.graph.step_graph import FREE, RUN, Op, Storage


@dataclass(frozen=True)
class Step:
    """The parts of a graph that name storages."""

    storages: list[Storage]
    ops: list[Op]
    saved: list[int]
    events: list[tuple[int, int]]


def fold(step: Step, sums: Mapping[int, tuple[int, ...]]) -> Step:
    """The step as it is without a dispatch mode.

    Args:
        sums: Op id of each of the engine's own additions -> the storages it may add into, in the engine's order.
    """
    ops, events, stands_for = _folded(step.ops, step.events, sums, [s.bytes for s in step.storages])
    left = [s for s in step.storages if s.id not in stands_for]
    number = {s.id: i for i, s in enumerate(left)}
    number |= {gone: number[part] for gone, part in stands_for.items()}

    def renumbered(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number[s] for s in ids)

    return Step(
        [replace(s, id=i) for i, s in enumerate(left)],
        [replace(o, reads=renumbered(o.reads), makes=renumbered(o.makes), writes=renumbered(o.writes)) for o in ops],
        [number[s] for s in step.saved],
        [(kind, number[n]) if kind == FREE else (kind, n) for kind, n in events],
    )


def _folded(
    ops: list[Op], events: list[tuple[int, int]], sums: Mapping[int, tuple[int, ...]], sizes: list[int]
) -> tuple[list[Op], list[tuple[int, int]], dict[int, int]]:
    """Ops and events without the sums' storages, and which storage stands for each of those."""
    stands_for: dict[int, int] = {}
    kept: list[tuple[int, int]] = []
    skipped: set[int] = set()
    ops = list(ops)
    for at, (kind, number) in enumerate(events):
        if at in skipped:
            continue
        if kind == FREE:
            kept.append((FREE, stands_for.get(number, number)))
            continue
        if kind == RUN:
            op = ops[number]
            reads = tuple(stands_for.get(s, s) for s in op.reads)
            ops[number] = op = replace(op, reads=reads, writes=tuple(stands_for.get(s, s) for s in op.writes))
            if number in sums and len(op.makes) == 1:
                dying = {}  # storage -> index of its FREE, among those right after the addition
                after = at + 1
                while after < len(events) and events[after][0] == FREE:
                    dying[stands_for.get(events[after][1], events[after][1])] = after
                    after += 1
                made = op.makes[0]
                for part in (stands_for.get(s, s) for s in sums[number]):
                    if part in dying and sizes[part] == sizes[made]:
                        stands_for[made] = part
                        skipped.add(dying[part])
                        ops[number] = replace(op, makes=(), writes=(part,))
                        break
        kept.append((kind, number))
    return ops, kept, stands_for
