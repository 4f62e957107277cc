"""Finished plans on disk, so that the second run of a script plans nothing.

**What finds a plan.** The key is a digest of what decides whether a plan is *valid*: the graph, the budget, the method
and its options, which tiers may be used, the device, and the versions of lowtide and PyTorch. Not in the key: the times
of ops, which differ from run to run, and how much of a tier is free. They decide whether a plan is *good*. They are
kept beside the plan and compared when it is found: a plan that was made when other ops took the time serves only until
another one is made (a machine that does other work measures other times), and one that moves more than a tier has room
for is not used. Before a plan is used, the simulator judges it on the graph at hand, so an entry that is wrong costs
time and no memory. Known weakness: that a tier has more room now is not noticed.

**What is in a plan that was found.** The decisions are those of ``solve``. Its predicted times are those of the run
that planned.

**What is ignored.** A file that is damaged, of another format, another user's, or writable for others is ignored. The
reason is one line of ``CachedPlan``; nothing is raised and nothing is printed.

Entries are gzipped JSON in ``plans`` in the cache directory, and the least recently used ones go. Processes may read
and write the same key at the same time: each writes a whole file, and the last one stays.
"""

import gzip
import hashlib
import json
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowtide import __version__
from lowtide.cache_files import cache_dir, keep_newest, read_file, write_file
from lowtide.errors import LowtideError
from lowtide.graph.costs import Costs
from lowtide.graph.json_format import costs_from_dict, costs_to_dict
from lowtide.graph.step_graph import StepGraph, to_dict
from lowtide.plan import RESERVED, TIER_OF, Plan
from lowtide.planning.plan_request import PlanRequest
from lowtide.simulation.caching_allocator import expandable_segments_here
from lowtide.simulation.simulator import simulate
from lowtide.solvers.arguments import offload_capacities
from lowtide.solvers.build_plan import with_decisions_of
from lowtide.units import format_bytes

VERSION = 1
MOST_PLANS = 200
MOVED_SHARE = 0.2  # Of the step's time that other ops take now: a plan made for such times is not used.
LINK_RATIO = 1.5  # Between a link's speed then and now, in steps of the time.


@dataclass(frozen=True)
class CachedPlan:
    """What the cache has for a request.

    Attributes:
        plan: None where there is none that is good.
        reason: Why a plan that was there is not used, one line; "" where there was none.
        meanwhile: One that fits, and was the fastest when ops took other times: good until a better one is there.
    """

    plan: Plan | None
    reason: str = ""
    meanwhile: Plan | None = None


class PlanCache:
    """The plans in one directory.

    Args:
        directory: Default: ``plans`` in the cache directory (``cache_files.cache_dir``).
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = cache_dir() / "plans" if directory is None else Path(directory)

    def path(self, request: PlanRequest) -> Path:
        """Where the plan for ``request`` is, or would be."""
        return self.directory / f"{request_digest(request)}.json.gz"

    def find(self, request: PlanRequest) -> CachedPlan:
        """The plan that an earlier run kept for such a request."""
        try:
            path = self.path(request)
            data = read_file(path)
        except FileNotFoundError:
            return CachedPlan(None)
        except OSError as error:
            return CachedPlan(None, f"a cached plan was ignored: {error}")
        try:
            plan, costs = _read_entry(data, path.name)
            plan = replace(plan, graph_fingerprint=request.graph.fingerprint)
            reason = _why_no_room(request, plan)
            _check_fits(request, plan, costs)
            why_slow = _why_slow(request, plan, costs)
            meanwhile = with_decisions_of(plan, request.graph, request.costs) if why_slow and not reason else None
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError, LowtideError) as error:
            return CachedPlan(None, f"a cached plan was ignored: {path} is damaged ({error})")
        if reason:
            return CachedPlan(None, f"a cached plan was ignored: {reason}")
        if why_slow:
            return CachedPlan(None, f"a cached plan served until another one was made: {why_slow}", meanwhile)
        with suppress(OSError):
            os.utime(path)  # it is the most recently used now
        return CachedPlan(plan)

    def keep(self, request: PlanRequest, plan: Plan) -> str:
        """Store ``plan`` for later runs; why that was not possible, "" if it was."""
        try:
            path = self.path(request)
            entry = {
                "version": VERSION,
                "key": path.name,
                "plan": plan.to_json(),
                "costs": costs_to_dict(request.costs),
            }
            write_file(path, gzip.compress(json.dumps(entry).encode(), compresslevel=6, mtime=0))
            keep_newest(self.directory, MOST_PLANS)
        except (OSError, TypeError) as error:
            return f"the plan is not kept for later runs: {error}"
        return ""


def request_digest(request: PlanRequest) -> str:
    """Equal where a plan for one request is valid for the other; the module's docstring says what is in it.

    Raises:
        TypeError: an option is of a type that JSON does not have.
    """
    facts = {
        "lowtide": __version__,
        "torch": request.graph.provenance.get("torch", ""),
        "graph": _lasting_facts(request.graph),
        "device": request.costs.device_name,
        "costs": request.costs.source,
        "budget": request.budget,
        "method": request.method,
        "tiers": sorted(request.offload),
        "options": dict(request.options),
        "expandable_segments": expandable_segments_here(),
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _lasting_facts(graph: StepGraph) -> dict[str, Any]:
    """``graph`` without the times of compiled code and without what nothing is decided by."""
    return to_dict(replace(graph, recorded_ms={}, provenance={}))


def _read_entry(data: bytes, key: str) -> tuple[Plan, Costs]:
    """Raises: many things, if this is not a whole entry for ``key``."""
    body = json.loads(gzip.decompress(data))
    if body["version"] != VERSION:
        raise ValueError(f"it is of version {body['version']!r}, this lowtide reads version {VERSION}")
    if body["key"] != key:
        raise ValueError("it holds the plan for another step")
    return Plan.from_json(body["plan"]), costs_from_dict(body["costs"])


def _why_no_room(request: PlanRequest, plan: Plan) -> str:
    """Why ``plan`` cannot move what it moves; "" if it can."""
    for tier, capacity in offload_capacities(request.costs, request.offload).items():
        used = sum(d.bytes for d in plan.decisions if TIER_OF.get(d.action) == tier)
        if capacity is not None and used > capacity:
            return f"it moves {format_bytes(used)} to the {tier} tier, which has room for {format_bytes(capacity)}"
    return ""


def _check_fits(request: PlanRequest, plan: Plan, costs: Costs) -> None:
    """Judge ``plan``, made with ``costs``, on the graph at hand.

    Raises:
        ValueError: the graph has other ops than ``costs``, or the plan takes more than its budget there.
        PlanMismatchError: the graph does not allow what the plan decides.
    """
    now = request.costs
    if len(costs.op_ms) != len(now.op_ms):
        raise ValueError(f"it has times for {len(costs.op_ms)} ops, the step has {len(now.op_ms)}")
    step = simulate(request.graph, now, plan)
    peak_bytes = (step.reserved_peak_bytes if plan.budget_kind == RESERVED else None) or step.peak_bytes
    if plan.budget_bytes is not None and peak_bytes > plan.budget_bytes:
        raise ValueError(f"its peak is {peak_bytes} bytes, its budget {plan.budget_bytes} bytes")


def _why_slow(request: PlanRequest, plan: Plan, costs: Costs) -> str:
    """Why ``plan``, made when ops took the times of ``costs``, may not be the fastest now; "" if it is."""
    now = request.costs
    moved = _moved_share(costs.op_ms, now.op_ms)
    if moved > MOVED_SHARE:
        return f"ops take other times than when it was made: {moved:.0%} of the step's time moved"
    for tier in offload_capacities(now, request.offload):
        for name in ("store_bytes_per_s", "fetch_bytes_per_s"):
            speeds = [getattr(c.links[tier], name) * c.plain_step_ms for c in (costs, now)]
            if max(speeds) > LINK_RATIO * min(speeds):
                return f"the {tier} tier is not as fast, beside the step, as when it was made"
    return ""


def _moved_share(then: tuple[float, ...], now: tuple[float, ...]) -> float:
    """Share of the step's time that ops take now which others took then, 0 to 1.

    A machine that runs everything at another speed moves nothing, and the same plan is best.
    """
    total_then, total_now = sum(then), sum(now)
    if not total_then or not total_now:
        return float(total_then != total_now)
    return sum(abs(a / total_then - b / total_now) for a, b in zip(then, now)) / 2
