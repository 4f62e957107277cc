"""What a forecast is made of: bytes by part and by module, and what was assumed, in words."""

from __future__ import annotations

from collections import defaultdict

from lowtide.explanation import collapse_path
from lowtide.foresight.device_peak import BLAS_HANDLES, COMMUNICATION_BYTES, amounts, groups
from lowtide.foresight.rank_memory import RankMemory, parameter_bytes
from lowtide.foresight.subjects import Facts
from lowtide.foresight.training_setup import TrainingSetup
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph


def parts(
    setup: TrainingSetup, rank: RankMemory, batch: int, activations: int, waiting: int, allocated: int, resident: int,
    gradients: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """Of the expected peak: in the step, or in ``optimizer.step()`` where that takes more.

    Args:
        gradients: Those that are there at the step's peak; None: all.
    """
    expected = int(amounts(setup, allocated, resident).expected)
    in_step = resident + activations == allocated
    if in_step and gradients is not None:
        activations += rank.gradients - gradients
    else:
        gradients = rank.gradients
    found = {
        "parameters": rank.parameters,
        "gradients": gradients,
        "optimizer": rank.optimizer,
        "buffers": rank.buffers,
        "batch": batch,
        "gathered": rank.gathered,
        "activations": activations - waiting if in_step else 0,
        "micro_batches_that_wait": waiting if in_step else 0,
        "optimizer_step": 0 if in_step else allocated - resident,
        "workspace": BLAS_HANDLES * setup.device.blas_workspace_bytes,
        "context": setup.context_bytes,
    }
    found["communication"] = groups(setup) * COMMUNICATION_BYTES
    return found | {"fragmentation": expected - sum(found.values())}


def by_module(facts: Facts, graph: StepGraph | None, costs: Costs | None) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("parameters", "activations", "step_ms"), 0))
    for p in facts.parameters:
        found[collapse_path(p.name.rpartition(".")[0])]["parameters"] += parameter_bytes(p)
    if graph is not None and costs is not None:
        for s in graph.stored:
            maker = graph.storages[s].op
            assert maker is not None
            found[collapse_path(graph.scope(graph.ops[maker]))]["activations"] += graph.storages[s].bytes
        for op in graph.ops:
            found[collapse_path(graph.scope(op))]["step_ms"] += costs.op_ms[op.id]
    return {path: dict(row) for path, row in sorted(found.items())}
