"""What the device's allocator reserves for one rank's step: segments, with what in them is free between blocks."""

from __future__ import annotations

from dataclasses import replace

from lowtide.foresight.rank_memory import RankMemory
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.simulation.allocator_peaks import training_peaks


def reserved_bytes(
    graph: StepGraph, plan: Plan | None, rank: RankMemory, waiting: int, workspaces: int, micro_batches: int,
    *, kept: bool = True,
) -> int | None:  # fmt: skip
    """Bytes of segments, by simulation; None without a plan, and where the allocator is not modelled.

    Args:
        waiting: What other micro-batches hold.
        workspaces: Of the libraries, each thread's.
        micro_batches: Before each step of the optimizer.
        kept: Gradients are kept between steps, as ``peak_bytes`` counts them.
    """
    if plan is None:
        return None
    held = {
        "parameters": rank.parameters,
        "gradients": rank.gradients,
        "optimizer": rank.optimizer,
        "buffers": rank.buffers,
        "batch": graph.resident["batch"],
        "other": rank.gathered + waiting,
        "workspaces": workspaces,
    }
    of_rank = replace(graph, resident=held, optimizer_step_bytes=rank.optimizer_step)
    found = training_peaks(
        of_rank, plan.action_of(), plan.replays_of(), plan.moves, gradients_kept=kept, micro_batches=micro_batches
    )
    return None if found is None else found.reserved_bytes
