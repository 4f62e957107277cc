"""TRL's SFTTrainer within a memory budget, in place of its checkpointing. Runs on a CPU in a few seconds.

    pip install "lowtide[transformers,trl]"
    python examples/trl_sft.py

TRL switches gradient checkpointing on by default. While lowtide's plan is there it is off: the plan recomputes only
what does not fit.
"""

import tempfile
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from lowtide.integrations.transformers import LowtideCallback
from lowtide.measurement.allocator import peak_bytes

torch.set_num_threads(1)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(509))]
    found = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


class WaitForPlan(TrainerCallback):
    """A short example waits for its plan; a long training has it after some steps."""

    def __init__(self, lowtide: LowtideCallback) -> None:
        self.lowtide = lowtide

    def on_step_end(self, args, state, control, **_: object) -> None:
        if state.global_step == 2:
            self.lowtide.fit.wait()


def trainer_with(callbacks: list, **settings: bool) -> SFTTrainer:
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128, intermediate_size=344, num_hidden_layers=8, num_attention_heads=4, vocab_size=512,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    texts = [" ".join(f"w{int(n)}" for n in torch.randint(0, 509, (63,))) for _ in range(64)]
    return SFTTrainer(
        model,
        SFTConfig(
            tempfile.mkdtemp(), use_cpu=True, bf16=False, max_steps=16, per_device_train_batch_size=4, report_to=[],
            save_strategy="no", disable_tqdm=True, **settings,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )  # fmt: skip


def train(callbacks: list, **settings: bool) -> tuple[float, float, float]:
    """Peak in MiB, seconds, loss."""
    trainer = trainer_with(callbacks, **settings)
    weights = sum(p.nbytes for p in trainer.model.parameters())
    start = time.perf_counter()
    peak = weights + peak_bytes(trainer.train)
    return peak / 2**20, time.perf_counter() - start, trainer.state.log_history[-1]["train_loss"]


plain_mib, plain_s, plain_loss = train([], gradient_checkpointing=False)
lowtide = LowtideCallback(budget="68MiB")
mib, seconds, loss = train([lowtide, WaitForPlan(lowtide)])

assert lowtide.fit.status().planned_steps
assert loss == plain_loss  # bitwise: lowtide runs the same kernels again, on the same numbers
print(f"peak {plain_mib:.1f} MiB -> {mib:.1f} MiB, {plain_s:.1f} s -> {seconds:.1f} s, loss {loss:.4f} in both")
