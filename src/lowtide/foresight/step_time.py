"""How long one optimizer's step takes on all ranks: micro-batches, what ranks exchange, the optimizer.

Gathering and reducing parameters and gradients overlaps with computing, as far as that lasts; what tensor parallel
ranks sum does not. Each rank moves (n - 1) / n of what is gathered or reduced, over the slowest link of the table (ring
algorithms: Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). All ranks are of one machine.
"""

from __future__ import annotations

from lowtide.estimation.device_table import Device
from lowtide.foresight.rank_memory import RankMemory, parameter_bytes
from lowtide.foresight.setup import Setup
from lowtide.foresight.subjects import Facts

_LINK_SHARE = 0.8  # of its peak that a link reaches
_MEMORY_SHARE = 0.85
_HOST_BYTES_PER_S = 50e9  # assumed: of an optimizer's step on the host


def step_ms(setup: Setup, facts: Facts, rank: RankMemory, micro_ms: float, summed_bytes: int) -> float:
    """Milliseconds of one optimizer's step.

    Args:
        micro_ms: Of forward and backward of one micro-batch on one rank, as if alone.
        summed_bytes: What tensor parallel ranks sum in one micro-batch.
    """
    device, computed = setup.device, setup.accumulate * micro_ms
    tensor = setup.accumulate * _ring_ms(device, 2 * summed_bytes, setup.tensor_parallel)
    exchanged = _ring_ms(device, _exchanged_bytes(setup, facts), setup.data_parallel)
    return max(computed + tensor, exchanged) + _optimizer_ms(setup, rank, device)


def _exchanged_bytes(setup: Setup, facts: Facts) -> int:
    """Among data parallel ranks, in one optimizer's step."""
    whole = sum(map(parameter_bytes, facts.parameters))
    gradients = sum(p.elements * p.itemsize for p in facts.parameters if p.trains)
    if setup.sharding in ("zero3", "fsdp"):  # gathered in forward and in backward, reduced after it
        return setup.accumulate * (2 * whole + gradients)
    return 2 * gradients


def _ring_ms(device: Device, size: int, ranks: int) -> float:
    return 1e3 * size * (ranks - 1) / ranks / (_LINK_SHARE * device.peer_link_bytes_per_s)


def _optimizer_ms(setup: Setup, rank: RankMemory, device: Device) -> float:
    """Reads and writes state and parameters, and reads gradients."""
    if setup.optimizer == "none":
        return 0.0
    moved = 2 * rank.parameters * bool(rank.gradients) + rank.gradients
    if setup.lora_rank:
        moved = 3 * rank.gradients
    if setup.offload_optimizer:
        there_and_back = 2 * rank.gradients / (_LINK_SHARE * device.host_link_bytes_per_s)
        return 1e3 * (there_and_back + 2 * rank.host / _HOST_BYTES_PER_S)
    return 1e3 * (moved + 2 * rank.optimizer) / (_MEMORY_SHARE * device.bandwidth_bytes_per_s)
