"""torchtitan 0.3 within a budget: its own Trainer and Llama, FSDP2, and one line of its configuration.

    torchrun --nproc_per_node 1 examples/torchtitan/train_llama.py

On no GPU at all: ``lowtide pretend --steps 0 -- torchrun ...``. The tokens are random, so nothing is downloaded.
"""

import gc
from dataclasses import dataclass

import torch
from torch.distributed import get_rank, get_world_size
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from lowtide.integrations.torchtitan import LowtideAC

ROWS, LENGTH, STEPS, WORDS = 4, 2048, 8, 2048


class RandomTokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, **_):
        self.rank = dp_rank

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            rows = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator)
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
        return WORDS


def peak_bytes(activation_checkpoint):
    """Of torchtitan's own loop, with this setting of its own."""
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # rows of one document: no mask of blocks
    trainer = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomTokens.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        checkpoint=CheckpointManager.Config(enable=False),
        training=TrainingConfig(local_batch_size=ROWS, seq_len=LENGTH, steps=STEPS, disable_cuda_graphs=True),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=activation_checkpoint,
    ).build()
    peaks, forward_backward = [], trainer.fwd_bwd_fn

    def counted(*args, **kwargs):
        torch.cuda.reset_peak_memory_stats()  # torchtitan's metrics do so too
        loss = forward_backward(*args, **kwargs)
        peaks.append(torch.cuda.max_memory_allocated())
        for fit in LowtideAC.fits:
            fit.wait()  # a short example waits for its plan; a long training has it after some steps
        return loss

    trainer.fwd_bwd_fn = counted
    trainer.train()
    trainer.close()
    return max(peaks)


plain = peak_bytes(None)
gc.collect()  # the first Trainer is a cycle
planned = peak_bytes(LowtideAC.Config(budget=f"{int(0.6 * plain)}B"))  # people write "60GiB" there
(fit,) = LowtideAC.fits
status = fit.status()
if get_rank() == 0:
    print(*status.reasons, sep="\n")
    print(
        f"peak {plain / 2**20:.1f} MiB -> {planned / 2**20:.1f} MiB, {status.planned_steps} of {status.steps} steps "
        f"ran under a plan, on {get_world_size()} ranks"
    )
