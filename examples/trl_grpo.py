"""TRL's GRPOTrainer within a memory budget: completions are sampled inside the step. Runs on a CPU.

pip install "lowtide[transformers,trl]"
python examples/trl_grpo.py
"""

import tempfile
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from lowtide.integrations.transformers import LowtideCallback
from lowtide.measurement.allocator import peak_bytes

torch.set_num_threads(1)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(509))]
    found = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def different_words(completions: list[str], **_: object) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


class WaitForPlan(TrainerCallback):
    """A short example waits for its plan; a long training has it after some steps."""

    def __init__(self, lowtide: LowtideCallback) -> None:
        self.lowtide = lowtide

    def on_step_end(self, args, state, control, **_: object) -> None:
        if state.global_step == 2:
            self.lowtide.fit.wait()


def train(callbacks: list, **settings: bool) -> tuple[float, float, float]:
    """Peak in MiB, seconds, loss."""
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, vocab_size=512,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    prompts = [" ".join(f"w{int(n)}" for n in torch.randint(0, 509, (32,))) for _ in range(32)]
    trainer = GRPOTrainer(
        model,
        different_words,
        GRPOConfig(
            tempfile.mkdtemp(), use_cpu=True, bf16=False, max_steps=16, per_device_train_batch_size=8, report_to=[],
            num_generations=8, max_completion_length=8, save_strategy="no", disable_tqdm=True, **settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )  # fmt: skip
    weights = sum(p.nbytes for p in model.parameters())
    start = time.perf_counter()
    peak = weights + peak_bytes(trainer.train)
    return peak / 2**20, time.perf_counter() - start, trainer.state.log_history[-1]["train_loss"]


plain_mib, plain_s, plain_loss = train([], gradient_checkpointing=False)
lowtide = LowtideCallback(budget="58MiB")
mib, seconds, loss = train([lowtide, WaitForPlan(lowtide)])

assert lowtide.fit.status().planned_steps
assert loss == plain_loss  # bitwise: lowtide runs the same kernels again, on the same numbers
print(f"peak {plain_mib:.1f} MiB -> {mib:.1f} MiB, {plain_s:.1f} s -> {seconds:.1f} s, loss {loss:.6f} in both")
