"""A step with offloaded storages, rewritten as a step graph without tiers, so that any solver can plan the rest.

- An offloaded storage is no longer a saved tensor. Python holds it until its copy has settled, and a backward op that
  takes no time makes what comes back.
- Ops that read an offloaded storage no longer read it: a replay can fetch it.

Without replays the rewritten step has exactly the memory that the simulator gives the original one
(tests/solvers/offload/test_search.py). Known weakness: a replay may fetch an offloaded storage before autograd needs
it; only the simulator sees that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import DROP, FREE, PACK, RELEASE, RUN, UNPACK, Op, StepGraph, Storage
from lowtide.plan import TIER_OF, Moves
from lowtide.simulation.transfer_queue import TransferQueue
from lowtide.solvers.search_context import SearchContext

FETCH_OP = "lowtide.fetch"


def rewrite_without_tiers(context: SearchContext, actions: Mapping[int, str], moves: Moves) -> SearchContext:
    """The step of ``context`` with what ``actions`` offload taken out.

    Storages and ops keep their numbers; what is fetched, and the ops that fetch it, get the numbers that follow.
    """
    graph, costs = context.graph, context.costs
    offloaded = sorted(s for s, a in actions.items() if a in TIER_OF)
    fetched = {s: len(graph.storages) + i for i, s in enumerate(offloaded)}
    fetch_op = {s: len(graph.ops) + i for i, s in enumerate(offloaded)}
    storages = [Storage(fetched[s], graph.storages[s].bytes, "backward", fetch_op[s]) for s in offloaded]
    fetches = [Op(fetch_op[s], FETCH_OP, 0, True, (), (fetched[s],)) for s in offloaded]
    ops = [
        op
        if op.backward or fetched.keys().isdisjoint(op.reads)
        else replace(op, reads=tuple(s for s in op.reads if s not in fetched))
        for op in graph.ops
    ]
    rewritten = replace(
        graph,
        storages=(*graph.storages, *storages),
        ops=(*ops, *fetches),
        saved=tuple(fetched.get(s, s) for s in graph.saved),
        events=tuple(_Events(graph, fetched, fetch_op, moves).rewritten()),
        retained_backwards=(),  # fetches would be among their ops
    )
    longer = replace(costs, op_ms=(*costs.op_ms, *(0.0,) * len(fetches)))
    return SearchContext(rewritten, longer, context.limits)


class _Events:
    """The events of the rewritten step."""

    def __init__(self, graph: StepGraph, fetched: Mapping[int, int], fetch_op: Mapping[int, int], moves: Moves) -> None:
        self.graph, self.fetched, self.fetch_op = graph, fetched, fetch_op
        self.events: list[tuple[int, int]] = []
        self.inflight: set[int] = set()
        self.freed_inflight: set[int] = set()  # Python let go of them before their copy settled
        self.handles = dict.fromkeys(fetched, 0)
        self.present: set[int] = set()  # fetched and not freed yet
        fetch_at = {s: at for s, at in moves.fetch_at.items() if s in fetched}
        self.queue = TransferQueue(moves.max_inflight_bytes, fetch_at)

    def rewritten(self) -> list[tuple[int, int]]:
        graph = self.graph
        completed_by = step_facts(graph).completed_by
        complete_after: dict[int, list[int]] = {}
        for s in self.fetched:
            maker = graph.storages[s].op
            assert maker is not None
            complete_after.setdefault(completed_by.get(maker, maker), []).append(s)
        for kind, number in graph.events:
            if kind == RUN:
                self.events.append((kind, number))
                for s in complete_after.get(number, ()):
                    self._settle(self.queue.send(s, graph.storages[s].bytes))
                    self.inflight.add(s)
                continue
            storage = number if kind == FREE else graph.saved[number]
            if kind == UNPACK:
                due = self.queue.on_unpack()
                self._settle(due.settle)
                for s in due.fetch:
                    if self.handles[s] > 0:
                        self._fetch(s)
            if storage in self.fetched and kind != FREE:
                self._count_handle(kind, storage)
            elif storage in self.inflight:
                self.freed_inflight.add(storage)
            else:
                self.events.append((kind, number))
        return self.events

    def _settle(self, storages: Sequence[int]) -> None:
        for storage in storages:
            self.inflight.remove(storage)
            if storage in self.freed_inflight:
                self.events.append((FREE, storage))

    def _fetch(self, storage: int) -> None:
        if storage not in self.present:
            self.present.add(storage)
            self.events.append((RUN, self.fetch_op[storage]))

    def _count_handle(self, kind: int, storage: int) -> None:
        if kind == UNPACK:
            self._fetch(storage)
        self.handles[storage] += 1 if kind in (PACK, UNPACK) else -1
        if kind in (DROP, RELEASE) and self.handles[storage] == 0 and storage in self.present:
            self.present.remove(storage)
            self.events.append((FREE, self.fetched[storage]))
