"""The order in which offloaded storages travel. The simulator, the rewritten step graph and the tape all use it.

- A storage is sent when the op that completes it has run. The original stays until its copy has *settled*.
- At most ``max_inflight_bytes`` are in flight: before one more storage is sent, the oldest copies settle. A storage
  larger than that travels alone.
- When backward unpacks anything, all copies still in flight settle. (Only the first unpack finds any.)
- Then the fetches start whose unpack number (``Moves.fetch_at``), counted over all backwards of the step, has been
  reached. Of several due at once the storage made last goes first, because backward needs it first. A storage without a
  number is fetched when it is needed.

The queue counts bytes and unpacks, never time. So memory does not depend on the speed of a link.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class OnUnpack(NamedTuple):
    """What one unpack asks for: first settle, then fetch, each in this order."""

    settle: Sequence[int] = ()
    fetch: Sequence[int] = ()


_NOTHING = OnUnpack()


class TransferQueue:
    """Says for one forward pass and its backward which copies settle and which fetches start at each moment.

    It knows storages by number only. Who asks it waits for the copies and starts the fetches that it names.

    Args:
        max_inflight_bytes: Most bytes of copies that have not settled.
        fetch_at: By storage: the unpack, counted from 0, at which its fetch starts.
    """

    def __init__(self, max_inflight_bytes: int, fetch_at: Mapping[int, int]) -> None:
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight: deque[tuple[int, int]] = deque()  # storage, bytes; the oldest first
        self._inflight_bytes = 0
        self._num_unpacks = 0
        self.begin_backward(fetch_at)

    def begin_backward(self, fetch_at: Mapping[int, int]) -> None:
        """While fetches of ``fetch_at`` are to come, this is another backward of the same step, and the count goes on.

        (A step has several under ``create_graph`` or ``retain_graph``.) Else unpacks are counted from 0 again.
        """
        if all(unpack < self._num_unpacks for unpack in fetch_at.values()):
            self._num_unpacks = 0
        to_come = ((unpack, -storage) for storage, unpack in fetch_at.items() if unpack >= self._num_unpacks)
        self._due = deque(sorted(to_come))

    def send(self, storage: int, size_bytes: int) -> Sequence[int]:
        """A copy of ``storage`` is about to start. Returns the storages that settle before it does."""
        settle = []
        while self._inflight and self._inflight_bytes + size_bytes > self._max_inflight_bytes:
            settle.append(self._oldest())
        self._inflight.append((storage, size_bytes))
        self._inflight_bytes += size_bytes
        return settle

    def on_unpack(self) -> OnUnpack:
        """Backward unpacks a saved tensor, of whatever storage. Returns what settles and what is fetched.

        A fetch is named whether or not it has started already, or anybody still needs it: the caller knows.
        """
        number = self._num_unpacks
        self._num_unpacks += 1
        if not self._inflight and not (self._due and self._due[0][0] <= number):
            return _NOTHING
        fetch = []
        while self._due and self._due[0][0] <= number:
            fetch.append(-self._due.popleft()[1])
        return OnUnpack(self.settle_all(), fetch)

    def settle_all(self) -> Sequence[int]:
        """The storages in flight, which all settle now."""
        return [self._oldest() for _ in range(len(self._inflight))]

    def _oldest(self) -> int:
        storage, size_bytes = self._inflight.popleft()
        self._inflight_bytes -= size_bytes
        return storage
