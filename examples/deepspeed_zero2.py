"""Train under DeepSpeed ZeRO-2 on the CPU, in bf16 with accumulation, plain and within 60 % of the activation memory.

python examples/deepspeed_zero2.py    (DeepSpeed builds a small kernel when it is used for the first time: a minute)
"""

import os
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}

import deepspeed
import torch
from torch import nn

from lowtide.integrations import deepspeed as lowtide_deepspeed
from lowtide.measurement.allocator import peak_bytes

ROWS, WIDTH, STEPS = 4096, 128, 12
CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    # DeepSpeed allocates these inside the step. The default, 5e8 elements, is more than this model's whole step.
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


def train(budget: str | None) -> tuple[list[float], float, float]:
    """Losses, the highest peak of the last steps in MiB, their CPU time in seconds."""
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=(model := Model()), model_parameters=model.parameters(), config=CONFIG)
    fit = lowtide_deepspeed.fit(engine, budget=budget) if budget else None
    losses, peaks, seconds = [], [], []

    def step() -> None:
        loss = engine(x)
        engine.backward(loss)
        losses.append(loss.item())

    for i in range(STEPS):
        x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(i))
        start = time.process_time()
        peaks.append(peak_bytes(step))
        seconds.append(time.process_time() - start)
        engine.step()
        if fit and i == 1:
            fit.wait()
    if fit:
        print(fit.status())
        fit.remove()
    engine.destroy()
    return losses, max(peaks[4:]) / 2**20, sum(seconds[4:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    losses, peak, seconds = train(None)
    same, fitted_peak, fitted_seconds = train("60%")
    assert losses == same
    print(f"peak {peak:.1f} MiB -> {fitted_peak:.1f} MiB, {seconds:.2f} s -> {fitted_seconds:.2f} s, losses identical")
    torch.distributed.destroy_process_group()
