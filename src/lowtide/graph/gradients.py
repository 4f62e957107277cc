"""One step with its parameters' gradients there beforehand, or made in backward: the two kinds of step of one training.

Autograd makes a gradient where the parameter has none (``zero_grad()`` has freed it), and adds to it where it has one
(a later micro-batch, ``set_to_none=False``). Forward is the same in both, and so is what a plan may decide.

Where ``zero_grad()`` comes between forward and backward, as in many loops and Lightning's, a step is a third kind: the
gradients of the last one are there in forward, and gone in backward.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import FREE, GONE_GRADIENT, NEW_GRADIENT, RUN, StepGraph, Storage

_GONE = "a gradient from before the step"  # why nothing may save or make it again


@once_per_graph
def with_gradients_before(graph: StepGraph) -> StepGraph:
    """The step where every gradient is there before: what backward makes is added to it, and goes."""
    graph = _without_gone(graph)
    return with_these_before(graph, {s.id for s in graph.storages if s.kind == NEW_GRADIENT})


@once_per_graph
def with_gradients_gone(graph: StepGraph) -> StepGraph:
    """The step that lets go of all gradients from before it, and makes as many."""
    made = with_gradients_made(graph)
    return with_gone_in_step(made, [s.bytes for s in made.storages if s.kind == NEW_GRADIENT])


def with_gone_in_step(graph: StepGraph, sizes: Iterable[int]) -> StepGraph:
    """The step that begins with gradients of these bytes and lets go of them before its backward.

    They count as made by the first op, which never makes them again, and freed after the last op before backward.
    """
    runs = [at for at, (kind, _) in enumerate(graph.events) if kind == RUN]
    backward = next((n for n, at in enumerate(runs) if graph.ops[graph.events[at][1]].backward), 0)
    if not backward:  # no op before it
        return graph
    ops, first, place = list(graph.ops), len(graph.storages), graph.events[runs[0]][1]
    output = len(ops[place].makes)
    gone = tuple(Storage(first + n, size, GONE_GRADIENT, place, output + n, _GONE) for n, size in enumerate(sizes))
    ops[place] = replace(ops[place], makes=(*ops[place].makes, *(s.id for s in gone)))
    after = runs[backward - 1] + 1
    freed = tuple((FREE, s.id) for s in gone)
    return replace(
        graph,
        storages=(*graph.storages, *gone),
        ops=tuple(ops),
        events=(*graph.events[:after], *freed, *graph.events[after:]),
    )


def _without_gone(graph: StepGraph) -> StepGraph:
    """The step that does not begin with gradients which go in it."""
    gone = {s.id for s in graph.storages if s.kind == GONE_GRADIENT}
    if not gone:
        return graph
    assert min(gone) == len(graph.storages) - len(gone)  # the last ones: other numbers stay as they are
    return replace(
        graph,
        storages=graph.storages[: -len(gone)],
        ops=tuple(replace(op, makes=tuple(s for s in op.makes if s not in gone)) for op in graph.ops),
        events=tuple(event for event in graph.events if event[0] != FREE or event[1] not in gone),
    )


def with_these_before(graph: StepGraph, new: Collection[int]) -> StepGraph:
    """The step where these gradients, which backward makes, are there before."""
    if not new:
        return graph
    freed = _freed_once_complete(graph, new)
    first = len(graph.storages)
    there = [Storage(first + n, graph.storages[s].bytes, "gradient") for n, s in enumerate(sorted(new))]
    return replace(freed, storages=(*freed.storages, *there))


def _freed_once_complete(graph: StepGraph, gradients: Collection[int]) -> StepGraph:
    """The step that lets go of these gradients, which backward makes, after the last op on each."""
    freed = defaultdict(list)
    for storage, op in _last_ops(graph, gradients).items():
        freed[RUN, op].append((FREE, storage))
    return replace(
        graph,
        storages=tuple(replace(s, kind="backward") if s.id in gradients else s for s in graph.storages),
        events=tuple(e for event in graph.events for e in (event, *freed.get(event, ()))),
    )


def _last_ops(graph: StepGraph, storages: Collection[int]) -> dict[int, int]:
    """By storage: the last op that makes, reads or writes it."""
    return {s: op.id for op in graph.ops for s in (*op.makes, *op.reads, *op.writes) if s in storages}


def with_part_of_gradients(graph: StepGraph, part_bytes: int) -> StepGraph:
    """The step of a rank that keeps ``part_bytes`` of all gradients: of each that is made a part stays."""
    made = {s.id: s for s in graph.storages if s.kind == NEW_GRADIENT}
    all_bytes = sum(s.bytes for s in made.values())
    if not made or part_bytes == all_bytes:
        return graph
    later = with_gradients_before(graph)
    storages, ops = list(later.storages), list(later.ops)
    kept_bytes = sum_bytes = 0
    for storage, at in _last_ops(graph, made).items():
        sum_bytes += made[storage].bytes
        size = part_bytes * sum_bytes // all_bytes - kept_bytes
        kept_bytes += size
        storages.append(Storage(len(storages), size, NEW_GRADIENT, at, len(ops[at].makes)))
        ops[at] = replace(ops[at], makes=(*ops[at].makes, len(storages) - 1))
    kept = graph.resident["gradients"] - all_bytes + kept_bytes
    return replace(
        later, storages=tuple(storages), ops=tuple(ops), resident=graph.resident | {"gradients": kept}
    )  # fmt: skip


def with_gradients_stepped(graph: StepGraph, temporary_share: float) -> StepGraph:
    """The step whose backward uses each gradient as soon as it is complete, and frees it.

    Args:
        temporary_share: Of a gradient's bytes, what its use takes for a moment.
    """
    made = {s.id for s in graph.storages if s.kind == NEW_GRADIENT}
    ops = list(graph.ops)
    for storage, at in _last_ops(graph, made).items():
        moment = int(temporary_share * graph.storages[storage].bytes)
        ops[at] = replace(ops[at], workspace_bytes=max(ops[at].workspace_bytes, moment))
    left = graph.resident["gradients"] - sum(graph.storages[s].bytes for s in made)
    freed = _freed_once_complete(graph, made)
    return replace(freed, ops=tuple(ops), resident=graph.resident | {"gradients": left})


def gradient_bytes_at(graph: StepGraph, event: int) -> int:
    """Bytes of gradients that are there when event number ``event`` of the step happens."""
    ran = {number for kind, number in graph.events[: event + 1] if kind == RUN}
    made = sum(s.bytes for s in graph.storages if s.kind == NEW_GRADIENT and s.op in ran)
    return graph.before["gradients"] + made


@once_per_graph
def with_gradients_made(graph: StepGraph) -> StepGraph:
    """The step where no gradient is there before: what would be added to it first becomes it.

    As autograd does it: a tensor of the gradient's size is taken over as it is, a part of a larger one is copied.
    """
    graph = _without_gone(graph)
    storages, ops = list(graph.storages), list(graph.ops)
    made: set[int] = set()
    kept: set[int] = set()
    for op in graph.ops:
        for gradient in op.writes:
            if graph.storages[gradient].kind != "gradient" or gradient in made:
                continue
            made.add(gradient)
            size = graph.storages[gradient].bytes
            added = next((s for s in op.reads if graph.storages[s].kind == "backward"), None)
            if added is not None and graph.storages[added].bytes == size and added not in kept:
                kept.add(added)
                storages[added] = replace(storages[added], kind=NEW_GRADIENT)
            else:
                makes = ops[op.id].makes
                storages.append(Storage(len(storages), size, NEW_GRADIENT, op.id, len(makes)))
                ops[op.id] = replace(ops[op.id], makes=(*makes, len(storages) - 1))
    if not made:
        return graph
    return replace(
        graph,
        storages=tuple(storages),
        ops=tuple(ops),
        events=tuple(event for event in graph.events if event[0] != FREE or event[1] not in kept),
    )
