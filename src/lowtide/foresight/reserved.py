"""What the device's allocator reserves for one rank's step: segments, with what in them is free between blocks."""

from __future__ import annotations

from dataclasses import replace

from lowtide.foresight.rank_memory import RankMemory
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.simulation.simulator import simulate_actions


def reserved_bytes(
    graph: StepGraph, costs: Costs, plan: Plan | None, rank: RankMemory, waiting: int, workspaces: int
) -> int | None:
    """Bytes of segments, by simulation; None without a plan, and where the allocator is not modelled.

    Args:
        waiting: What other micro-batches hold.
        workspaces: Of the libraries, each stream's.
    """
    if plan is None:
        return None
    held = {
        "parameters": rank.parameters,
        "gradients": rank.gradients,
        "optimizer": rank.optimizer,
        "buffers": rank.buffers,
        "batch": graph.resident["batch"],
        "other": rank.gathered + waiting + workspaces,
    }
    of_rank = replace(graph, resident=held, optimizer_step_bytes=rank.optimizer_step)
    return simulate_actions(of_rank, costs, plan.action_of(), plan.replays_of(), plan.moves).reserved_peak_bytes
