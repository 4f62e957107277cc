"""Moved storages on their links: when they travel, and what waiting for them costs.

The rules that the simulator and the tape share. Which bytes live when depends on them alone, never on how fast a link
is, so a predicted peak holds on a slow disk too; the links' speed decides about time only.

- A moved storage sets out when the op that completes it has run. Until its copy has *settled* the original counts.
- At most ``Moves.window_bytes`` are on their way out at once: before one more sets out the oldest have to settle,
  whatever the wait. When backward first asks for anything all that is left settles.
- It comes back once a backward, into memory that counts from the moment the fetch starts: at the unpack with the
  number ``Moves.fetch_at`` (of all that backward unpacks, in order; of several the last made first), or when needed.
- A link carries one transfer at a time each way, first come, first served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lowtide.graph.costs import Costs

STORE, FETCH = "store", "fetch"
# What a log says happened: an op ran (or ran again), a copy set out, had to have settled, a fetch started, was needed.
RAN, REPLAYED, SENT, SETTLED, STARTED, NEEDED = "ran", "replayed", "sent", "settled", "started", "needed"


class Logged(NamedTuple):
    """One thing that happens in a simulated step: ``number`` is an op or a storage."""

    what: str
    number: int
    event: int


class Transfer(NamedTuple):
    """One storage on its way.

    Attributes:
        direction: ``store`` or ``fetch``.
        event: Index of the event during which it was asked for.
        start_ms, end_ms: On the link, counted from the start of the step.
        waited_ms: How long the step stood still for it.
    """

    storage: int
    tier: str
    direction: str
    bytes: int
    event: int
    start_ms: float
    end_ms: float
    waited_ms: float


def price(
    log: Iterable[Logged],
    costs: Costs,
    size_of: Mapping[int, int],
    tier_of: Mapping[int, str],
    record_us_of: Mapping[int, float],
) -> tuple[Transfer, ...]:
    """Put what ``log`` says on a clock; return the transfers in the order in which they were asked for.

    Args:
        size_of, tier_of: By moved storage.
        record_us_of: What the tape adds to each first run of an op, by op.
    """
    now = 0.0
    free: dict[tuple[str, str], float] = {}
    found: dict[tuple[int, str], Transfer] = {}
    for what, number, event in log:
        if what == RAN:
            now += costs.op_ms[number] + record_us_of.get(number, 0.0) / 1e3
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
            now += costs.replay_us / 1e3 if what == NEEDED else 0.0
    return tuple(found.values())
