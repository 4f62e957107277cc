"""Which tiers a plan may use here, how much of each, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowtide.costs.links import check_tier
from lowtide.graph.costs import DISK
from lowtide.plan import TIER_OF, Plan
from lowtide.tape.disk import DiskTier
from lowtide.tape.tiers import Tier, Tiers


@dataclass(frozen=True)
class Places:
    """Settings of the tiers.

    Attributes:
        scratch_dir: Where the disk tier's file is; None: the system's directory for temporary files.
        disk_budget_bytes: Most bytes in it; None: what there is room for.
        checksums: Compare what comes back from disk with what was written.
    """

    scratch_dir: str | Path | None = None
    disk_budget_bytes: int | None = None
    checksums: bool = False

    def open(self, plan: Plan) -> Tiers:
        """The tiers that ``plan`` moves storages to.

        Raises:
            TierError: one of them is not on this machine, or cannot be used.
        """
        need_bytes: dict[str, int] = {}
        for d in plan.decisions:
            if d.action in TIER_OF:
                tier = TIER_OF[d.action]
                need_bytes[tier] = need_bytes.get(tier, 0) + d.bytes
        opened: dict[str, Tier] = {}
        for tier, need in need_bytes.items():
            check_tier(tier, plan.device)
            opened[tier] = _OPENERS[tier](self, plan, need)
        return opened


def _open_disk(places: Places, plan: Plan, need_bytes: int) -> Tier:
    return DiskTier(places.scratch_dir, places.disk_budget_bytes, need_bytes=need_bytes, checksums=places.checksums)


_OPENERS: dict[str, Callable[[Places, Plan, int], Tier]] = {DISK: _open_disk}
