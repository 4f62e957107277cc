"""Which tiers a plan may use here, how much of each, and where."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from lowtide.graph.costs import DISK, HOST
from lowtide.measurement.allocator import available_bytes
from lowtide.measurement.links import check_tier
from lowtide.options import Offload
from lowtide.plan import TIER_OF, Plan
from lowtide.scratch_file import free_bytes, open_scratch
from lowtide.tape.offload.disk_tier import DiskTier, disk_bytes
from lowtide.tape.offload.host_tier import HostTier, host_bytes
from lowtide.tape.offload.tiers import Tier, Tiers
from lowtide.units import parse_budget

_FREE_SHARE = 0.9  # of a disk, taken where no budget is given
_HOST_SHARE = 0.5  # of available host memory: pinned memory is lost to everybody else


@dataclass(frozen=True)
class TierSettings:
    """Settings of the tiers.

    Attributes:
        scratch_dir: Where the disk tier's file is; None: the system's directory for temporary files.
        disk_budget_bytes: Most bytes in it; None: what there is room for.
        host_budget_bytes: Most bytes of pinned host memory.
        checksums: Compare what comes back from disk with what was written.
        opened: Tiers to use instead of opening any.
    """

    scratch_dir: str | Path | None = None
    disk_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    checksums: bool = False
    opened: Tiers | None = None

    @staticmethod
    def of(offload: Offload) -> TierSettings:
        """For a plan that exists already: a budget left to lowtide is what the plan needs."""
        disk, host = offload.disk_budget, offload.host_budget
        return TierSettings(
            offload.scratch_dir,
            disk_budget_bytes=None if disk is None else _amount("disk_budget", disk),
            host_budget_bytes=None if host in (None, "auto") else _amount("host_budget", host),
            checksums=offload.checksums,
        )

    def held(self, plan: Plan) -> TierSettings:
        """With the tiers of ``plan`` open: for many steps, each of which would open them. Raises: see ``open``."""
        return replace(self, opened=self.open(plan))

    def open(self, plan: Plan, have: Tiers | None = None) -> Tiers:
        """The tiers that ``plan`` moves storages to.

        Args:
            have: Tiers that are open already, of other plans: used again, so that a budget holds for all of them.

        Raises:
            TierError: one of them is not on this machine, or cannot be used.
        """
        if self.opened is not None:
            return self.opened
        sizes: dict[str, list[int]] = {}
        for d in plan.decisions:
            if d.action in TIER_OF:
                sizes.setdefault(TIER_OF[d.action], []).append(d.bytes)
        opened: dict[str, Tier] = {}
        for tier, moved in sizes.items():
            check_tier(tier, plan.device)
            there = (have or {}).get(tier)
            opened[tier] = self._disk(moved, there) if tier == DISK else self._host(moved, there)
        return opened

    # Plans count the bytes of storages; that each is rounded up must not make a plan within its budget fail.

    def _disk(self, sizes: list[int], there: Tier | None) -> Tier:
        need_bytes = sum(map(disk_bytes, sizes))
        if not isinstance(there, DiskTier):
            there = DiskTier(self.scratch_dir, self.disk_budget_bytes, need_bytes=need_bytes, checksums=self.checksums)
        there.space.allow(need_bytes)
        return there

    def _host(self, sizes: list[int], there: Tier | None) -> Tier:
        tier = there if isinstance(there, HostTier) else HostTier(self.host_budget_bytes)
        tier.pool.allow(sum(map(host_bytes, sizes)))
        tier.reserve(sizes)
        return tier


def usable(
    device: str,
    policy: Offload,
) -> tuple[TierSettings, dict[str, int]]:
    """The tiers that ``policy`` allows on ``device``, and the most bytes of each that a plan may count on.

    Raises:
        TierError: a tier is asked for that is not on this device, or its directory cannot be used.
        ValueError, TypeError: a budget is no amount of memory.
    """
    scratch_dir, disk_budget, host_budget = policy.scratch_dir, policy.disk_budget, policy.host_budget
    places = TierSettings(scratch_dir, checksums=policy.checksums)
    offload: dict[str, int] = {}
    if scratch_dir is not None or disk_budget is not None:
        check_tier(DISK, device)
        os.close(open_scratch(scratch_dir))
        free = free_bytes(tempfile.gettempdir() if scratch_dir is None else scratch_dir)
        offload[DISK] = int(_FREE_SHARE * free) if disk_budget is None else _amount("disk_budget", disk_budget)
        places = replace(places, disk_budget_bytes=offload[DISK])
    if host_budget is not None and (host_budget != "auto" or device == "cuda"):
        check_tier(HOST, device)
        automatic = host_budget == "auto"
        offload[HOST] = automatic_host_bytes() if automatic else _amount("host_budget", host_budget)
        places = replace(places, host_budget_bytes=offload[HOST])
    return places, offload


def automatic_host_bytes() -> int:
    """Half of what is available to this machine's ranks together: each gets as much."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(_HOST_SHARE * available_bytes("cpu")) // max(1, int(ranks) if ranks.isdigit() else 1)


def _amount(name: str, budget: int | str) -> int:
    found = parse_budget(budget)
    if not isinstance(found, int):
        raise ValueError(f'{name}={budget!r} is not an amount of memory. Pass bytes as an int, or "20GiB".')
    return found
