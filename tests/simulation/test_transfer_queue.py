"""When copies settle and fetches start, against a schedule worked out by hand. Every rule has a case that needs it."""

from collections import deque

import pytest

from lowtide.simulation.transfer_queue import OnUnpack, TransferQueue

SIZES = {1: 10, 2: 10, 3: 15, 4: 40, 5: 5, 6: 5}
FETCH_AT = {1: 2, 2: 0, 3: 2, 5: 4}


def schedule(queue):
    """What ``queue`` says of six storages, of five unpacks, and of a second backward of three unpacks."""
    sent = [list(queue.send(storage, size)) for storage, size in SIZES.items()]
    first = [queue.on_unpack() for _ in range(5)]
    queue.begin_backward(FETCH_AT)
    second = [queue.on_unpack() for _ in range(3)]
    return sent, [(list(u.settle), list(u.fetch)) for u in first], [(list(u.settle), list(u.fetch)) for u in second]


SENT = [
    [],  # 1 travels
    [],  # 2 beside it: 20 bytes
    [1],  # 15 more do not fit into 30 beside both: the oldest settles, 25 bytes are left
    [2, 3],  # larger than the limit: alone
    [4],
    [],
]
FIRST = [([5, 6], [2]), ([], []), ([], [3, 1]), ([], []), ([], [5])]
SECOND = [([], [2]), ([], []), ([], [3, 1])]


def test_copies_settle_and_fetches_start_when_the_rules_say():
    assert schedule(TransferQueue(30, FETCH_AT)) == (SENT, FIRST, SECOND)


class NoLimit(TransferQueue):
    def send(self, storage, size_bytes):
        self._inflight.append((storage, size_bytes))
        return []


class NewestSettlesFirst(TransferQueue):
    def _oldest(self):
        storage, size_bytes = self._inflight.pop()
        self._inflight_bytes -= size_bytes
        return storage


class SettledBytesStillCount(TransferQueue):
    def _oldest(self):
        return self._inflight.popleft()[0]


class NothingSettlesAtUnpack(TransferQueue):
    def on_unpack(self):
        return OnUnpack((), super().on_unpack().fetch)


class NothingIsFetchedEarly(TransferQueue):
    def on_unpack(self):
        return OnUnpack(super().on_unpack().settle, ())


class FirstMadeFirst(TransferQueue):
    def on_unpack(self):
        due = super().on_unpack()
        return OnUnpack(due.settle, sorted(due.fetch))


class AllFetchedAtOnce(TransferQueue):
    def begin_backward(self, fetch_at):
        super().begin_backward(dict.fromkeys(fetch_at, 0))


class OneBackwardOnly(TransferQueue):
    def begin_backward(self, fetch_at):
        if "_due" in vars(self):
            self._due = deque()
        else:
            super().begin_backward(fetch_at)


@pytest.mark.parametrize(
    "broken",
    [
        NoLimit, NewestSettlesFirst, SettledBytesStillCount, NothingSettlesAtUnpack, NothingIsFetchedEarly,
        FirstMadeFirst, AllFetchedAtOnce, OneBackwardOnly,
    ],
)  # fmt: skip
def test_a_queue_without_one_of_the_rules_says_something_else(broken):
    assert schedule(broken(30, FETCH_AT)) != (SENT, FIRST, SECOND)


def test_a_backward_that_begins_while_fetches_are_to_come_is_part_of_the_same_step():
    queue = TransferQueue(30, {})
    queue.begin_backward({1: 3, 2: 1})  # under create_graph: the rest of forward sends more
    first = [list(queue.on_unpack().fetch) for _ in range(2)]
    queue.begin_backward({1: 3, 2: 1, 3: 4})

    assert first == [[], [2]]
    assert [list(queue.on_unpack().fetch) for _ in range(3)] == [[], [1], [3]]
