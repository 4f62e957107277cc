"""How long collectives take between devices of a machine and between machines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowtide.estimation.device_table import Device

# Of what the data sheet says of the link, in one direction: nccl-tests show bus bandwidths of 225 to 250 GB/s on A100
# (300) and of 320 to 360 on H100 (450); for all_reduce on H100 and later, whose switches add, 440 to 480
# (https://github.com/NVIDIA/nccl-tests/issues/290).
_RING_SHARE = 0.75
_ALL_REDUCE_SHARE = {9.0: 0.98, 10.0: 0.98}
_LATENCY_US = 25.0  # of a small one within a machine; nccl-tests say 20 to 30
_HOP_US = 2.5  # more for each step of a ring that leaves the machine
# An adapter for each GPU, as clouds have them: 8 x 400 Gbit/s with H100, 8 x 200 with A100, 100 with V100; 0.9 of it
# (nccl-tests: 46 of 50 GB/s).
_NETWORK_BITS_PER_S = {9.0: 400e9, 10.0: 400e9, 8.0: 200e9, 7.0: 100e9}
_OTHER_NETWORK_BITS_PER_S = 100e9
_NETWORK_SHARE = 0.9


@dataclass(frozen=True)
class Links:
    """Bytes per second in one direction.

    Attributes:
        ring: Within a machine, of each device; ``all_reduce``: the same where switches add.
        network: Of each device to other machines.
    """

    ring: float
    all_reduce: float
    network: float

    def collective_us(self, kind: str, part_bytes: int, ranks: int, nodes: int, *, has_begun: bool = False) -> float:
        """Of one collective.

        Args:
            kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``send``, ...
            part_bytes: Of one rank's part; of ``all_reduce`` and ``broadcast`` the whole.
            nodes: Machines that the ranks are on.
            has_begun: It is part of a group of calls that go as one.
        """
        if ranks <= 1:
            return 0.0
        is_reduction = kind == "all_reduce"
        moved = part_bytes * _times_moved(kind, ranks)
        local = max(1, ranks // nodes)
        inside = self.all_reduce if is_reduction else self.ring
        # What enters a machine comes over all of its adapters; of an exchange, each device's own.
        outside = min((1 if kind in ("all_to_all", "send", "recv") else local) * self.network, inside)
        latency = 0.0 if has_begun else _LATENCY_US
        if nodes <= 1:
            return latency + moved / inside * 1e6
        hops = 2 * math.log2(nodes) + 8 if is_reduction else ranks if _goes_round(kind) else 1
        return latency + (0.0 if has_begun else _HOP_US * hops) + moved / outside * 1e6


def links_of(device: Device, network_bits_per_s: float | None = None) -> Links:
    """Of ``device`` as machines usually have it; None: the network that clouds give it."""
    capability = device.compute_capability or 0.0
    bits = network_bits_per_s or _NETWORK_BITS_PER_S.get(float(int(capability)), _OTHER_NETWORK_BITS_PER_S)
    peer = device.peer_link_bytes_per_s
    return Links(
        ring=_RING_SHARE * peer,
        all_reduce=_ALL_REDUCE_SHARE.get(capability, _RING_SHARE) * peer,
        network=_NETWORK_SHARE * bits / 8,
    )


def _goes_round(kind: str) -> bool:
    return kind in ("all_gather", "reduce_scatter", "broadcast", "reduce")


def _times_moved(kind: str, ranks: int) -> float:
    """Of a part, what each device sends."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return ranks - 1 if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter") else 1
