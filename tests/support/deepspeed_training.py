"""Runs in each rank of ``test_deepspeed.py``: small trainings by a DeepSpeed engine, told as plain values."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from support.ranks import digest
from support.sharded_training import Collectives
from support.watched_training import Layered, resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.recording import sharding as recording
from lowtide.step.sharding import windows

ROWS = 256
# The least that DeepSpeed keeps: by default it would never free parameters as small as these.
FREED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
AHEAD = {"stage3_prefetch_bucket_size": 20_000}
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


class Block(nn.Module):
    """Reads a parameter of its own between those of its parts, and one of another module."""

    def __init__(self, width: int, tied: nn.Linear) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale, self.shift = nn.Parameter(torch.rand(2 * width)), nn.Parameter(torch.zeros(2 * width))
        self.others = [tied]  # not a part of this one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (self.up(self.norm(x)) * self.scale + self.shift).sin()  # autograd does not store the shift
        h = nn.functional.linear(h, self.others[0].weight.t()).sin()
        return x + self.drop(self.down(h.sin()))


class Gated(nn.Module):
    """Parameters of many windows: each part's, each block's around them, the root's, and one of another module."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tied, self.shift = nn.Linear(2 * width, 2 * width), nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(Block(width, self.tied) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(torch.cat((x, x + self.shift), dim=1)).chunk(2, dim=1)[0].sin()
        for block in self.blocks:
            x = block(x)
        return (x * self.shift.exp()).float().square().mean()


def net(checkpointed: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(checkpointed)


def gated() -> Gated:
    torch.manual_seed(0)
    return Gated()


def engine_of(
    rank: int, stage: int, model: Net | None = None, *, bf16: bool = False, zero: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:  # fmt: skip
    """``zero``: more of the settings for ZeRO."""
    model = model or net()
    buckets = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **buckets, **(zero or {})},
        "bf16": {"enabled": bf16},
        **settings,
    }
    return _deepspeed(rank).initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(
    rank: int, stage: int, *, fitted: str = "", budget: Any = "60%", steps: int = 8, checkpointed: bool = False,
    leaves: bool | None = None, evaluated: bool = False, **options: Any,
) -> dict:  # fmt: skip
    """A few steps; fitted as ``engine`` or ``module``, or as ``model`` before the engine is made.

    Args:
        leaves: Of a model with blocks: whether DeepSpeed gathers each block at once.
        evaluated: A pass without gradients comes before every second step.
    """
    model: Any = net(checkpointed) if leaves is None else gated()
    if leaves:
        _deepspeed(rank).utils.set_z3_leaf_modules(model, [Block])
    fit = lowtide.fit(model, budget=budget) if fitted == "model" else None
    engine = engine_of(rank, stage, model, **options)
    if fitted in ("engine", "module"):
        fit = lowtide.fit(engine if fitted == "engine" else model, budget=budget)
    module, dtype = engine.module, next(engine.module.parameters()).dtype
    torch.manual_seed(rank)
    losses, peaks, sent = [], [], Collectives()

    def step() -> None:
        loss = engine(x)
        engine.backward(loss)
        losses.append(loss.item())

    planned_from = 2 if stage < 3 else 4  # ZeRO-3's second step without an evaluation before it is planned
    for i in range(steps):
        x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(2 * i + rank)).to(dtype)
        if evaluated and i % 2:
            engine.eval()
            with torch.no_grad():
                losses.append(engine(x).item())
            engine.train()
        there = resident_bytes(module) + sum(p.ds_tensor.nbytes for p in module.parameters() if stage == 3) + x.nbytes
        with sent:
            peaks.append(there + peak_bytes(step))
            engine.step()
        if fit is not None and fitted != "model" and i == planned_from - 1:
            fit.wait(60)
    weights = [getattr(p, "ds_tensor", p).float() for p in module.parameters()]  # what of them is on this rank
    told = {"losses": losses, "weights": digest(weights), "peaks": peaks, "sent": dict(sent.seen)}
    if fit is not None:
        told["status"], told["planned from"] = fit.status(), planned_from
        told["plan"] = fit.plans[-1] if fit.plans else None
        told["mismatched"] = sum(p.tape.counts.mismatched for p in fit._lifecycle.plans_by_shape.plans)
        fit.remove()
    engine.destroy()
    return told


WAYS: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"stage": 0, "fitted": "engine"},
    "ZeRO-1": {"stage": 1, "fitted": "module"},
    "ZeRO-2": {"stage": 2, "fitted": "engine"},
    "ZeRO-2 in bf16": {"stage": 2, "fitted": "engine", "bf16": True},
    "ZeRO-3": {"stage": 3, "fitted": "engine", "zero": FREED},
    "ZeRO-3 fetches ahead, in bf16": {"stage": 3, "fitted": "module", "bf16": True, "zero": FREED | AHEAD},
    "ZeRO-3 frees nothing": {"stage": 3, "fitted": "module"},
    "ZeRO-3, windows in windows": {"stage": 3, "fitted": "module", "zero": FREED, "leaves": False, "evaluated": True},
    "ZeRO-3, whole blocks": {"stage": 3, "fitted": "engine", "zero": FREED, "leaves": True},
}
SHORT = ("ZeRO-1", "ZeRO-2 in bf16", "ZeRO-3, windows in windows")


def all_ways(rank: int, ways: tuple[str, ...]) -> dict[str, tuple[dict, dict]]:
    return {way: (train(rank, **(WAYS[way] | {"fitted": ""})), train(rank, **WAYS[way])) for way in ways}


def checkpointed(rank: int) -> tuple[dict, dict]:
    """Layers inside ``deepspeed.checkpointing.checkpoint``."""
    how = {"stage": 2, "checkpointed": True, "activation_checkpointing": _CHECKPOINTING}
    return train(rank, **how), train(rank, fitted="engine", budget="90%", **how)


def diagnosed(rank: int) -> tuple[lowtide.Diagnosis, lowtide.Diagnosis]:
    """What the doctor says of checkpointing settings without and with DeepSpeed's own checkpoint in the model."""
    settings = {"activation_checkpointing": {"partition_activations": False, "contiguous_memory_optimization": True}}
    told = []
    for own in (False, True):
        engine = engine_of(rank, 1, net(own), **settings)
        found = lowtide.diagnose(engine, torch.randn(ROWS, 64), only=["LT109"])
        told.append(found)
        engine.destroy()
    return told[0], told[1]


def partitioned_after_fit(rank: int) -> tuple[dict, dict]:
    return train(rank, 3), train(rank, 3, fitted="model")


def rehearsed(rank: int) -> dict[str, Any]:
    """ZeRO-3: what is said where somebody wants a rehearsal, and whether the engine trains on as another does."""
    told, losses, x = {}, [], torch.ones(ROWS, 64)
    for asks in (False, True):
        engine = engine_of(rank, 3, zero=FREED)
        for what in ("fit", "diagnose", "trace") if asks else ():
            call = getattr(lowtide, what)
            try:
                call(engine, (x,), **({"budget": "60%"} if what == "fit" else {}))
            except lowtide.LowtideError as error:
                told[what] = f"{type(error).__name__}: {error}"
        torch.manual_seed(rank)
        loss = engine(x)
        engine.backward(loss)
        losses.append(loss.item())
        engine.destroy()
    try:
        lowtide.fit(engine.module, budget="60%")
    except lowtide.LowtideError as error:
        told["no engine"] = f"{type(error).__name__}: {error}"
    return told | {"losses": losses}


def guarded(rank: int) -> dict[str, str]:
    """What backward of a planned step raises when its parameters are other ones by then."""
    told = {}
    for what in ("", "an optimizer's step", "a write"):
        model = gated()
        engine, fit = planned(rank, model)
        x = torch.ones(ROWS, 64)
        loss = engine(x)
        if what == "an optimizer's step":
            engine.optimizer._partition_all_parameters()  # as it begins
        elif what == "a write":
            shifts = [block.shift for block in model.blocks]
            with _deepspeed(rank).zero.GatheredParameters(shifts, modifier_rank=0), torch.no_grad():
                for shift in shifts:
                    shift.add_(1)
        try:
            engine.backward(loss)
            told[what] = ""
        except lowtide.LowtideError as error:
            told[what] = f"{type(error).__name__}: {error}"
        fit.remove()
        engine.destroy()
    return told


def reasons_to_save(rank: int) -> dict[str, tuple[set[str], str]]:
    """For each rule about windows that is off: why storages are saved, and what backward raises."""
    told = {}
    off: dict[str, Any] = {
        "none": mock.patch.object(recording, "NAME", recording.NAME),
        "what crosses is saved": mock.patch.object(recording.ShardingRecording, "check_reads", lambda *_: None),
        # As if a block did not gather what it reads of others.
        "blocks gather what they read": _other_windows(),
    }
    for rule, patched in off.items():
        why, error = set(), ""
        with patched:
            try:
                _, fit = planned(rank, gated(), budget="30%" if "crosses" in rule else "50%")
                why = {s.fixed for s in fit.graph.storages}
            except lowtide.LowtideError as raised:
                error = f"{type(raised).__name__}: {raised}"
        told[rule] = why, error
    return told


def _other_windows() -> Any:
    windows_of = windows.windows_of
    return mock.patch.object(
        windows, "windows_of", lambda model: windows_of(model) | {"blocks.0": [model.blocks[0].scale]}
    )


def without_a_plan(rank: int) -> tuple[dict, dict, int, list[set[str]]]:
    """Two steps, plain and within so many bytes; why parameters are out of reach in the real windows and in others."""
    how: dict[str, Any] = WAYS["ZeRO-3, windows in windows"] | {"steps": 2, "evaluated": False}
    plain = train(rank, **(how | {"fitted": ""}))
    budget, why_not = int(0.6 * max(plain["peaks"])), windows.OpenWindows.why_out_of_reach
    told: list[set[str]] = [set(), set()]
    for at, other in enumerate((nullcontext(), _other_windows())):

        def noted(self: Any, *read: Any, at: int = at) -> str:
            told[at].add(why := why_not(self, *read))
            return why

        with other, mock.patch.object(windows.OpenWindows, "why_out_of_reach", noted):
            ours = train(rank, **(how | {"budget": budget}))
        assert ours["losses"] == plain["losses"] and ours["weights"] == plain["weights"]
        if at == 0:
            kept = ours
    return plain, kept, budget, told


def alone(rank: int, ways: tuple[str, ...]) -> dict[str, Any]:
    """All that one rank is asked. DeepSpeed keeps what ``settings`` asks of its checkpointing: last."""
    return {
        "trained": all_ways(rank, ways),
        "without a plan": without_a_plan(rank),
        "partitioned after fit": partitioned_after_fit(rank),
        "rehearsed": rehearsed(rank),
        "guarded": guarded(rank),
        "reasons to save": reasons_to_save(rank),
        "diagnosed": diagnosed(rank),
        "settings": settings(rank),
    }


def planned(rank: int, model: nn.Module, budget: str = "50%") -> tuple[Any, lowtide.Fit]:
    """An engine whose steps run under a plan."""
    engine = engine_of(rank, 3, model, zero=FREED)
    fit = lowtide.fit(engine, budget=budget)
    for i in range(4):
        engine.backward(engine(torch.ones(ROWS, 64)))
        engine.step()
        if i == 2:
            fit.wait(60)
    return engine, fit


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
