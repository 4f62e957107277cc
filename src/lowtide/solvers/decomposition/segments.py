"""Segments: contiguous runs of forward ops, mostly one layer each, and the windows of the step that are theirs.

A segment is the unit of what the exact method solves at once, and how far back a replay reaches is counted in them.
"""

from dataclasses import dataclass
from itertools import groupby, pairwise

from lowtide.graph.facts import step_facts
from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import PACK, RUN, UNPACK, StepGraph
from lowtide.solvers import tuning
from lowtide.solvers.graph_queries import layers, ops_worth_replaying


@dataclass(frozen=True)
class Windows:
    """The events of one segment: ``[begin, end)`` in forward, and in backward."""

    forward: tuple[int, int]
    backward: tuple[int, int]


@once_per_graph
def segments(graph: StepGraph) -> dict[int, int]:
    """Segment of each forward op: runs of a layer; those with few ops worth replaying join the run before."""
    layer_of, worth = layers(graph), set(ops_worth_replaying(graph))
    runs = [[op.id for op in run] for _, run in groupby(graph.forward_ops, lambda op: layer_of.get(op.id))]
    for run, following in pairwise(runs):
        # A norm at the end of a layer belongs with its readers: they can all be replayed from what it reads.
        while len(run) > 1 and _ends_what_it_could_begin(graph, run[-1]):
            following.insert(0, run.pop())
    segment_of: dict[int, int] = {}
    segment = size = 0
    for run in runs:
        if size >= tuning.SMALL_SEGMENT_OPS:
            segment, size = segment + 1, 0
        size += len(worth.intersection(run))
        segment_of.update(dict.fromkeys(run, segment))
    return segment_of


def _ends_what_it_could_begin(graph: StepGraph, op: int) -> bool:
    """Whether ``op`` makes nothing, or makes it from one stored activation alone."""
    read = {s for s in graph.ops[op].reads if graph.storages[s].op is not None}
    return not graph.ops[op].makes or (len(read) == 1 and read <= graph.stored)


def windows(graph: StepGraph, segment_of: dict[int, int]) -> list[Windows] | None:
    """The windows of every segment, in order; None where forward and backward take turns.

    A segment's backward begins when the first thing that it packed is unpacked. Backward walks segments from the last
    to the first; what it unpacks of later segments counts to the segment it has come to.
    """
    count, backward_start = max(segment_of.values(), default=0) + 1, step_facts(graph).backward_start
    forward = [backward_start] * count
    backward = [len(graph.events)] * count
    packed_in: dict[int, int] = {}
    segment, reached = 0, count
    for at, (kind, number) in enumerate(graph.events):
        if kind == RUN and not graph.ops[number].backward:
            if at >= backward_start:
                return None
            segment = segment_of[number]
            forward[segment] = min(forward[segment], at)
        elif kind == PACK:
            packed_in[number] = segment
        elif kind == UNPACK and packed_in.get(number, 0) < reached:
            for passed in range(packed_in.get(number, 0), reached):
                backward[passed] = at
            reached = packed_in.get(number, 0)
    if count:
        forward[0] = 0
        backward[count - 1] = backward_start
    forward.append(backward_start)
    backward.insert(0, len(graph.events))
    return [Windows((forward[i], forward[i + 1]), (backward[i + 1], backward[i])) for i in range(count)]
