"""transformers' Trainer within a memory budget: one callback. Runs on a CPU in a few seconds.

pip install "lowtide[transformers]"
python examples/transformers_trainer.py
"""

import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from lowtide.integrations.transformers import LowtideCallback
from lowtide.measurement.allocator import peak_bytes

torch.set_num_threads(1)


class WaitForPlan(TrainerCallback):
    """A short example waits for its plan; a long training has it after some steps."""

    def __init__(self, lowtide: LowtideCallback) -> None:
        self.lowtide = lowtide

    def on_step_end(self, args, state, control, **_: object) -> None:
        if state.global_step == 2:
            self.lowtide.fit.wait()


def trainer_with(callbacks: list) -> Trainer:
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, vocab_size=512,
            attention_dropout=0.1,
        )
    )  # fmt: skip
    tokens = torch.randint(0, 512, (64, 128))
    return Trainer(
        model,
        TrainingArguments(
            tempfile.mkdtemp(), use_cpu=True, max_steps=16, per_device_train_batch_size=8, report_to=[],
            save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=callbacks,
    )  # fmt: skip


def train(callbacks: list) -> tuple[float, float, float]:
    """Peak in MiB, seconds, loss."""
    trainer = trainer_with(callbacks)
    weights = sum(p.nbytes for p in trainer.model.parameters())
    start = time.perf_counter()
    peak = weights + peak_bytes(trainer.train)
    return peak / 2**20, time.perf_counter() - start, trainer.state.log_history[-1]["train_loss"]


plain_mib, plain_s, plain_loss = train([])
lowtide = LowtideCallback(budget="40MiB")
mib, seconds, loss = train([lowtide, WaitForPlan(lowtide)])

assert lowtide.fit.status().planned_steps
assert loss == plain_loss  # bitwise: lowtide runs the same kernels again, on the same numbers
print(f"peak {plain_mib:.1f} MiB -> {mib:.1f} MiB, {plain_s:.1f} s -> {seconds:.1f} s, loss {loss:.4f} in both")
