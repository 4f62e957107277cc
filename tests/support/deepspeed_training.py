"""Runs in each rank of ``test_deepspeed.py``: small trainings by a DeepSpeed engine, told as plain values."""

from __future__ import annotations

import os
from typing import Any

import torch
from support.ranks import digest
from support.watched_training import Layered, resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes

ROWS = 256
_CHECKPOINTING: dict[str, Any] = {"partition_activations": False}


def _deepspeed(rank: int) -> Any:
    """DeepSpeed on the CPU; its kernel for shared memory, which g++ would build in a minute, is left out."""
    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", LOCAL_RANK=str(rank), RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(torch.distributed.get_world_size()), MASTER_ADDR="127.0.0.1")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    return deepspeed


class Net(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.net, self.checkpointed = Layered(6), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            from deepspeed import checkpointing

            x.requires_grad_()
            for layer in self.net.layers:
                x = x + checkpointing.checkpoint(layer, x)
        else:
            x = self.net(x)
        return x.float().square().mean()


def net(checkpointed: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(checkpointed)


def engine_of(rank: int, stage: int, model: Net | None = None, *, bf16: bool = False, **settings: Any) -> Any:
    model = model or net()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000},
        "bf16": {"enabled": bf16},
        **settings,
    }
    return _deepspeed(rank).initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(
    rank: int, stage: int, *, fitted: str = "", budget: Any = "60%", steps: int = 8, checkpointed: bool = False,
    **options: Any,
) -> dict:  # fmt: skip
    """A few steps; fitted as ``engine`` or ``module``, or as ``model`` before the engine is made."""
    model = net(checkpointed)
    fit = lowtide.fit(model, budget=budget) if fitted == "model" else None
    engine = engine_of(rank, stage, model, **options)
    if fitted in ("engine", "module"):
        fit = lowtide.fit(engine if fitted == "engine" else model, budget=budget)
    module, dtype = engine.module, next(engine.module.parameters()).dtype
    torch.manual_seed(rank)
    losses, peaks = [], []

    def step() -> None:
        loss = engine(x)
        engine.backward(loss)
        losses.append(loss.item())

    for i in range(steps):
        x = torch.randn(ROWS, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(2 * i + rank)).to(
            dtype
        )
        there = resident_bytes(module) + x.nbytes
        peaks.append(there + peak_bytes(step))
        engine.step()
        if fit is not None and stage < 3 and i == 1:
            fit.wait(60)
    weights = [p.float() for p in module.parameters()]  # what of them is on this rank
    told = {"losses": losses, "weights": digest(weights), "peaks": peaks}
    if fit is not None:
        told["status"] = fit.status()
        told["plan"] = fit.plans[-1] if fit.plans else None
        told["mismatched"] = sum(p.tape.counts.mismatched for p in fit._watcher.shelf.plans)
        fit.remove()
    engine.destroy()
    return told


WAYS: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"stage": 0, "fitted": "engine"},
    "ZeRO-1": {"stage": 1, "fitted": "module"},
    "ZeRO-2": {"stage": 2, "fitted": "engine"},
    "ZeRO-2 in bf16": {"stage": 2, "fitted": "engine", "bf16": True},
}


SHORT = ("ZeRO-1", "ZeRO-2 in bf16")


def all_ways(rank: int, ways: tuple[str, ...]) -> dict[str, tuple[dict, dict]]:
    return {way: (train(rank, **(WAYS[way] | {"fitted": ""})), train(rank, **WAYS[way])) for way in ways}


def checkpointed(rank: int) -> tuple[dict, dict]:
    """Layers inside ``deepspeed.checkpointing.checkpoint``."""
    how = {"stage": 2, "checkpointed": True, "activation_checkpointing": _CHECKPOINTING}
    return train(rank, **how), train(rank, fitted="engine", budget="90%", **how)


def diagnosed(rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the doctor says of checkpointing settings without and with DeepSpeed's own checkpoint in the model."""
    settings = {"activation_checkpointing": {"partition_activations": False, "contiguous_memory_optimization": True}}
    told = []
    for own in (False, True):
        engine = engine_of(rank, 1, net(own), **settings)
        found = lowtide.diagnose(engine, torch.randn(ROWS, 64), only=["LT109"])
        told.append(found.codes + found.notes)
        engine.destroy()
    return told[0], told[1]


def partitioned(rank: int) -> tuple[str, str, dict, dict]:
    """ZeRO-3: what ``fit`` says of engine and module, and trainings without a ``fit`` and with one that came early."""
    told = []
    engine = engine_of(rank, 3)
    for model in (engine, engine.module):
        try:
            lowtide.fit(model, budget="60%")
        except lowtide.LowtideError as error:
            told.append(f"{type(error).__name__}: {error}")
    x = torch.randn(ROWS, 64)
    engine.backward(engine(x))
    engine.destroy()
    return *told, train(rank, 3), train(rank, 3, fitted="model")


def settings(rank: int) -> dict[str, Any]:
    """What ``lowtide.integrations.deepspeed.fit`` says of DeepSpeed's own checkpointing, and of what is no engine."""
    from lowtide.integrations import deepspeed as integration

    told: dict[str, Any] = {}
    with integration.fit(engine_of(rank, 1, activation_checkpointing=_CHECKPOINTING), budget="60%") as fit:
        told["a block"] = fit.status().reasons
    with integration.fit(engine_of(rank, 1), budget="60%") as fit:
        told["no block"] = fit.status().reasons
    on = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
    for what, model in (("cpu_checkpointing", engine_of(rank, 1, **on)), ("no engine", nn.Linear(4, 4))):
        try:
            integration.fit(model, budget="60%")
        except lowtide.IntegrationError as error:
            told[what] = str(error)
    return told
