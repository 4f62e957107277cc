"""Which tiers a plan may use on this machine, where, and how many bytes of each."""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from lowtide.graph.costs import DISK, HOST
from lowtide.measurement.device import available_bytes
from lowtide.measurement.links import check_tier
from lowtide.options import Offload
from lowtide.plan import TIER_OF, Plan
from lowtide.scratch_file import free_bytes, open_scratch
from lowtide.tape.offload.disk_tier import DiskTier, disk_bytes
from lowtide.tape.offload.host_tier import HostTier, host_bytes
from lowtide.tape.offload.tiers import Tier, Tiers
from lowtide.units import parse_budget

_FREE_SHARE = 0.9  # of the disk's free space, without a disk_budget
_HOST_SHARE = 0.5  # of available host memory: no other process can use pinned memory


@dataclass(frozen=True)
class TierSettings:
    """Where the tiers of plans are, and the most bytes in each; None: the system's directory, and no limit."""

    scratch_dir: str | Path | None = None
    disk_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    checksums: bool = False

    @classmethod
    def of(cls, offload: Offload) -> Self:
        """For a plan that exists already: a budget left to lowtide is what the plan needs."""
        disk, host = offload.disk_budget, offload.host_budget
        disk_budget_bytes = None if disk is None else int(parse_budget(disk))
        host_budget_bytes = None if host is None or host == "auto" else int(parse_budget(host))
        return cls(offload.scratch_dir, disk_budget_bytes, host_budget_bytes, offload.checksums)

    def open(self, plan: Plan, reuse: Tiers | None = None) -> Tiers:
        """The tiers that ``plan`` offloads to, by name.

        Args:
            reuse: Open tiers of other plans. They are used again, so that a budget holds for all plans together.

        Raises:
            TierError: one of them is not on this machine, or cannot be used.
        """
        sizes: dict[str, list[int]] = {}
        for d in plan.decisions:
            if d.action in TIER_OF:
                sizes.setdefault(TIER_OF[d.action], []).append(d.bytes)
        opened: dict[str, Tier] = {}
        for name, offloaded in sizes.items():
            check_tier(name, plan.device)
            # Plans do not round up the bytes of storages, as tiers do. A plan within its budget must still fit.
            need_bytes = sum(map(disk_bytes if name == DISK else host_bytes, offloaded))
            tier = (reuse or {}).get(name)
            if name == DISK:
                if not isinstance(tier, DiskTier):
                    bound = self.disk_budget_bytes
                    tier = DiskTier(self.scratch_dir, bound, need_bytes=need_bytes, checksums=self.checksums)
                tier.space.raise_budget_to(need_bytes)
            else:
                tier = tier if isinstance(tier, HostTier) else HostTier(self.host_budget_bytes)
                tier.pool.raise_budget_to(need_bytes)
                tier.reserve(offloaded)
            opened[name] = tier
        return opened


def usable(device: str, policy: Offload) -> tuple[TierSettings, dict[str, int]]:
    """The tiers that ``policy`` allows on ``device``, and the most bytes that a plan may offload to each.

    Raises:
        TierError: a tier does not exist for this device, or its directory cannot be used.
    """
    settings, scratch_dir = TierSettings.of(policy), policy.scratch_dir
    capacities: dict[str, int] = {}
    if scratch_dir is not None or policy.disk_budget is not None:
        check_tier(DISK, device)
        os.close(open_scratch(scratch_dir))
        free = free_bytes(tempfile.gettempdir() if scratch_dir is None else scratch_dir)
        capacities[DISK] = settings.disk_budget_bytes or int(_FREE_SHARE * free)
    if policy.host_budget is not None and (policy.host_budget != "auto" or device == "cuda"):
        check_tier(HOST, device)
        capacities[HOST] = settings.host_budget_bytes or automatic_host_bytes()
    disk, host = capacities.get(DISK), capacities.get(HOST)
    return replace(settings, disk_budget_bytes=disk, host_budget_bytes=host), capacities


def automatic_host_bytes() -> int:
    """This rank's share of half of the available host memory."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(_HOST_SHARE * available_bytes("cpu")) // max(1, int(ranks) if ranks.isdigit() else 1)
