"""torchtitan's real Trainer on a machine without an accelerator, and a small Llama with tokens of our own.

torchtitan asks the accelerator for its module, its name and its memory. ``use_torchtitan`` replaces just these, before
the rest of torchtitan is imported, and starts gloo; nothing that computes is replaced.
"""

from __future__ import annotations

import statistics
import time
import types
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch


def use_torchtitan() -> None:
    """Put the replacements in place. A process group of gloo has to be there."""
    from torchtitan.tools import utils

    device = types.ModuleType("cpu_as_device")
    vars(device).update({name: getattr(torch.cpu, name) for name in dir(torch.cpu)})
    memory = types.SimpleNamespace(total_memory=1 << 36, name="CPU")
    vars(device).update(
        set_device=lambda _: None, get_device_name=lambda *_: "CPU", get_device_properties=lambda *_: memory,
        reset_peak_memory_stats=lambda *_: None, empty_cache=lambda: None, memory_stats=lambda *_: {},
        current_device=lambda: 0,
    )  # fmt: skip
    utils.device_type, utils.device_module = "cpu", device
    utils.get_local_device = lambda: torch.device("cpu")
    if not hasattr(torch.distributed, "set_timeout"):  # newer than 2.13; gloo's timeout stays as it is
        torch.distributed.set_timeout = lambda *_: None


def trainer_config(
    policy: Any = None,
    *,
    steps: int = 6,
    layers: int = 3,
    accumulate: int = 1,
    folder: str = ".",
    compiled: bool = False,
    split: bool = False,
) -> Any:
    """Of a small Llama, sharded over the ranks that there are, with this activation checkpointing.

    Args:
        compiled: Each block by Inductor, as torchtitan does it.
        split: By tensor parallelism over two ranks, and sharded over the pairs that there are.
    """
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            vocabulary: int = 2048

        def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
            self.vocabulary, self.shape, self.rank = config.vocabulary, (local_batch_size, seq_len + 1), dp_rank

        def __iter__(self):
            generator = torch.Generator().manual_seed(self.rank)
            while True:
                rows = torch.randint(0, self.vocabulary, self.shape, generator=generator)
                yield {"input": rows[:, :-1]}, rows[:, 1:]

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **_):
            self.eos_id = 0

        def encode(self, *_, **__):
            return []

        def decode(self, *_, **__):
            return ""

        def get_vocab_size(self):
            return 2048

    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:layers]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # FlexAttention has no backward here
    parallelism = ParallelismConfig()
    if split:  # torchtitan's default backend fails here when it shards what it has split, with lowtide and without
        parallelism = ParallelismConfig(tensor_parallel_degree=2, spmd_backend="partial_dtensor")
    world = torch.distributed.get_world_size() // parallelism.tensor_parallel_degree
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        tokenizer=NoTokenizer.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=4, seq_len=128, steps=steps, global_batch_size=4 * world * accumulate,
            disable_cuda_graphs=True, mixed_precision_param="float32", mixed_precision_reduce="float32",
        ),
        dataloader=Tokens.Config(),
        metrics=MetricsProcessor.Config(log_freq=100),
        parallelism=parallelism,
        compile=CompileConfig(enable=compiled, components=["model"]),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=policy,
    )  # fmt: skip


def made(config: Any) -> Any:
    """Its Trainer, from the same seed each time."""
    torch.manual_seed(0)
    return config.build()


def trained(trainer: Any, *, between: Any = None, around: Any = None) -> dict[str, Any]:
    """Train by torchtitan's own loop.

    Args:
        between: Called after each step.
        around: ``lowtide.measurement.allocator.measuring``: around each forward and backward.

    Returns:
        Losses, weights, and peaks of forward and backward with what was ``there`` before (at its most), seconds of
        a step (the median of those in the second half).
    """
    losses: list[str] = []
    peaks: list[int] = []
    seconds: list[float] = []
    there: list[int] = []
    body, step = trainer.fwd_bwd_fn, trainer.train_step

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        resident = _resident_bytes(trainer) + sum(a.nbytes for a in args if isinstance(a, torch.Tensor))
        with around(torch.device("cpu")) if around is not None else nullcontext() as counted:
            loss = body(*args, **kwargs)
        if counted is not None:
            peaks.append(resident + counted.peak)
            there.append(resident)
        losses.append(loss.detach().item().hex())
        return loss

    def stepped(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        done = step(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        if between is not None:
            between(trainer)
        return done

    trainer.fwd_bwd_fn, trainer.train_step = noted, stepped
    trainer.train()
    local = [getattr(p, "_local_tensor", p).detach().clone() for p in trainer.model_parts[0].parameters()]
    return {"losses": losses, "weights": local, "peaks": peaks, "there": max(there, default=0),
            "seconds": statistics.median(seconds[len(seconds) // 2 :])}  # fmt: skip


def _resident_bytes(trainer: Any) -> int:
    model = trainer.model_parts[0]
    states = [s for o in trainer.optimizers.optimizers for state in o.state.values() for s in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), *states]
    local = [getattr(t, "_local_tensor", t) for t in tensors if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in local)
