"""What replays keep within one of several backward passes over the same graph.

An op that a plan replays at most once a pass keeps what it makes for that pass: until as many have had each value as
refer to it, or the pass is over. Then its recipe makes it again in the next pass. A pass that is the last one is no
such pass: replays in it are final.
"""

from collections import Counter

from lowtide.graph.step_graph import PACK, RUN, UNPACK
from lowtide.simulation.references import References


class RetainedPasses:
    """The backward passes of one simulated step that leave their graph for another one.

    Attributes:
        uses_left: By value that is kept for the present pass: how many users of it are still to come. Those that none
            refers to stay until the pass is over.
    """

    def __init__(self, references: References, transient_results: dict[int, int]) -> None:
        self._references, self._transient_results = references, transient_results
        self._spans = references.index.retained_backwards
        self._passed = 0  # of these spans
        self._last_op = -1
        self._packs: Counter[int] = Counter()  # by storage: saved tensors so far
        self._handed_out: Counter[int] = Counter()  # by storage: unpacked, and not dropped yet
        self._run_for_good: set[int] = set()  # ops of which the final replay has run
        self.uses_left: dict[int, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether what backward asks for now is of such a pass."""
        return self._passed < len(self._spans) and self._spans[self._passed][0] <= self._last_op + 1

    def begin_event(self, kind: int, number: int) -> None:
        """An event is about to be played."""
        if kind == RUN or kind in (PACK, UNPACK):
            op = number if kind == RUN else self._last_op + 1
            while self._passed < len(self._spans) and op > self._spans[self._passed][1]:
                self._passed += 1
                for storage in self.uses_left:
                    self._references.dematerialise(storage)
                self.uses_left.clear()
            if kind == RUN:
                self._last_op = number
        saved = self._references.index.saved
        if kind == PACK:
            self._packs[saved[number]] += 1

    def keep(self, storage: int) -> None:
        """``storage`` has been made again, for this pass."""
        made = self._references.records
        readers = self._references.index.readers.get(storage, ())
        recipes = sum(op in made and op not in self._run_for_good for op in readers)
        self.uses_left[storage] = self._packs[storage] + recipes

    def hand_out(self, storage: int) -> None:
        """Backward has taken it out."""
        self._handed_out[storage] += 1
        self._count_use(storage)

    def drop(self, storage: int) -> None:
        """Backward drops it."""
        self._handed_out[storage] -= 1

    def note_replay(self, op: int, *, final: bool) -> None:
        """``op`` has read what it reads, other than for a moment."""
        if final:
            self._run_for_good.add(op)
            for made in self._references.index.makes_again[op]:
                self.uses_left.pop(made, None)
        for storage in self._references.index.reads[op]:
            self._count_use(storage)

    def _count_use(self, storage: int) -> None:
        left = self.uses_left.get(storage, 0)
        if left > 1:
            self.uses_left[storage] = left - 1
        elif left == 1:
            del self.uses_left[storage]
            if handed_out := self._handed_out[storage]:
                self._transient_results[storage] = handed_out
            else:
                self._references.dematerialise(storage)
