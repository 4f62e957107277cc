"""Which tiers a plan may use on this machine, where, and how many bytes of each."""

import math
import os
import shutil
import tempfile
from collections.abc import Mapping

from lowtide.device.host_memory import available_host_bytes
from lowtide.device.names import is_accelerator
from lowtide.graph.costs import DISK, HOST
from lowtide.measurement.links import check_tier
from lowtide.options import Offload
from lowtide.plan import TIER_OF, Plan
from lowtide.scratch_file import open_scratch
from lowtide.tape.offload.disk_tier import DiskTier, disk_bytes
from lowtide.tape.offload.host_tier import HostTier, host_bytes
from lowtide.tape.offload.tiers import Tier, Tiers
from lowtide.units import parse_budget

_FREE_SHARE = 0.9  # of the disk's free space, without a disk_budget
_HOST_SHARE = 0.5  # of available host memory: no other process can use pinned memory


def open_tiers(
    plan: Plan, policy: Offload, limits: Mapping[str, int] | None = None, reuse: Tiers | None = None
) -> dict[str, Tier]:
    """The tiers that ``plan`` offloads to, by name.

    Args:
        limits: Most bytes of each tier for all plans together; by default the amounts that ``policy`` names. A tier
            without one holds what the plan needs.
        reuse: Open tiers of other plans, to be used again.

    Raises:
        TierError: one of them is not on this machine, or cannot be used.
    """
    limits = _named_amounts(policy) if limits is None else limits
    sizes: dict[str, list[int]] = {}
    for d in plan.decisions:
        if d.action in TIER_OF:
            sizes.setdefault(TIER_OF[d.action], []).append(d.bytes)
    opened: dict[str, Tier] = {}
    for name, offloaded in sizes.items():
        check_tier(name, plan.device)
        # Plans do not round up the bytes of storages, as tiers do. A plan within its budget must still fit.
        need_bytes = sum(map(disk_bytes if name == DISK else host_bytes, offloaded))
        limit = limits.get(name, math.inf)
        tier = (reuse or {}).get(name)
        if name == DISK:
            if not isinstance(tier, DiskTier):
                tier = DiskTier(policy.scratch_dir, limit, need_bytes=need_bytes, checksums=policy.checksums)
            tier.space.budget_bytes = max(tier.space.budget_bytes, need_bytes)
        else:
            tier = tier if isinstance(tier, HostTier) else HostTier(limit)
            tier.pool.budget_bytes = max(tier.pool.budget_bytes, need_bytes)
            tier.reserve(offloaded)
        opened[name] = tier
    return opened


def usable(device: str, policy: Offload) -> dict[str, int]:
    """The tiers that ``policy`` allows on ``device``, and the most bytes that plans may offload to each.

    Raises:
        TierError: a tier does not exist for this device, or its directory cannot be used.
    """
    capacities, scratch_dir = _named_amounts(policy), policy.scratch_dir
    if scratch_dir is not None or DISK in capacities:
        check_tier(DISK, device)
        os.close(open_scratch(scratch_dir))
        free_bytes = shutil.disk_usage(tempfile.gettempdir() if scratch_dir is None else scratch_dir).free
        capacities.setdefault(DISK, int(_FREE_SHARE * free_bytes))
    if HOST in capacities or (policy.host_budget == "auto" and is_accelerator(device)):
        check_tier(HOST, device)
        capacities.setdefault(HOST, automatic_host_bytes())
    return capacities


def _named_amounts(policy: Offload) -> dict[str, int]:
    amounts = {DISK: policy.disk_budget, HOST: policy.host_budget}
    return {tier: int(parse_budget(amount)) for tier, amount in amounts.items() if amount not in (None, "auto")}


def automatic_host_bytes() -> int:
    """This rank's share of half of the available host memory."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(_HOST_SHARE * available_host_bytes()) // max(1, int(ranks) if ranks.isdigit() else 1)
