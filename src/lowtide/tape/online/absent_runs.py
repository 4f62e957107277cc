"""Seconds to make values again, with what is absent before them, in time that is linear in what is absent.

As in Kirisame et al. 2021, "Dynamic Tensor Rematerialization" (https://arxiv.org/abs/2006.09616), absent values that
read one another form a *run*, found by union, and a run has one sum. Known weakness: where two values are made from
parts of one run, each has the price of the whole run.
"""

from lowtide.tape.online.online_values import StoredValue


class AbsentRuns:
    """The runs as they are now: of no use once something is let go of or made again."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}  # id of an absent value -> of another one in its run, or itself
        self._seconds: dict[int, float] = {}  # by the last of these

    def seconds_to_make(self, value: StoredValue) -> float:
        """Its own op, and the runs that it is made from."""
        reads = [read for read in value.inputs if _is_absent(read)]
        for read in reads:
            self._find(read)
        return value.cost_s + sum([self._seconds[run] for run in {self._root(id(read)) for read in reads}])

    def _find(self, value: StoredValue) -> None:
        """The run of ``value``, unless it is known."""
        if id(value) in self._parent:
            return
        run, todo = self._begin(value), [value]
        while todo:
            for read in todo.pop().inputs:
                if not _is_absent(read):
                    continue
                if id(read) not in self._parent:
                    self._begin(read)
                    todo.append(read)
                run = self._join(run, self._root(id(read)))

    def _begin(self, value: StoredValue) -> int:
        self._parent[id(value)], self._seconds[id(value)] = id(value), value.cost_s
        return id(value)

    def _root(self, run: int) -> int:
        parent = self._parent
        while parent[run] != run:
            parent[run] = run = parent[parent[run]]
        return run

    def _join(self, run: int, other: int) -> int:
        if run != other:
            self._parent[other] = run
            self._seconds[run] += self._seconds.pop(other)
        return run


def _is_absent(value: StoredValue) -> bool:
    return not value.is_present and value.recipe is not None
