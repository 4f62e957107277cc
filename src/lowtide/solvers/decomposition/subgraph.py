"""One segment of a step as a step graph of its own, so that everything that plans a step can plan a segment.

The subgraph has the segment's forward ops, the backward ops of its window, and the events of both. What other segments
hold meanwhile is *outside* memory: storages that an added op makes where a window begins and that die when the real
ones do. So, as long as every other segment saves everything, memory inside the windows is the whole step's to the byte,
and changes of memory by a segment's actions add up over segments. Consecutive segments can be one subgraph.

A storage that another segment's backward asks for, or that outlives its own segment's backward, is fixed as saved. An
activation that another segment makes and autograd does not store may be kept for replays; its bytes then count here.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import FREE, Frame, Op, StepGraph, Storage
from lowtide.solvers.decomposition.segments import Windows
from lowtide.solvers.search_context import SearchContext

_NEVER = 1 << 60
OUTSIDE = "outside"
IMPORTED = "made by another segment"


class SubgraphContent(NamedTuple):
    """A segment in plain numbers: equal for segments that differ in outside memory alone; those have the same plans."""

    storages: tuple[tuple[int, str, str], ...]  # bytes (0 for what stays outside all through a window), kind, why fixed
    ops: tuple[tuple, ...]  # name, backward, reads, makes, workspace bytes, generator bytes, completes_inplace
    op_ms: tuple[float, ...]
    saved: tuple[int, ...]
    events: tuple[tuple[int, int], ...]
    # Near the end of the forward pass, where Python still holds what it holds for longer than a segment (autocast's
    # copies of weights).
    forward_end: int
    backward_start: int  # event at which the other segments' forward and backward would run
    backward: int  # event at which the segment's own backward begins


@dataclass(frozen=True)
class Subgraph:
    """A segment, or consecutive segments taken together."""

    content: SubgraphContent
    num_own: int  # how many storages, the first ones, the segment makes
    outside_bytes: tuple[int, int]  # what others hold all through the forward window, and all through the backward one
    step: SearchContext

    @property
    def forward_end(self) -> int:
        return self.content.forward_end

    @property
    def backward_start(self) -> int:
        return self.content.backward_start

    @cached_property
    def context(self) -> SearchContext:
        """The subgraph as a step of its own."""
        ops = [
            Op(i, name, 0, backward, reads, makes, workspace_bytes=size, rng_bytes=rng, completes_inplace=completes)
            for i, (name, backward, reads, makes, size, rng, completes) in enumerate(self.content.ops)
        ]
        made: dict[int, tuple[int | None, int]] = {s: (o.id, output) for o in ops for output, s in enumerate(o.makes)}
        rests = dict(zip((o.makes[-1] for o in ops if o.name == OUTSIDE), self.outside_bytes, strict=True))
        storages = []
        for i, (size, kind, fixed) in enumerate(self.content.storages):
            op, output = made.get(i, (None, 0))
            storages.append(Storage(i, rests.get(i, size), kind, op, output, fixed))
        step = self.step.graph
        graph = StepGraph(
            device=step.device, device_name=step.device_name, resident=step.before, signatures=(),
            frames=(Frame(-1, "", 0),), storages=tuple(storages), ops=tuple(ops), saved=self.content.saved,
            events=self.content.events,
        )  # fmt: skip
        return SearchContext(graph, replace(self.step.costs, op_ms=self.content.op_ms))


class SubgraphSource:
    """What building subgraphs of one step needs to know of it."""

    def __init__(self, context: SearchContext, segment_of: dict[int, int], windows: list[Windows]) -> None:
        self.context, self.graph = context, context.graph
        self.segment_of, self.windows = segment_of, windows
        self.ops_of: list[list[int]] = [[] for _ in windows]
        for op, segment in segment_of.items():
            self.ops_of[segment].append(op)
        self.facts = facts = step_facts(self.graph)
        self.born, self.events_of = facts.birth, facts.references
        self.dies = {s: facts.references[s][-1] if s in facts.death else _NEVER for s in facts.birth}

    def window(self, segments: range) -> Windows:
        """The windows of ``segments`` taken together."""
        first, last = self.windows[segments.start], self.windows[segments.stop - 1]
        return Windows((first.forward[0], last.forward[1]), (last.backward[0], first.backward[1]))

    def storages_of(self, segments: range) -> tuple[list[int], list[int]]:
        """What ops of ``segments`` make, and its imports: unstored activations of others that it reads and may keep.

        Both in the order in which the subgraph has them.
        """
        own = [s for segment in segments for op in self.ops_of[segment] for s in self.graph.ops[op].makes]
        read = (s for segment in segments for s in self._imports[segment])
        return own, list(dict.fromkeys(s for s in read if self._maker_segment(s) not in segments))

    @cached_property
    def _imports(self) -> list[list[int]]:
        """By segment."""
        graph, found = self.graph, []
        for segment, ops in enumerate(self.ops_of):
            read = dict.fromkeys(s for op in ops for s in graph.ops[op].reads if s not in graph.stored)
            others = [s for s in read if self._maker_segment(s) not in (None, segment)]
            found.append([s for s in others if graph.storages[s].kind == "activation"])
        return found

    def _maker_segment(self, storage: int) -> int | None:
        op = self.graph.storages[storage].op
        return None if op is None else self.segment_of.get(op, -1)

    def why_saved(self, storage: int, segments: range) -> str:
        """Why segments outside ``segments`` need ``storage`` saved; "" if they do not."""
        window = self.window(segments)
        if any(self.segment_of.get(op) not in segments for op in self.facts.readers.get(storage, ())):
            return "read by another segment" if storage in self.graph.stored else ""
        asked = self.facts.first_use.get(storage, window.backward[0])
        if not window.backward[0] <= asked < window.backward[1]:
            return "asked for by another segment"
        # Python may hold it a little into later segments' forward: seldom a binding moment, and the simulator sees it.
        if any(at >= window.backward[1] for at in self.events_of.get(storage, ())):
            return "outlives its segment"
        return ""

    def outside_bytes(self, segments: range) -> tuple[int, int]:
        """What others hold all through the forward window of ``segments``, and all through its backward window."""
        own, imports = self.storages_of(segments)
        window = self.window(segments)
        return self.surviving_bytes(window.forward, own, imports), self.surviving_bytes(window.backward, own, imports)

    def surviving_bytes(self, window: tuple[int, int], own: Iterable[int], imports: Iterable[int]) -> int:
        """What lives all through ``window`` and is neither ``own`` nor among ``imports``."""
        storages = self.graph.storages
        mine = [s for s in (*own, *imports) if self.born[s] < window[0] <= self.dies[s]]
        return self.alive_bytes[window[0]] - sum(storages[s].bytes for s in {*self.dying_in(window), *mine})

    @cached_property
    def backward_start(self) -> int:
        return self.windows[-1].forward[1]

    @cached_property
    def forward_end(self) -> int:
        """Event in the last segment's forward window where Python frees what is older than the segment before it."""
        begin, end = self.windows[-1].forward
        older = {s for ops in self.ops_of[:-2] for op in ops for s in self.graph.ops[op].makes}
        events = self.graph.events[begin:end]
        return begin + next((i for i, (kind, s) in enumerate(events) if kind == FREE and s in older), len(events))

    @cached_property
    def _starts(self) -> list[int]:
        """Where each window begins; the windows together have all events."""
        return sorted({w.forward[0] for w in self.windows} | {w.backward[0] for w in self.windows})

    @cached_property
    def alive_bytes(self) -> dict[int, int]:
        """Made in the step and alive where each window begins, by that event."""
        change = np.zeros(len(self.graph.events) + 1, dtype=np.int64)
        for storage, at in self.born.items():
            change[at + 1] += self.graph.storages[storage].bytes
            if self.dies[storage] < _NEVER:
                change[self.dies[storage] + 1] -= self.graph.storages[storage].bytes
        live = np.cumsum(change)
        return {start: int(live[start]) for start in self._starts}

    @cached_property
    def _dying_in(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {start: [] for start in self._starts}
        for storage in sorted(self.born, key=self.born.__getitem__):
            if self.dies[storage] < _NEVER:
                start = self._starts[bisect_right(self._starts, self.dies[storage]) - 1]
                if self.born[storage] < start:
                    found[start].append(storage)
        return found

    def dying_in(self, window: tuple[int, int]) -> list[int]:
        """Storages that are alive where ``window`` begins and not where it ends, by birth."""
        begins = self._starts[bisect_left(self._starts, window[0]) : bisect_left(self._starts, window[1])]
        found = [s for begin in begins for s in self._dying_in[begin] if self.born[s] < window[0]]
        return sorted(found, key=self.born.__getitem__) if len(begins) > 1 else found
