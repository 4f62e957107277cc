"""Handmade plans that offload storages, and a disk that returns a wrong bit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from lowtide.graph.costs import DISK, HOST, Costs, Link
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import CPU_OFFLOAD, DISK_OFFLOAD, Moves, Plan
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.search_context import SearchContext

FAST = Link(store_bytes_per_s=1e12, fetch_bytes_per_s=1e12)


def movable(graph: StepGraph) -> list[int]:
    """Stored storages that may be offloaded. What is on the host already (numbers of attention) has no bytes."""
    return [s for s in sorted(graph.stored) if not graph.storages[s].fixed and graph.storages[s].bytes]


def moving(
    graph: StepGraph,
    storages: Iterable[int],
    *,
    action: str | None = None,
    recomputed: Iterable[int] = (),
    max_inflight_bytes: int = 0,
    fetch_at: Mapping[int, int] | None = None,
    link: Link = FAST,
) -> Plan:
    """A plan that offloads ``storages``, by default to the tier of their device, recomputes ``recomputed``."""
    action = action or (DISK_OFFLOAD if graph.device == "cpu" else CPU_OFFLOAD)
    costs = Costs((1.0,) * len(graph.ops), links={DISK: link, HOST: link})
    actions = {**complete_actions(graph, recomputed), **dict.fromkeys(storages, action)}
    candidate = Candidate(actions, moves=Moves(max_inflight_bytes, fetch_at or {}))
    return build_plan(SearchContext(graph, costs), candidate, method="none")


def flip_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every read from disk differ in one bit."""
    preadv = os.preadv

    def flipped(fd: int, buffers: Any, offset: int) -> int:
        count = preadv(fd, buffers, offset)
        buffers[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", flipped)
