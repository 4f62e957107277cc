"""Reference counts of one simulated step: which storages and recipes are alive, and how many bytes they take.

- A saved storage is alive while Python holds it (RUN to FREE), autograd does (PACK to RELEASE), backward does (UNPACK
  to DROP), or a pending recipe reads it.
- A recomputed or offloaded storage has a *value* beside its original. A handle, a pending recipe and, until backward
  starts, the original refer to the value. The value takes memory only while it is *materialised* by a replay or fetch.
- A *recipe* is an op with at least one recomputed output. It is pending from its first run until its final replay, or
  until all its values are dead. While pending it refers to what it reads and holds the generator state it needs.
"""

from collections.abc import Callable, Mapping

from lowtide.graph.facts import passes, step_facts
from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import GONE_GRADIENT, RUN, StepGraph
from lowtide.plan import RECOMPUTE, TIER_OF


class GraphIndex:
    """What every simulation of a graph looks up, as plain lists by storage or op."""

    def __init__(self, graph: StepGraph) -> None:
        self.start_bytes = graph.start_bytes
        self.bytes = [s.bytes for s in graph.storages]
        self.maker = [-1 if s.op is None else s.op for s in graph.storages]
        self.saved = list(graph.saved)
        self.makes = [op.makes for op in graph.ops]
        self.made_bytes = [sum(self.bytes[s] for s in op.makes) for op in graph.ops]
        # What a replay makes: not the gradients from before the step that go in it, which only count as made.
        self.makes_again, self.made_again_bytes = self.makes, self.made_bytes
        if graph.gone_bytes:
            gone = {s.id for s in graph.storages if s.kind == GONE_GRADIENT}
            self.makes_again = [tuple(s for s in made if s not in gone) for made in self.makes]
            self.made_again_bytes = [sum(self.bytes[s] for s in made) for made in self.makes_again]
        # Storages from before the step stay anyway, so references to them are not counted.
        self.reads = [tuple(dict.fromkeys(s for s in op.reads if self.maker[s] >= 0)) for op in graph.ops]
        self.retained_backwards = graph.retained_backwards
        self.passes = passes(graph)
        self.readers = step_facts(graph).readers
        self.workspace_bytes = [op.workspace_bytes for op in graph.ops]
        self.rng_bytes = [op.rng_bytes for op in graph.ops]
        # The op that completes the outputs of each op: the op itself, or a later one that writes them in place.
        facts = step_facts(graph)
        self.completed_by = [facts.completed_by.get(op.id, op.id) for op in graph.ops]
        # The first backward op after the last pack: a backward that creates a graph is part of the forward pass.
        last_pack = max(facts.packed.values(), default=-1)
        after = (at for at in range(last_pack + 1, len(graph.events)) if graph.events[at][0] == RUN)
        self.backward_start = next((at for at in after if graph.ops[graph.events[at][1]].backward), len(graph.events))


graph_index = once_per_graph(GraphIndex)


class References:
    """Reference counts at one moment of a step.

    Args:
        probe: Called at every moment that may be a peak, with live bytes and the replayed op, if any.

    Attributes:
        offloaded: Tier by offloaded storage.
        with_value: Recomputed and offloaded storages.
        recipe_ops: Ops that leave a recipe when they run.
        pending: Those of them whose recipe is pending.
        records: By op: how many recipes and copies the tape has recorded when it first ran.
        counts: References to each original, by storage.
        value_counts: References to the value of each storage of ``with_value``.
        originals: Storages of ``with_value`` whose original is alive and refers to the value.
        materialised: Storages whose value takes memory.
        live_bytes: All live bytes, resident ones included.
        high_bytes: The most during the present event, while an op runs or a fetch starts.
    """

    def __init__(self, index: GraphIndex, actions: Mapping[int, str], probe: "Probe | None" = None) -> None:
        self.index, self.probe = index, probe
        recomputed = {s for s, action in actions.items() if action == RECOMPUTE}
        self.offloaded = {s: TIER_OF[action] for s, action in actions.items() if action in TIER_OF}
        self.with_value = recomputed | self.offloaded.keys()
        self.recipe_ops = {index.maker[s] for s in recomputed}
        self.pending: set[int] = set()
        self.records: dict[int, int] = {}
        self.counts = [0] * len(index.bytes)
        self.value_counts = dict.fromkeys(self.with_value, 0)
        self.originals: set[int] = set()
        self.materialised: set[int] = set()
        self.live_bytes, self.high_bytes = index.start_bytes, 0

    def note_moment(self, live_bytes: int, replayed_op: int | None = None) -> None:
        """So many bytes are live for a moment, which may be the peak."""
        if live_bytes > self.high_bytes:
            self.high_bytes = live_bytes
        if self.probe is not None:
            self.probe(self, live_bytes, replayed_op)

    def retain(self, storage: int) -> None:
        """One more reference to an original."""
        if self.counts[storage] == 0:
            self.live_bytes += self.index.bytes[storage]
        self.counts[storage] += 1

    def release(self, storage: int) -> None:
        """One reference to an original less."""
        self.counts[storage] -= 1
        if self.counts[storage] == 0:
            self.live_bytes -= self.index.bytes[storage]

    def release_value(self, storage: int) -> None:
        """One reference to a value less. Without any it dies, and so do recipes that only it needed."""
        dying = [storage]
        while dying:
            storage = dying.pop()
            self.value_counts[storage] -= 1
            if self.value_counts[storage] > 0:
                continue
            self.dematerialise(storage)
            if storage in self.offloaded:
                continue
            op = self.index.maker[storage]
            if op in self.pending and not any(
                self.value_counts.get(s, 0) for s in self.index.makes[op] if s not in self.offloaded
            ):
                dying += self.drop_recipe(op)

    def release_originals(self) -> None:
        """Backward starts: an original that is still alive (the model's output, say) no longer refers to its value."""
        for storage in sorted(self.originals):
            self.release_value(storage)
        self.originals.clear()

    def run_op(self, op: int) -> None:
        """The first run of ``op``: its outputs are alive, and its recipe is pending if it leaves one."""
        index, with_value, value_counts = self.index, self.with_value, self.value_counts
        has_recipe = op in self.recipe_ops
        # Generator state is recorded before the op draws.
        self.live_bytes += index.made_bytes[op] + (index.rng_bytes[op] if has_recipe else 0)
        peak_bytes = self.live_bytes + index.workspace_bytes[op]
        counts = self.counts
        for storage in index.makes[op]:
            counts[storage] = 1
            if storage in with_value:
                value_counts[storage] = 1
                self.originals.add(storage)
        if has_recipe:
            self.pending.add(op)
            self.records[op] = 1
            for storage in index.reads[op]:
                if storage in with_value:
                    value_counts[storage] += 1
                else:
                    self.retain(storage)
        self.high_bytes = peak_bytes
        if self.probe is not None:
            self.probe(self, peak_bytes, None)

    def replay_op(self, op: int) -> int:
        """``op`` runs again: returns live bytes while it does. What it makes is there until ``discard``."""
        self.live_bytes += self.index.made_again_bytes[op]
        # The generator's present state is saved while the recorded one is in use.
        peak_bytes = self.live_bytes + self.index.workspace_bytes[op] + self.index.rng_bytes[op]
        self.note_moment(peak_bytes, op)
        return peak_bytes

    def discard(self, storage: int) -> None:
        """Nobody wants what the last replay made of ``storage``."""
        self.live_bytes -= self.index.bytes[storage]

    def fetch(self, storage: int) -> None:
        """A fetch starts: the value takes memory from now on."""
        self.live_bytes += self.index.bytes[storage]
        self.materialised.add(storage)
        self.note_moment(self.live_bytes)

    def drop_recipe(self, op: int) -> list[int]:
        """The recipe of ``op`` is pending no longer. Returns the values that the caller has to release for it."""
        self.pending.remove(op)
        self.live_bytes -= self.index.rng_bytes[op]
        values = []
        for storage in self.index.reads[op]:
            if storage in self.with_value:
                values.append(storage)
            else:
                self.release(storage)
        return values

    def dematerialise(self, storage: int) -> None:
        """Free the memory of a value, if it takes any."""
        if storage in self.materialised:
            self.materialised.remove(storage)
            self.live_bytes -= self.index.bytes[storage]


Probe = Callable[[References, int, int | None], None]
