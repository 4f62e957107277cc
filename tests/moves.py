"""Plans that move storages, made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lowtide.graph.costs import DISK, HOST, Costs, Link
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import DISK_OFFLOAD, Plan
from lowtide.solvers.draft import Draft, finish
from lowtide.solvers.structure import close
from lowtide.transfers import Moves

FAST = Link(store_bytes_per_s=1e12, fetch_bytes_per_s=1e12)


def movable(graph: StepGraph) -> list[int]:
    """Stored storages that may be moved."""
    return [s for s in sorted(graph.stored) if not graph.storages[s].fixed]


def moving(
    graph: StepGraph,
    storages: Iterable[int],
    *,
    action: str = DISK_OFFLOAD,
    recomputed: Iterable[int] = (),
    window_bytes: int = 0,
    fetch_at: Mapping[int, int] | None = None,
    link: Link = FAST,
) -> Plan:
    """A plan that moves ``storages``, recomputes ``recomputed`` and saves the rest."""
    costs = Costs((1.0,) * len(graph.ops), links={DISK: link, HOST: link})
    actions = {**close(graph, recomputed), **dict.fromkeys(storages, action)}
    draft = Draft(actions, moves=Moves(window_bytes, fetch_at or {}))
    return finish(graph, costs, draft, method="none", budget_bytes=None, start_s=0)
