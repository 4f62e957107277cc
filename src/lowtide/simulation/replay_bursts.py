"""Replay bursts of one simulated step: what runs again when backward unpacks a value that is not materialised.

- A *burst* replays every pending recipe that the value needs, in program order, and fetches the offloaded storages they
  read.
- A plan gives each recipe a number of replays: the largest of its recomputed outputs'. The *final* replay materialises
  all values still referred to, and drops the recipe at once.
- Where several backward passes ask for the same and an op has no more replays than there are passes, it runs once a
  pass, and each replay but the final one makes what the pass needs of it (``retained_passes.py``).
- Other replays before the final one are *transient*. They materialise only what the burst asks for. Such a value is
  freed when the last recipe of the burst that reads it has run. The value that backward unpacked is a *transient
  result*: it is freed when backward drops it, and until then whoever needs it gets the same memory.
"""

from collections.abc import Mapping
from typing import NamedTuple

from lowtide.errors import PlanMismatchError
from lowtide.plan import SAVE
from lowtide.simulation.references import References
from lowtide.simulation.retained_passes import RetainedPasses
from lowtide.simulation.transfers import REPLAYED, OffloadedStorages


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


class ReplayBursts:
    """The replays of one step.

    Attributes:
        replays: What has run again so far.
        transient_results: By storage: how many unpacked handles backward has still to drop.
    """

    def __init__(self, references: References, offload: OffloadedStorages, replays_of: Mapping[int, int]) -> None:
        self.references, self.offload = references, offload
        self.replays: list[Replay] = []
        self.transient_results: dict[int, int] = {}
        self.transient_left: dict[int, int] = {}  # op -> transient replays still to come before the final one
        self.kept_left: dict[int, int] = {}  # op -> replays still to come before it that keep what they make for a pass
        self.passes = RetainedPasses(references, self.transient_results) if references.index.passes > 1 else None
        replays_of_op: dict[int, int] = {}
        for storage, count in replays_of.items():
            if count < 1:
                raise PlanMismatchError(
                    f"storage {storage}: replays={count}. A recomputed storage is made again at least once; "
                    f"give 1 or more, or {SAVE!r} it."
                )
            if storage in references.with_value and storage not in references.offloaded and count > 1:
                op = references.index.maker[storage]
                replays_of_op[op] = max(replays_of_op.get(op, 0), count)
        for op, count in replays_of_op.items():
            left = self.kept_left if count <= references.index.passes else self.transient_left
            left[op] = count - 1

    def drop_result(self, storage: int) -> None:
        """Backward drops one unpacked handle of a transient result."""
        self.transient_results[storage] -= 1
        if self.transient_results[storage] == 0:
            del self.transient_results[storage]
            self.references.dematerialise(storage)

    def run(self, storage: int, event: int) -> None:
        """Materialise ``storage``, and what the replays need on the way.

        Raises:
            PlanMismatchError: a recipe is needed after its final replay.
        """
        references, offload, transient_left = self.references, self.offload, self.transient_left
        index, pending, materialised = references.index, references.pending, references.materialised
        needed: set[int] = set()
        reads_left: dict[int, int] = {}  # transient value -> recipes of this burst that have still to read it
        fetches: set[int] = set()
        wanted = [storage]
        while wanted:
            want = wanted.pop()
            if want in references.offloaded:
                fetches.add(want)
                continue
            op = index.maker[want]
            if op in needed:
                continue
            if op not in pending:
                raise PlanMismatchError(
                    f"op {op} would have to be replayed after its last replay (unpack event {event}). "
                    "Save one of its outputs."
                )
            needed.add(op)
            for read in index.reads[op]:
                if read in references.with_value and (read not in materialised or read in offload.fetching):
                    wanted.append(read)
                    if transient_left and transient_left.get(index.maker[read]) and read not in references.offloaded:
                        reads_left[read] = reads_left.get(read, 0) + 1
        fetch_order = sorted(fetches, key=lambda s: (index.completed_by[index.maker[s]], s), reverse=True)
        passes = self.passes
        transient = False
        for op in sorted(needed):
            while fetch_order and index.completed_by[index.maker[fetch_order[-1]]] < op:
                offload.wait_for(fetch_order.pop(), event)
            self.replays.append(Replay(event, op, references.replay_op(op)))
            if references.offloaded:
                offload.log.append((REPLAYED, op, event))
            transient = bool(transient_left.get(op))
            kept = bool(self.kept_left.get(op)) and passes is not None and passes.is_open
            for made in index.makes_again[op]:
                if transient:
                    stays = made in reads_left or made == storage
                else:
                    stays = references.value_counts.get(made, 0) > 0
                # An offloaded output is fetched instead. A transient result is materialised already.
                if stays and made not in references.offloaded and made not in materialised:
                    materialised.add(made)
                else:
                    references.discard(made)
                if not transient:
                    self.transient_results.pop(made, None)
                if passes is not None and kept and stays and made not in references.offloaded:
                    passes.keep(made)
            if passes is not None and not transient:
                passes.note_replay(op, final=not kept)
            if transient:
                transient_left[op] -= 1
            elif kept:
                self.kept_left[op] -= 1
            else:
                for value in references.drop_recipe(op):
                    references.release_value(value)
            for read in index.reads[op] if reads_left else ():
                if read in reads_left:
                    reads_left[read] -= 1
                    if reads_left[read] == 0:
                        del reads_left[read]
                        references.dematerialise(read)
        while fetch_order:
            offload.wait_for(fetch_order.pop(), event)
        if transient:  # the op that makes ``storage`` is the last of its burst
            self.transient_results[storage] = 0
