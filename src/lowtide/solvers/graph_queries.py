"""What every solver asks of a graph: what may be recomputed, what a choice drags along, which layers repeat."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from lowtide.graph.facts import step_facts
from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import Op, StepGraph
from lowtide.graph.writes import ops_written_under
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.simulation.references import graph_index

_MOST = 0.67  # of a container's ops in one entry: then its entries are parts, not layers that repeat


@once_per_graph
def taped_ops(graph: StepGraph) -> tuple[Op, ...]:
    """The forward ops that run before the last backward begins, in program order: those that a plan knows."""
    run_event, last_backward = step_facts(graph).run_event, graph_index(graph).backward_start
    return tuple(op for op in graph.forward_ops if run_event[op.id] < last_backward)


@once_per_graph
def replayable_ops(graph: StepGraph) -> frozenset[int]:
    """Forward ops that a replay may run: what they read is as it was, some output is free to go.

    What runs once the last backward has begun is not taped, nor what runs outside the model after the first one.
    """
    facts = step_facts(graph)
    lasting = {s.id for s in graph.storages if s.kind == "activation" or (s.op is None and not s.fixed)}
    free = {s.id for s in graph.storages if s.kind == "activation" and not s.fixed}
    written = ops_written_under(graph)
    return frozenset(
        op.id
        for op in taped_ops(graph)
        if lasting.issuperset(op.reads)
        and not free.isdisjoint(op.makes)
        and op.id not in written
        and (op.frame or facts.run_event[op.id] < facts.first_backward_run)
    )


@once_per_graph
def recomputable(graph: StepGraph) -> frozenset[int]:
    """Storages that a plan may recompute."""
    ops = replayable_ops(graph)
    return frozenset(
        s.id for s in graph.storages if s.kind == "activation" and s.op is not None and not s.fixed and s.op in ops
    )


@once_per_graph
def droppable(graph: StepGraph) -> frozenset[int]:
    """Storages that autograd stores, that backward asks for, and that a plan may recompute."""
    return frozenset(graph.stored & recomputable(graph) & step_facts(graph).first_use.keys())


@once_per_graph
def movable(graph: StepGraph) -> frozenset[int]:
    """Storages that a plan may move: made in forward, stored, asked for by backward, and written by nobody since.

    One of no bytes is none: what an op on an accelerator makes on the host counts as that.
    """
    free = (graph.storages[s] for s in graph.stored & step_facts(graph).first_use.keys())
    return frozenset(s.id for s in free if s.kind == "activation" and not s.fixed and s.bytes)


@once_per_graph
def stored_at_backward_start(graph: StepGraph) -> frozenset[int]:
    """Storages made in forward that autograd has stored when the first backward op runs."""
    facts = step_facts(graph)
    start = facts.first_backward_run
    held = (n for n, at in facts.packed.items() if at < start and facts.released.get(n, start) >= start)
    return graph.stored.intersection(graph.saved[n] for n in held)


@once_per_graph
def ops_worth_replaying(graph: StepGraph) -> list[int]:
    """Replayable ops that lead to something droppable, in program order."""
    readers, replayable = step_facts(graph).readers, replayable_ops(graph)
    free, wanted = recomputable(graph), droppable(graph)
    worth: set[int] = set()
    for op in reversed(graph.forward_ops):
        outputs = [s for s in op.makes if s in free]
        if op.id in replayable and any(s in wanted or not worth.isdisjoint(readers.get(s, ())) for s in outputs):
            worth.add(op.id)
    return sorted(worth)


def complete_actions(graph: StepGraph, recomputed: Iterable[int], kept: Iterable[int] = ()) -> dict[int, str]:
    """Actions that make ``recomputed`` possible: each read of a replayed op is saved or recomputed itself.

    Args:
        recomputed: Stored storages to recompute; those that may not be are saved.
        kept: Storages at which replays stop although autograd does not store them.

    Returns:
        One action per stored storage and per storage that only replays need, by ascending id.
    """
    free, kept = recomputable(graph), frozenset(kept)
    actions = dict.fromkeys(graph.stored, SAVE)
    wanted = [s for s in recomputed if s in free]
    actions.update(dict.fromkeys(wanted, RECOMPUTE))
    while wanted:
        maker = graph.storages[wanted.pop()].op
        assert maker is not None
        for read in graph.ops[maker].reads:
            if graph.storages[read].op is None or read in actions:
                continue
            actions[read] = SAVE if read in kept or read not in free else RECOMPUTE
            if actions[read] == RECOMPUTE:
                wanted.append(read)
    return dict(sorted(actions.items()))


def choices(graph: StepGraph, actions: Mapping[int, str]) -> tuple[list[int], list[int]]:
    """What ``complete_actions`` makes ``actions`` of: stored storages recomputed, and unstored ones kept."""
    recomputed = [s for s, action in actions.items() if action == RECOMPUTE and s in graph.stored]
    return recomputed, [s for s, action in actions.items() if action == SAVE and s not in graph.stored]


@once_per_graph
def layers(graph: StepGraph) -> dict[int, int]:
    """Layer number of each forward op that runs inside a repeated layer; numbers follow the first run.

    A layer is one call of an entry of the outermost container that repeats: it has two entries or more, counting
    second and later calls, and none of them holds most of its ops. (``model.layers.3.mlp`` belongs to entry 3 of
    ``model.layers``; a ``Sequential`` of an embedding and an encoder is no stack of layers, the encoder's own is.)
    """
    entries_of = {frame: _entries(graph, frame) for frame in {op.frame for op in graph.forward_ops}}
    candidates = {op.id: entries_of[op.frame] for op in graph.forward_ops}
    sizes: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
    for entries in candidates.values():
        for container, entry in entries:
            sizes[container][entry] += 1
    stacks = {c for c, entries in sizes.items() if max(entries.values()) <= _MOST * entries.total()}
    numbers: dict[tuple[str, int], int] = {}
    layer_of = {}
    for op, entries in candidates.items():
        repeated = [entry for container, entry in entries if container in stacks]
        if repeated:
            layer_of[op] = numbers.setdefault(repeated[0], len(numbers))
    return layer_of


def _entries(graph: StepGraph, frame: int) -> list[tuple[str, tuple[str, int]]]:
    """``(container, (entry, call))`` from the outermost to the innermost, for the frame and all around it."""
    chain = [frame]
    while chain[-1] > 0 and graph.frames[chain[-1]].parent not in (-1, chain[-1]):
        chain.append(graph.frames[chain[-1]].parent)
    found: dict[str, tuple[str, tuple[str, int]]] = {}
    for number in reversed(chain):
        parts = graph.frames[number].path.split(".")
        for depth, part in enumerate(parts):
            entry = ".".join(parts[: depth + 1])
            if part.isdigit() and entry not in found:
                # The frame of the entry itself tells its calls apart; of a container that is never called, its parent.
                call = number if depth == len(parts) - 1 else max(graph.frames[number].parent, 0)
                found[entry] = (".".join(parts[:depth]), (entry, call))
    return list(found.values())


def repeated_layers(graph: StepGraph, method: str) -> dict[int, int]:
    """``layers``, for a method that cannot do without.

    Raises:
        ValueError: no layer repeats.
    """
    found = layers(graph)
    if not found:
        raise ValueError(f'method={method!r} needs repeated layers and this model has none. Use method="exact".')
    return found


@once_per_graph
def read_by_forward(graph: StepGraph) -> dict[int, list[int]]:
    """``StepFacts.readers`` without ops of a backward that creates a graph: they are given what autograd stores."""
    facts = step_facts(graph)
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, found in facts.unpack_spans.items():
        spans[graph.saved[number]] += found

    def is_given(storage: int, op: int) -> bool:
        return any(first < facts.run_event[op] < last for first, last in spans.get(storage, ()))

    return {s: [op for op in ops if not is_given(s, op)] for s, ops in facts.readers.items()}


def checkpoint(graph: StepGraph, segment_of: dict[int, int], keep: Iterable[int] = ()) -> dict[int, str]:
    """Actions that recompute what is made inside a segment, except ``keep`` and what an op outside the segment reads.

    Args:
        segment_of: Segment of each checkpointed forward op; ops without one run plainly.
    """
    kept = set(keep)
    for storage, ops in read_by_forward(graph).items():
        maker = graph.storages[storage].op
        if maker is not None and any(segment_of.get(op) != segment_of.get(maker) for op in ops):
            kept.add(storage)
    inside = {s for op in segment_of for s in graph.ops[op].makes}
    return complete_actions(graph, sorted((inside - kept) & graph.stored), kept)
