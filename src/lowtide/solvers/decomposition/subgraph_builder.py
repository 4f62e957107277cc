"""Builds the subgraph of consecutive segments: its storages, ops and events, and storages for what others hold."""

from collections.abc import Iterable
from itertools import groupby

from lowtide.graph.step_graph import FREE, RUN, Op
from lowtide.solvers.decomposition.subgraph import IMPORTED, OUTSIDE, Subgraph, SubgraphContent, SubgraphSource


def build_subgraph(source: SubgraphSource, segments: range) -> Subgraph:
    """The subgraph of ``segments`` taken together."""
    return _SubgraphBuilder(source, segments).subgraph()


class _SubgraphBuilder:
    """The subgraph so far; ``subgraph`` finishes it."""

    def __init__(self, source: SubgraphSource, segments: range) -> None:
        self.source, self.segments = source, segments
        self.graph, self.window = source.graph, source.window(segments)
        self.storages: list[tuple[int, str, str]] = []
        self.ids: dict[int, int] = {}  # of storages: in the step's graph -> in the subgraph
        self.ops: list[tuple] = []
        self.op_ms: list[float] = []
        self.events: list[tuple[int, int]] = []
        self.saved: list[int] = []
        self.saved_ids: dict[int, int] = {}
        self.op_ids: dict[int, int] = {}
        self.proxies: dict[str, int] = {}  # one storage for all that may be read and costs nothing, one for the rest
        self.step_ids: list[int] = []  # of the first storages: the segment's own, then imports

    def subgraph(self) -> Subgraph:
        graph, source = self.graph, self.source
        ops = [op for segment in self.segments for op in source.ops_of[segment]]
        own, imports = source.storages_of(self.segments)
        imported = set(imports)
        for s in (*own, *imports):
            storage = graph.storages[s]
            fixed = storage.fixed or (IMPORTED if s in imported else source.why_saved(s, self.segments))
            self._add(s, storage.bytes, storage.kind, fixed)
            self.step_ids.append(s)
        forward_bytes = self._add_outside(self.window.forward, own, imports)
        self._copy_events(self.window.forward, ops)
        self._free_outside(self.window.forward, skip={*own, *imports})
        forward_end = max(source.forward_end, self.window.forward[1])
        self._copy_events((self.window.forward[1], forward_end), ())
        self._forward_end = len(self.events)
        self._copy_events((forward_end, source.backward_start), ())
        backward_start = len(self.events)
        self._copy_events((source.backward_start, self.window.backward[0]), ())
        backward = len(self.events)
        backward_bytes = self._add_outside(self.window.backward, [*own, *imports], [])
        runs = [number for kind, number in graph.events[slice(*self.window.backward)] if kind == RUN]
        self._copy_events(self.window.backward, [op for op in runs if graph.ops[op].backward])
        self._free_outside(self.window.backward, skip={*own, *imports})
        self._copy_events((self.window.backward[1], len(graph.events)), ())
        self._sort_frees()
        content = SubgraphContent(
            tuple(self.storages), tuple(self.ops), tuple(self.op_ms), tuple(self.saved), tuple(self.events),
            self._forward_end, backward_start, backward,
        )  # fmt: skip
        return Subgraph(content, len(own), (forward_bytes, backward_bytes), source.context)

    def _add(self, step_id: int | None, size: int, kind: str, fixed: str = "") -> int:
        number = len(self.storages)
        self.storages.append((size, kind, fixed))
        if step_id is not None:
            self.ids[step_id] = number
        return number

    def _add_outside(self, window: tuple[int, int], own: list[int], imports: list[int]) -> int:
        """Add an op that makes what others hold where ``window`` begins; return the bytes that stay throughout."""
        source, storages = self.source, self.graph.storages
        mine = {*own, *imports}
        makes = []
        others = [s for s in source.dying_in(window) if s not in mine and storages[s].bytes]
        alive = [s for s in imports if source.born[s] < window[0] <= source.dies[s]]
        for s in sorted([*others, *alive], key=source.born.__getitem__):
            makes.append(self.ids[s] if s in mine else self._add(s, storages[s].bytes, "backward"))
        self.remainder = self._add(None, 0, "backward")
        makes.append(self.remainder)
        self._add_run((OUTSIDE, window[0] >= source.backward_start, (), tuple(makes), 0, 0, None), 0.0)
        return source.surviving_bytes(window, own, imports)

    def _free_outside(self, window: tuple[int, int], skip: set[int]) -> None:
        self.events.append((FREE, self.remainder))
        for s in [s for s in self.ids if s not in skip]:
            if self.source.dies[s] >= window[1]:
                self.events.append((FREE, self.ids[s]))
            del self.ids[s]

    def _add_run(self, op: tuple, ms: float) -> None:
        self.events.append((RUN, len(self.ops)))
        self.ops.append(op)
        self.op_ms.append(ms)

    def _copy_events(self, span: tuple[int, int], ops: Iterable[int]) -> None:
        """Copy the events in ``span`` of storages that the subgraph has; of all ops only ``ops`` run."""
        graph, dies = self.graph, self.source.dies
        runs, mine = set(ops), len(self.step_ids)
        for at in range(*span) if runs else self._reference_events(span):
            kind, number = graph.events[at]
            if kind == RUN:
                if number in runs:
                    self._copy_op(graph.ops[number])
                continue
            storage = number if kind == FREE else graph.saved[number]
            own_id = self.ids.get(storage)
            if own_id is None:
                continue
            if own_id >= mine:  # outside, and what backward makes: one free when the last reference goes
                if dies[storage] == at:
                    self.events.append((FREE, own_id))
            elif kind == FREE:
                self.events.append((FREE, own_id))
            elif self.storages[own_id][2] != IMPORTED:
                if number not in self.saved_ids:
                    self.saved_ids[number] = len(self.saved)
                    self.saved.append(own_id)
                self.events.append((kind, self.saved_ids[number]))

    def _reference_events(self, span: tuple[int, int]) -> list[int]:
        """Events in ``span`` of the segment's storages and imports."""
        of = self.source.events_of
        return sorted(at for s in self.step_ids for at in of.get(s, ()) if span[0] <= at < span[1])

    def _copy_op(self, op: Op) -> None:
        storages = self.graph.storages
        reads: tuple[int, ...] = ()
        if op.backward:
            makes = [self._add(s, storages[s].bytes, "backward") for s in op.makes]
        else:
            reads = tuple(dict.fromkeys([self._read(s) for s in op.reads]))
            self.op_ids[op.id] = len(self.ops)
            makes = [self.ids[s] for s in op.makes]
        completes_inplace = None if op.completes_inplace is None else self.op_ids.get(op.completes_inplace)
        copy = (op.name, op.backward, reads, tuple(makes), op.workspace_bytes, op.rng_bytes, completes_inplace)
        self._add_run(copy, self.source.context.costs.op_ms[op.id])

    def _read(self, storage: int) -> int:
        """The subgraph's storage for one that a forward op reads: what others keep anyway costs nothing here."""
        if storage in self.ids and self.ids[storage] < len(self.step_ids):
            return self.ids[storage]
        source = self.graph.storages[storage]
        stays = source.kind == "activation" or (source.op is None and not source.fixed)
        kind = "input" if stays else "written"
        if kind not in self.proxies:
            self.proxies[kind] = self._add(None, 0, "input", "" if stays else "written during the step")
        return self.proxies[kind]

    def _sort_frees(self) -> None:
        """Order simultaneous frees by id: Python empties some containers (autocast's cache) in any order."""
        at = 0
        # Not across ``forward_end``, which lies between frees.
        for (kind, _), run in groupby(
            enumerate(list(self.events)), key=lambda it: (it[1][0], it[0] < self._forward_end)
        ):
            length = len(list(run))
            if kind == FREE:
                self.events[at : at + length] = sorted(self.events[at : at + length])
            at += length
