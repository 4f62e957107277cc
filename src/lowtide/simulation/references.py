"""Which storages live when, while one step is replayed under actions: the tape's reference counts, on plain data.

- A storage that is not recomputed lives while Python holds it (RUN to FREE), autograd does (PACK to RELEASE), backward
  does (UNPACK to DROP), or a recipe that has not run yet reads it.
- A recomputed storage is stored as a *value*, which costs nothing until it is *materialised* by a replay. A value lives
  while a handle, a pending recipe or, until backward begins, its original refers to it; a materialised one costs its
  bytes until then.
- A *recipe* is an op with at least one recomputed output. It is pending from its forward run until its last planned
  replay, or until all its values are dead; as long as it refers to what it reads, and keeps the generator state it
  needs. Its plan is a count, the largest of its recomputed outputs'.
- The unpack of a value that is not materialised runs a *burst*: every pending recipe it needs, in program order.
- A moved storage is a value too, and its recipe is its copy elsewhere: it reads nothing, and a fetch makes the value
  for good. ``transfers.py`` has the rules of when copies settle and fetches start.
- The last planned replay makes the values for good and drops the recipe's references at once. An earlier one is a
  *passing* replay: it makes only what the burst asked for, and each such value goes when the last recipe of the burst
  that reads it has run. The value that backward asked for is *lent*: it goes when backward drops what it was handed,
  and until then whoever needs it gets the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from lowtide.errors import PlanMismatchError
from lowtide.graph.facts import step_facts
from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import DROP, FREE, PACK, RUN, UNPACK, StepGraph
from lowtide.plan import RECOMPUTE, SAVE, TIER_OF, Moves
from lowtide.simulation.transfers import NEEDED, RAN, REPLAYED, SENT, SETTLED, STARTED, Logged

_PENDING, _GONE = 1, 2  # a recipe: before its last replay; replayed for good, or dropped unneeded


class Replay(NamedTuple):
    """One op run again in backward.

    Attributes:
        event: Index of the unpack event whose burst it belongs to.
        op: Id of the forward op.
        peak_bytes: Live bytes while it runs, its own outputs and workspace included.
    """

    event: int
    op: int
    peak_bytes: int


def run_step(graph: StepGraph, actions: Mapping[int, str], replays: Mapping[int, int], moves: Moves) -> Run:
    """The whole step under ``actions``.

    Raises:
        PlanMismatchError: a value is unpacked whose recipe is gone, or a count in ``replays`` is below 1.
    """
    if all(action == SAVE for action in actions.values()):
        return _plain_run(graph)
    run = Run(_index(graph), actions, replays, moves)
    run.play(graph.events)
    return run


def begin(graph: StepGraph, actions: Mapping[int, str], replays: Mapping[int, int], moves: Moves) -> Run:
    """A step of which nothing has been played yet."""
    return Run(_index(graph), actions, replays, moves)


class _Index:
    """What of a graph every simulation needs, looked up once."""

    def __init__(self, graph: StepGraph) -> None:
        self.start = graph.resident_bytes
        self.bytes = [s.bytes for s in graph.storages]
        self.maker = [-1 if s.op is None else s.op for s in graph.storages]
        self.saved = list(graph.saved)
        self.makes = [op.makes for op in graph.ops]
        self.made_bytes = [sum(self.bytes[s] for s in op.makes) for op in graph.ops]
        # What was there before the step stays: referring to it costs nothing.
        self.reads = [tuple(dict.fromkeys(s for s in op.reads if self.maker[s] >= 0)) for op in graph.ops]
        self.workspace = [op.workspace_bytes for op in graph.ops]
        self.rng = [op.rng_bytes for op in graph.ops]
        # The op that completes what each op makes: itself, or one that finishes it in place.
        facts = step_facts(graph)
        self.complete = [facts.completed_by.get(op.id, op.id) for op in graph.ops]
        self.backward_at = facts.first_backward_run


@once_per_graph
def _index(graph: StepGraph) -> _Index:
    return _Index(graph)


class Run:
    """The state of one simulated step.

    ``refs`` counts references to an original, ``value_refs`` those to the value of a recomputed or moved storage.
    """

    def __init__(self, index: _Index, actions: Mapping[int, str], replays: Mapping[int, int], moves: Moves) -> None:
        self.index = index
        self.recomputed = {s for s, action in actions.items() if action == RECOMPUTE}
        self.moved = {s: TIER_OF[action] for s, action in actions.items() if action in TIER_OF}
        self.valued = self.recomputed | self.moved.keys()
        self.max_inflight_bytes = moves.max_inflight_bytes
        self.sends_after: dict[int, list[int]] = {}  # op -> what is complete, and moved, when it has run
        for s in sorted(self.moved):
            self.sends_after.setdefault(index.complete[index.maker[s]], []).append(s)
        started = sorted((at, -s) for s, at in moves.fetch_at.items() if s in self.moved)
        self.due = deque((at, -s) for at, s in started)  # (number of an unpack, what is fetched from then on)
        self.unpacks = 0
        self.outgoing: deque[int] = deque()
        self.outgoing_bytes = 0
        self.incoming: set[int] = set()  # on their way back, and not waited for yet
        self.fetched = 0
        self.high = 0  # most bytes live in the present event, as far as fetches raised them
        self.log: list[Logged] = []
        self.records: dict[int, int] = {}  # op -> recipes and copies noted when it ran
        self.recipes = {index.maker[s] for s in self.recomputed}  # ops that leave a recipe
        self.passing_runs: dict[int, int] = {}  # op -> how many replays are to come before its last
        for storage, count in replays.items():
            if count < 1:
                raise PlanMismatchError(
                    f"storage {storage}: replays={count}. A recomputed storage is made again at least once; "
                    f"give 1 or more, or {SAVE!r} it."
                )
            if storage in self.recomputed and count > 1:
                op = index.maker[storage]
                self.passing_runs[op] = max(self.passing_runs.get(op, 0), count - 1)
        self.recorded = 0
        self.state: dict[int, int] = {}  # op -> what became of its recipe
        self.refs = [0] * len(index.bytes)
        self.value_refs = dict.fromkeys(self.valued, 0)
        self.originals: set[int] = set()  # recomputed or moved storages whose living original holds the value
        self.materialised: set[int] = set()
        self.lent: dict[int, int] = {}  # those of them that live until backward drops them -> unpacked how many times
        self.live = index.start
        self.lives: list[int] = []
        self.peaks: list[int] = []
        self.replays: list[Replay] = []
        self.watched = -1  # the bytes at which to note what lives
        self.seen: tuple[dict[int, int], dict[int, int]] | None = None

    def look(self, replayed_op: int | None) -> None:
        """Note what lives, originals and what replays made, the outputs of ``replayed_op`` among these."""
        size = self.index.bytes
        originals = {s: size[s] for s, refs in enumerate(self.refs) if refs > 0 and self.index.maker[s] >= 0}
        replayed = {s: size[s] for s in sorted(self.materialised)}
        for s in () if replayed_op is None else self.index.makes[replayed_op]:
            replayed[s] = replayed.get(s, 0) + size[s]  # a lent value is there already
        self.seen = originals, replayed

    def play(self, events: tuple[tuple[int, int], ...]) -> None:
        index, valued = self.index, self.valued
        maker, saved, lives, peaks = index.maker, index.saved, self.lives, self.peaks
        for at, (kind, number) in enumerate(events):
            if at == index.backward_at:
                self.forget_originals()
            if kind == RUN:
                peaks.append(self.run(number, at))
                lives.append(self.live)
                continue
            before = len(self.replays)
            if kind == UNPACK and self.moved:
                self.asked(at)
            storage = number if kind == FREE else saved[number]
            if maker[storage] >= 0:
                if kind == FREE:
                    self.release(storage)
                    if storage in self.originals:
                        self.originals.remove(storage)
                        self.release_value(storage)
                elif storage in valued:
                    if kind == UNPACK:
                        if storage not in self.materialised:
                            self.burst(storage, at)
                        elif storage in self.incoming:
                            self.fetch(storage, at)
                        if storage in self.lent:
                            self.lent[storage] += 1
                    elif kind == DROP and storage in self.lent:
                        self.take_back(storage)
                    if kind in (PACK, UNPACK):
                        self.value_refs[storage] += 1
                    else:
                        self.release_value(storage)
                elif kind in (PACK, UNPACK):
                    self.refer(storage)
                else:
                    self.release(storage)
            lives.append(self.live)
            peaks.append(self.live)
            if len(self.replays) > before:
                peaks[-1] = max(self.live, *(r.peak_bytes for r in self.replays[before:]))
            if self.high > peaks[-1]:
                peaks[-1] = self.high
            self.high = 0

    def run(self, op: int, event: int) -> int:
        """Run ``op`` for the first time; return the most bytes live meanwhile."""
        index = self.index
        if op in self.recipes:
            self.live += index.rng[op]  # taken before the op draws
        self.live += index.made_bytes[op]
        for storage in index.makes[op]:
            self.refs[storage] = 1
            if storage in self.valued:
                self.value_refs[storage] = 1
                self.originals.add(storage)
        peak = self.live + index.workspace[op]
        if op in self.recipes:
            self.recorded += 1
            self.records[op] = 1
            self.state[op] = _PENDING
            for storage in index.reads[op]:
                if storage in self.valued:
                    self.value_refs[storage] += 1
                else:
                    self.refer(storage)
        if peak == self.watched and self.seen is None:
            self.look(None)
        if self.moved:
            self.log.append(Logged(RAN, op, event))
            for storage in self.sends_after.get(op, ()):
                self.send(storage, event)
        return peak

    # Moved storages

    def send(self, storage: int, event: int) -> None:
        """A copy of ``storage`` sets out; its original counts until that has settled."""
        size = self.index.bytes[storage]
        while self.outgoing and self.outgoing_bytes + size > self.max_inflight_bytes:
            self.settle(event)
        self.outgoing.append(storage)
        self.outgoing_bytes += size
        self.refer(storage)
        self.recorded += 1
        maker = self.index.maker[storage]
        self.records[maker] = self.records.get(maker, 0) + 1
        self.log.append(Logged(SENT, storage, event))

    def settle(self, event: int) -> None:
        storage = self.outgoing.popleft()
        self.outgoing_bytes -= self.index.bytes[storage]
        self.log.append(Logged(SETTLED, storage, event))
        self.release(storage)

    def asked(self, event: int) -> None:
        """Backward unpacks something: all copies settle by then, and fetches that are due start."""
        while self.outgoing:
            self.settle(event)
        while self.due and self.due[0][0] <= self.unpacks:
            _, storage = self.due.popleft()
            if self.value_refs[storage] > 0 and storage not in self.materialised:
                self.start(storage, event)
        self.unpacks += 1

    def start(self, storage: int, event: int) -> None:
        self.live += self.index.bytes[storage]
        self.high = max(self.high, self.live)
        if self.live == self.watched and self.seen is None:
            self.look(None)
        self.materialised.add(storage)
        self.incoming.add(storage)
        self.fetched += 1
        self.log.append(Logged(STARTED, storage, event))

    def fetch(self, storage: int, event: int) -> None:
        """``storage`` is needed now."""
        if storage not in self.materialised:
            self.start(storage, event)
        self.incoming.discard(storage)
        self.log.append(Logged(NEEDED, storage, event))

    # References

    def forget_originals(self) -> None:
        """Backward begins: an original that still lives (what the model returned, say) holds its value no longer."""
        for storage in sorted(self.originals):
            self.release_value(storage)
        self.originals.clear()

    def refer(self, storage: int) -> None:
        if self.refs[storage] == 0:
            self.live += self.index.bytes[storage]
        self.refs[storage] += 1

    def release(self, storage: int) -> None:
        self.refs[storage] -= 1
        if self.refs[storage] == 0:
            self.live -= self.index.bytes[storage]

    def release_value(self, storage: int) -> None:
        dying = [storage]
        while dying:
            storage = dying.pop()
            self.value_refs[storage] -= 1
            if self.value_refs[storage] > 0:
                continue
            if storage in self.materialised:
                self.materialised.remove(storage)
                self.live -= self.index.bytes[storage]
            if storage in self.moved:
                self.incoming.discard(storage)
                continue
            op = self.index.maker[storage]
            if self.state[op] == _PENDING and not any(
                self.value_refs.get(s, 0) for s in self.index.makes[op] if s not in self.moved
            ):
                dying += self.forget(op)

    def forget(self, op: int) -> list[int]:
        """Drop the recipe of ``op``; return the values that lose a reference by it."""
        self.state[op] = _GONE
        self.live -= self.index.rng[op]
        values = []
        for storage in self.index.reads[op]:
            if storage in self.valued:
                values.append(storage)
            else:
                self.release(storage)
        return values

    def take_back(self, storage: int) -> None:
        """Backward drops a lent value once."""
        self.lent[storage] -= 1
        if self.lent[storage] == 0:
            del self.lent[storage]
            self.vanish(storage)

    def vanish(self, storage: int) -> None:
        """The memory of a value goes, its recipe stays."""
        if storage in self.materialised:
            self.materialised.remove(storage)
            self.live -= self.index.bytes[storage]

    def burst(self, storage: int, event: int) -> None:
        """Materialise ``storage`` and, for as long as they are needed, all values between it and what is live."""
        index, passing_runs = self.index, self.passing_runs
        needed: set[int] = set()
        passing: dict[int, int] = {}  # values that live for this burst only -> how many recipes are still to read them
        wanted = [storage]
        fetches: set[int] = set()
        while wanted:
            want = wanted.pop()
            if want in self.moved:
                fetches.add(want)
                continue
            op = index.maker[want]
            if op in needed:
                continue
            if self.state.get(op) != _PENDING:
                raise PlanMismatchError(
                    f"op {op} would have to be replayed after its last replay (unpack event {event}). "
                    "Save one of its outputs."
                )
            needed.add(op)
            for read in index.reads[op]:
                if read in self.valued and (read not in self.materialised or read in self.incoming):
                    wanted.append(read)
                    if passing_runs and passing_runs.get(index.maker[read]) and read not in self.moved:
                        passing[read] = passing.get(read, 0) + 1
        back = sorted(fetches, key=lambda s: (index.complete[index.maker[s]], s), reverse=True)
        for_now = False
        for op in sorted(needed):
            while back and index.complete[index.maker[back[-1]]] < op:
                self.fetch(back.pop(), event)
            self.live += index.made_bytes[op]
            # The generator's present state is put aside while the recorded one is in force.
            self.replays.append(Replay(event, op, self.live + index.workspace[op] + index.rng[op]))
            if self.replays[-1].peak_bytes == self.watched and self.seen is None:
                self.look(op)
            if self.moved:
                self.log.append(Logged(REPLAYED, op, event))
            for_now = bool(passing_runs.get(op))
            for made in index.makes[op]:
                stays = made in passing or made == storage if for_now else self.value_refs.get(made, 0) > 0
                if made in self.moved:  # it comes back from where it is
                    stays = False
                if stays and made not in self.materialised:  # a lent value is there already
                    self.materialised.add(made)
                else:
                    self.live -= index.bytes[made]
                if not for_now:
                    self.lent.pop(made, None)
            if for_now:
                passing_runs[op] -= 1
            else:
                for value in self.forget(op):
                    self.release_value(value)
            for read in index.reads[op] if passing else ():
                if read in passing:
                    passing[read] -= 1
                    if passing[read] == 0:
                        del passing[read]
                        self.vanish(read)
        while back:
            self.fetch(back.pop(), event)
        if for_now:  # the op that makes ``storage`` is the last of its burst
            self.lent[storage] = 0


@once_per_graph
def _plain_run(graph: StepGraph) -> Run:
    run = Run(_index(graph), {}, {}, Moves())
    run.play(graph.events)
    return run
