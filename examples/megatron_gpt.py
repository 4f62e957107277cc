"""Train Megatron-Core's GPT in a plain loop on the CPU, plain and within 60 % of the activation memory.

python examples/megatron_gpt.py
"""

import os
import time

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig

import lowtide
from lowtide.measurement.allocator import peak_bytes

# Megatron asks CUDA for the device and for random states, also on the CPU. On a GPU leave these lines out.
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
torch.cuda.manual_seed = torch.manual_seed
random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

ROWS, LENGTH, WORDS, STEPS = 8, 128, 512, 8


def train(budget: str | None) -> tuple[list[float], float, float]:
    """Losses, the highest peak of the last steps in MiB, their CPU time in seconds."""
    random.model_parallel_cuda_manual_seed(1)
    # Recomputation that is on is switched off while the model is fitted: a plan recomputes less.
    config = TransformerConfig(num_layers=4, hidden_size=128, num_attention_heads=4, use_cpu_initialization=True)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=LENGTH)
    fit = lowtide.fit(model, budget=budget) if budget else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    losses, peaks, seconds = [], [], []

    def step() -> None:
        loss = model(ids, positions, mask, labels=ids).mean()
        loss.backward()
        losses.append(loss.item())

    for i in range(STEPS):
        ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(i))
        start = time.process_time()
        peaks.append(peak_bytes(step))
        seconds.append(time.process_time() - start)
        optimizer.step()
        optimizer.zero_grad()
        if fit and i == 1:
            fit.wait()
    if fit:
        print(fit.status())
        fit.remove()
    return losses, max(peaks[4:]) / 2**20, sum(seconds[4:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    losses, peak, seconds = train(None)
    same, fitted_peak, fitted_seconds = train("60%")
    assert losses == same
    print(f"peak {peak:.1f} MiB -> {fitted_peak:.1f} MiB, {seconds:.2f} s -> {fitted_seconds:.2f} s, losses identical")
    torch.distributed.destroy_process_group()
