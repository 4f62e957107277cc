"""Runs in each rank of ``test_torchtitan.py``: torchtitan's own loop with and without lowtide, told as plain values."""

from __future__ import annotations

import os
import types
from typing import Any

import torch
from support import torchtitan_on_cpu
from support.ranks import digest
from torch import nn

from lowtide.measurement.allocator import measuring


def _start(rank: int) -> None:
    world = torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torchtitan_on_cpu.use_torchtitan()


def policies(
    rank: int,
    folder: str,
    budget_share: float,
    accumulate: int,
    compiled: bool = False,
    steps: int = 6,
    split: bool = False,
) -> dict[str, Any]:
    """No checkpointing, torchtitan's own, and lowtide's within a share of the plain step's activations.

    Compiled, torchtitan has one more, the compiler's memory budget. Split by tensor parallelism, only its plain way and
    lowtide's run.
    """
    _start(rank)  # before anything of torchtitan is imported
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    from lowtide.integrations.torchtitan import LowtideAC

    own = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    if compiled:
        own["memory budget"] = MemoryBudgetAC.Config(memory_budget=0.5)
    how = {"compiled": compiled, "split": split, "steps": steps}
    wanted = ("none",) if split else own
    found = {name: _trained(own[name], folder, accumulate, **how) for name in wanted}
    if compiled:
        torch._functorch.config.activation_memory_budget = 1.0  # torchtitan leaves it as it set it
    there, plain = found["none"]["there"], max(found["none"]["peaks"])
    budget = there + int(budget_share * (plain - there))
    found["lowtide"] = _trained(LowtideAC.Config(budget=str(budget) + "B"), folder, accumulate, **how)
    found["lowtide"]["budget"] = budget
    if not (compiled or split):
        found["over full"] = _trained(FullAC.Config(), folder, accumulate, fit_budget=budget)
    return found


def _trained(
    policy: Any,
    folder: str,
    accumulate: int,
    fit_budget: int | None = None,
    *,
    compiled: bool = False,
    split: bool = False,
    steps: int = 6,
) -> dict[str, Any]:
    """What ``torchtitan_on_cpu.trained`` tells, lowtide's status where there is one, and what is on the model."""
    from lowtide.integrations import torchtitan
    from lowtide.integrations.torchtitan import LowtideAC

    trainer = torchtitan_on_cpu.made(
        torchtitan_on_cpu.trainer_config(
            policy, steps=steps, accumulate=accumulate, folder=folder, compiled=compiled, split=split
        )
    )
    if compiled:
        torch._dynamo.reset()  # each policy has the blocks compiled for itself
    is_ours = isinstance(policy, LowtideAC.Config)
    fits = [] if fit_budget is None else [torchtitan.fit(trainer, budget=fit_budget)]

    def wait(_: Any) -> None:
        for fit in LowtideAC.fits if is_ours else fits:
            fit.wait()

    result = torchtitan_on_cpu.trained(trainer, between=wait, around=measuring)
    fits = LowtideAC.fits if is_ours else fits
    model = trainer.model_parts[0]
    result["wrapped"] = sum("CheckpointWrapper" in type(m).__name__ for m in model.modules())
    result["status"] = fits[0].status() if fits else None
    result["weights"] = digest(result["weights"])  # tensors would go by a file of this process, which ends
    for fit in fits:
        fit.remove()
    return result


def refused(rank: int, folder: str) -> dict[str, str]:
    """What is refused, by name."""
    _start(rank)
    from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

    from lowtide.integrations import torchtitan
    from lowtide.integrations.torchtitan import LowtideAC

    told = {}
    trainer = torchtitan_on_cpu.made(torchtitan_on_cpu.trainer_config(folder=folder))
    trainer.model_parts.append(nn.Linear(2, 2))
    told["parts"] = _error(lambda: torchtitan.fit(trainer, budget="1GiB"))
    trainer.model_parts.pop()
    before, trainer.config.activation_checkpoint = trainer.config.activation_checkpoint, MemoryBudgetAC.Config()
    told["compiler"] = _error(lambda: torchtitan.fit(trainer, budget="1GiB"))
    trainer.config.activation_checkpoint = before
    told["weights"] = _error(lambda: torchtitan.fit(trainer, budget="1KiB"))
    torch._dynamo.reset()
    config = torchtitan_on_cpu.trainer_config(folder=folder, compiled=True)
    told["on_excess"] = _error(lambda: torchtitan.fit(torchtitan_on_cpu.made(config), budget="1GiB", on_excess="raise"))
    policy, layer = LowtideAC.Config(budget="1GiB").build(dump_folder=""), nn.Linear(2, 2)
    policy.apply(layer)
    graphed = types.FunctionType((lambda call: call()).__code__, {"__name__": "torchtitan.distributed.cudagraph"})
    told["graphs"] = _error(lambda: graphed(lambda: layer(torch.ones(2))))
    told["typing error"] = _error(lambda: LowtideAC.Config(budget="6Gob").build(dump_folder=""))
    versions = torchtitan.check_version.__globals__["SUPPORTED"]
    before, versions["torchtitan"] = versions["torchtitan"], ("9", "10")
    told["version"] = _error(lambda: LowtideAC.Config(budget="6GiB").build(dump_folder=""))
    versions["torchtitan"] = before
    return told


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
