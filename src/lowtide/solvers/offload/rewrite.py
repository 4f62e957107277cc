"""A step in which some storages are elsewhere between forward and backward, as a step graph that knows no tiers.

Everything that plans a step can then plan the rest of it. A moved storage is nothing that autograd stores any more:
Python holds it until its copy has settled, and what comes back is made in backward by an op that takes no time. Ops
that read it read what costs nothing, since a replay may fetch it. As long as nothing is replayed, memory is to the byte
what the judge says of the moves (``tests/test_search.py``); a replay that wants a moved storage before autograd does
makes it come back earlier, which only the judge sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from lowtide.graph.costs import Costs
from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import DROP, FREE, PACK, RELEASE, RUN, UNPACK, Op, StepGraph, Storage
from lowtide.plan import TIER_OF, Moves

FETCHED = "lowtide.fetch"


def without_offloaded(
    graph: StepGraph, costs: Costs, actions: Mapping[int, str], moves: Moves
) -> tuple[StepGraph, Costs]:
    """``graph`` and ``costs`` without what ``actions`` move; storages and ops keep their numbers, new ones follow."""
    return _Rewrite(graph, sorted(s for s, a in actions.items() if a in TIER_OF), moves).done(costs)


class _Rewrite:
    def __init__(self, graph: StepGraph, moved: list[int], moves: Moves) -> None:
        self.graph, self.moves = graph, moves
        storages, ops = list(graph.storages), list[Op]()
        self.back: dict[int, int] = {}  # moved storage -> what comes back
        self.fetch_of: dict[int, int] = {}
        fetches: list[Op] = []
        for s in moved:
            op = len(graph.ops) + len(fetches)
            self.back[s], self.fetch_of[s] = len(storages), op
            storages.append(Storage(len(storages), graph.storages[s].bytes, "backward", op))
            fetches.append(Op(op, FETCHED, 0, True, (), (self.back[s],)))
        for op_ in graph.ops:
            if not op_.backward and not self.back.keys().isdisjoint(op_.reads):
                op_ = replace(op_, reads=tuple(s for s in op_.reads if s not in self.back))
            ops.append(op_)
        self.saved = tuple(self.back.get(s, s) for s in graph.saved)
        self.events: list[tuple[int, int]] = []
        completed_by = step_facts(graph).completed_by
        self.sends_after: dict[int, list[int]] = {}
        for s in moved:
            maker = graph.storages[s].op
            assert maker is not None
            self.sends_after.setdefault(completed_by.get(maker, maker), []).append(s)
        self.storages, self.ops = tuple(storages), (*ops, *fetches)
        self.outgoing: deque[int] = deque()
        self.freed: set[int] = set()
        self.refs = dict.fromkeys(moved, 0)
        self.there: set[int] = set()
        self.due = deque(sorted((at, -s) for s, at in moves.fetch_at.items() if s in self.back))
        self.unpacks = 0

    def done(self, costs: Costs) -> tuple[StepGraph, Costs]:
        graph = self.graph
        for kind, number in graph.events:
            if kind == RUN:
                self.events.append((kind, number))
                for s in self.sends_after.get(number, ()):
                    self._send(s)
                continue
            storage = number if kind == FREE else graph.saved[number]
            if kind == UNPACK:
                self._asked()
            if storage not in self.back:
                self.events.append((kind, number))
            elif kind == FREE and storage in self.outgoing:
                self.freed.add(storage)
            elif kind == FREE:
                self.events.append((kind, number))
            else:
                self._refer(kind, storage)
        rewritten = replace(graph, storages=self.storages, ops=self.ops, saved=self.saved, events=tuple(self.events))
        return rewritten, replace(costs, op_ms=(*costs.op_ms, *(0.0,) * len(self.back)))

    def _send(self, storage: int) -> None:
        size = self.storages[storage].bytes
        while (
            self.outgoing and sum(self.storages[s].bytes for s in self.outgoing) + size > self.moves.max_inflight_bytes
        ):
            self._settle()
        self.outgoing.append(storage)

    def _settle(self) -> None:
        storage = self.outgoing.popleft()
        if storage in self.freed:
            self.events.append((FREE, storage))

    def _asked(self) -> None:
        while self.outgoing:
            self._settle()
        while self.due and self.due[0][0] <= self.unpacks:
            storage = -self.due.popleft()[1]
            if self.refs[storage] > 0:
                self._fetch(storage)
        self.unpacks += 1

    def _fetch(self, storage: int) -> None:
        if storage not in self.there:
            self.there.add(storage)
            self.events.append((RUN, self.fetch_of[storage]))

    def _refer(self, kind: int, storage: int) -> None:
        if kind == UNPACK:
            self._fetch(storage)
        self.refs[storage] += 1 if kind in (PACK, UNPACK) else -1
        if kind in (DROP, RELEASE) and self.refs[storage] == 0 and storage in self.there:
            self.there.discard(storage)
            self.events.append((FREE, self.back[storage]))
