"""Transfers of one simulated step: the memory of offloaded storages, and the time spent waiting for links.

``transfer_queue.py`` says when a storage travels. Here its decisions change reference counts and are logged;
``time_transfers`` then puts the log on a clock. Memory depends on the queue alone, so the predicted peak also holds
on a link that is slower than measured.

- The original of a sent storage counts until its copy has settled.
- A fetched storage counts from the start of its fetch.
- A link carries one transfer at a time in each direction, in the order of the requests.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import Op
from lowtide.plan import Moves
from lowtide.simulation.references import References
from lowtide.simulation.transfer_queue import TransferQueue

STORE, FETCH = "store", "fetch"
# What a log tells: an op ran, an op was replayed, a copy was sent, had to be settled; a fetch started, was needed.
RAN, REPLAYED, SENT, SETTLED, STARTED, NEEDED = "ran", "replayed", "sent", "settled", "started", "needed"

LogEntry = tuple[str, int, int]  # what, the op or storage, the event; a plain tuple because there are so many


class Transfer(NamedTuple):
    """One storage that travels over a link.

    Attributes:
        direction: ``store`` or ``fetch``.
        event: Index of the event that asked for it.
        start_ms, end_ms: Time on the link, from the start of the step.
        waited_ms: How long the step waited for it.
    """

    storage: int
    tier: str
    direction: str
    bytes: int
    event: int
    start_ms: float
    end_ms: float
    waited_ms: float


class OffloadedStorages:
    """Does what a ``TransferQueue`` says, to reference counts.

    Attributes:
        fetching: Storages whose fetch has started and has not been waited for.
        log: What happened, for ``time_transfers``.
    """

    def __init__(self, references: References, moves: Moves) -> None:
        index, offloaded = references.index, references.offloaded
        self.references = references
        self.fetching: set[int] = set()
        self.log: list[LogEntry] = []
        self._complete_after: dict[int, list[int]] = {}  # op -> offloaded storages that are complete when it has run
        for s in sorted(offloaded):
            self._complete_after.setdefault(index.completed_by[index.maker[s]], []).append(s)
        fetch_at = {s: at for s, at in moves.fetch_at.items() if s in offloaded}
        self._queue = TransferQueue(moves.max_inflight_bytes, fetch_at)

    def after_op(self, op: int, event: int) -> None:
        """``op`` has run for the first time: what it completes is sent."""
        self.log.append((RAN, op, event))
        for storage in self._complete_after.get(op, ()):
            for oldest in self._queue.send(storage, self.references.index.bytes[storage]):
                self._settle(oldest, event)
            self.references.retain(storage)
            maker = self.references.index.maker[storage]
            self.references.records[maker] = self.references.records.get(maker, 0) + 1
            self.log.append((SENT, storage, event))

    def on_unpack(self, event: int) -> None:
        """Backward unpacks something: copies in flight settle, and fetches that are due start."""
        references = self.references
        due = self._queue.on_unpack()
        for storage in due.settle:
            self._settle(storage, event)
        for storage in due.fetch:
            if references.value_counts[storage] > 0 and storage not in references.materialised:
                self._start_fetch(storage, event)

    def wait_for(self, storage: int, event: int) -> None:
        """``storage`` is needed now."""
        if storage not in self.references.materialised:
            self._start_fetch(storage, event)
        self.fetching.discard(storage)
        self.log.append((NEEDED, storage, event))

    def _settle(self, storage: int, event: int) -> None:
        self.log.append((SETTLED, storage, event))
        self.references.release(storage)

    def _start_fetch(self, storage: int, event: int) -> None:
        self.references.fetch(storage)
        self.fetching.add(storage)
        self.log.append((STARTED, storage, event))


def time_transfers(
    log: Iterable[LogEntry], ops: Sequence[Op], costs: Costs, references: References
) -> tuple[Transfer, ...]:
    """Put ``log`` of a step with ``ops`` on a clock. Returns the transfers in the order of the requests."""
    records, tier_of, size_of = references.records, references.offloaded, references.index.bytes
    now = 0.0
    free: dict[tuple[str, str], float] = {}
    found: dict[tuple[int, str], Transfer] = {}
    for what, number, event in log:
        if what == RAN:
            tape_us = 0.0 if ops[number].backward else costs.dispatch_us + costs.record_us * records.get(number, 0)
            now += costs.op_ms[number] + tape_us / 1e3
        elif what == REPLAYED:
            now += costs.op_ms[number] + costs.replay_us / 1e3
        elif what in (SENT, STARTED):
            tier = tier_of[number]
            direction = STORE if what == SENT else FETCH
            link, size = costs.links[tier], size_of[number]
            start = max(now, free.get((tier, direction), 0.0))
            if direction == FETCH and (number, STORE) in found:
                start = max(start, found[number, STORE].end_ms)
            end = start + (link.store_ms(size) if direction == STORE else link.fetch_ms(size))
            free[tier, direction] = end
            found[number, direction] = Transfer(number, tier, direction, size, event, start, end, 0.0)
        else:
            key = number, STORE if what == SETTLED else FETCH
            transfer = found[key]
            waited = max(0.0, transfer.end_ms - now)
            now += waited
            found[key] = transfer._replace(waited_ms=transfer.waited_ms + waited)
            now += (costs.replay_us + costs.move_us) / 1e3 if what == NEEDED else 0.0
    return tuple(found.values())
