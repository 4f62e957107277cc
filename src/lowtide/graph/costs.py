"""Milliseconds per op, and bytes per second to each tier, on one device: plain data that ``measure`` fills in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

HOST, DISK = "host", "disk"  # tiers that a storage can be moved to
TIERS = (HOST, DISK)
# Each op timed alone; as the ops of a real step ran; between measured shapes; from facts about a device.
SOURCES = ("measured", "watched", "interpolated", "estimated")


@dataclass(frozen=True)
class Link:
    """The link from device memory to a tier and back; each direction carries one transfer at a time.

    Attributes:
        latency_ms: Of each transfer, before its first byte.
    """

    store_bytes_per_s: float
    fetch_bytes_per_s: float
    latency_ms: float = 0.0

    def store_ms(self, size: int) -> float:
        return self.latency_ms + 1e3 * size / self.store_bytes_per_s

    def fetch_ms(self, size: int) -> float:
        return self.latency_ms + 1e3 * size / self.fetch_bytes_per_s


@dataclass(frozen=True)
class Costs:
    """What each op of one graph costs.

    Attributes:
        op_ms: Milliseconds by op id, forward and backward.
        dispatch_us: Microseconds that the tape adds to every forward op.
        record_us: Added besides to each op whose output is dropped or moved.
        replay_us: Added to each replayed op beyond the op's own time, and to each storage that is fetched.
        move_us: Added besides to each storage that is fetched, for its way out and back.
        source: How the times were found, of ``SOURCES``.
        device_name: Where the times hold.
        links: By tier (``host``, ``disk``); of those that were asked for.
        error_fraction: How far ``plain_step_ms`` may be off; None where it was measured.
    """

    op_ms: tuple[float, ...]
    dispatch_us: float = 0.0
    record_us: float = 0.0
    replay_us: float = 0.0
    move_us: float = 0.0
    source: str = "measured"
    device_name: str = "cpu"
    links: Mapping[str, Link] = field(default_factory=dict)
    error_fraction: float | None = None

    @property
    def plain_step_ms(self) -> float:
        """Forward and backward of the plain step."""
        return sum(self.op_ms)
