"""How long one optimizer's step takes on all ranks: micro-batches, what ranks exchange, the optimizer.

Gathering and reducing parameters and gradients overlaps with computing, as far as that lasts; what ranks exchange
within layers and between stages does not. Each rank moves (n - 1) / n of what is gathered or reduced, over the slowest
link of the table (ring algorithms: Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). All ranks are
of one machine. A pipeline of p stages takes for m micro-batches as long as its slowest stage for m + p - 1.
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.estimation.device_table import Device
from lowtide.estimation.roofline import HOST_US, LAUNCH_US, LINK_SHARE
from lowtide.foresight.rank_memory import RankMemory, parameter_bytes, replicas
from lowtide.foresight.subjects import Facts
from lowtide.foresight.training_setup import TrainingSetup
from lowtide.graph.step_graph import StepGraph

_NAMESPACES = ("c10d", "_c10d_functional")
# Sent by each of n ranks, for each byte of the result.
_SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * _ring_share(n),
    "allreduce": lambda n: 2 * _ring_share(n),
    "all_gather_into_tensor": lambda n: _ring_share(n),
    "reduce_scatter_tensor": lambda n: n - 1,
    "all_to_all_single": lambda n: _ring_share(n),
}
_BETWEEN_EXPERTS = frozenset({"all_to_all_single"})
_MEMORY_SHARE = 0.85
_LOOP_OPS = 8  # of AdamW for each parameter
_HOST_BYTES_PER_S = 50e9  # assumed: of an optimizer's step on the host


def step_ms(setup: TrainingSetup, facts: Facts, rank: RankMemory, micro_ms: float, graph: StepGraph) -> float:
    """Milliseconds of one optimizer's step.

    Args:
        micro_ms: Of forward and backward of one micro-batch on one rank, as if alone.
        graph: Of that micro-batch; its collectives are those of ranks that divide layers.
    """
    device, rounds = setup.device, setup.accumulate + setup.pipeline_parallel - 1
    within = _moved_ms(device, sum(collective_bytes(graph, setup)))
    if setup.pipeline_parallel > 1:  # the received activations, and their gradients
        within += _moved_ms(device, 2 * graph.resident["batch"])
    exchanged = sum(_moved_ms(device, _ring_share(n) * size) for n, size in _exchanged_bytes(setup, facts).items())
    return max(rounds * (micro_ms + within), exchanged) + _optimizer_ms(setup, facts, rank, device)


def collective_bytes(graph: StepGraph, setup: TrainingSetup) -> list[float]:
    """What one rank sends in each collective of ``graph``."""
    found = []
    for op in graph.ops:
        namespace, _, name = op.name.partition(".")
        kind = name.partition(".")[0].rstrip("_")
        if namespace in _NAMESPACES and kind in _SENT:
            ranks = setup.expert_parallel if kind in _BETWEEN_EXPERTS else setup.tensor_parallel
            found.append(_SENT[kind](ranks) * sum(graph.storages[s].bytes for s in op.makes or op.writes))
    return found


def _exchanged_bytes(setup: TrainingSetup, facts: Facts) -> dict[int, float]:
    """By number of ranks that have the same parameters: among them, in one optimizer's step."""
    found: dict[int, float] = {}
    for p in facts.parameters:
        ranks = replicas(p, setup)
        size: float = 2 * p.gradient_bytes
        if setup.sharding in ("zero3", "fsdp"):  # gathered in forward and in backward, reduced after it
            times = (2 if setup.reshard else 1) * (0.5 if setup.compute_dtype else 1)
            size = setup.accumulate * (times * parameter_bytes(p) + p.gradient_bytes)
        found[ranks] = found.get(ranks, 0) + size
    return found


def _ring_share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _moved_ms(device: Device, size: float) -> float:
    return 1e3 * size / (LINK_SHARE * device.peer_link_bytes_per_s)


def _optimizer_ms(setup: TrainingSetup, facts: Facts, rank: RankMemory, device: Device) -> float:
    """Reads and writes state and parameters, and reads gradients; one parameter after the other launches for each."""
    if setup.optimizer == "none":
        return 0.0
    moved = 2 * rank.parameters * bool(rank.gradients) + rank.gradients
    if setup.lora_rank:
        moved = 3 * rank.gradients
    if setup.offload_optimizer:
        there_and_back = 2 * rank.gradients / (LINK_SHARE * device.host_link_bytes_per_s)
        return 1e3 * (there_and_back + 2 * rank.host / _HOST_BYTES_PER_S)
    moving_ms = 1e3 * (moved + 2 * rank.optimizer) / (_MEMORY_SHARE * device.bandwidth_bytes_per_s)
    if setup.optimizer != "adamw_for_loop":
        return moving_ms
    # Under float16 a GradScaler waits for the gradients, so the device waits for the host; else it is hidden.
    us = HOST_US if setup.precision == "fp16-mixed" else LAUNCH_US
    return max(moving_ms, sum(p.trains for p in facts.parameters) * _LOOP_OPS * us / 1e3)
