"""BERT-large under transformers' Trainer, as its page on one GPU of 2022 has it; weights of zeros, tokens at random.

    python bert_trainer.py [--OPTION VALUE of TrainingArguments ...]

The page's PyTorch was 1.10 or so, of which softmax keeps its input for backward as well as its result. On PyTorch 2.0,
which stands for it, softmax does so here.

https://huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one
"""

import sys
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset

sys.modules.update(dict.fromkeys(("datasets", "pandas", "sklearn")))  # of today: not for transformers of then
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments  # noqa: E402


class OldSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        made = torch.softmax(x, dim)
        ctx.save_for_backward(x, made)
        ctx.dim = dim
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, made = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, made, ctx.dim, x.dtype), None


def old_softmax(x: torch.Tensor, dim: int = -1, **_: object) -> torch.Tensor:
    """Under autocast in float32, as PyTorch's own."""
    return OldSoftmax.apply(x.float() if torch.is_autocast_enabled() else x, dim)


class Dummy(Dataset):
    """512 rows of 512 tokens."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(100, 30000, (512,)), "labels": torch.tensor(at % 2)}


def main() -> None:
    made = ["--output_dir", tempfile.mkdtemp(), "--evaluation_strategy", "steps", "--num_train_epochs", "1",
            "--log_level", "error", "--report_to", "none", *sys.argv[1:]]  # fmt: skip
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(made)
    if torch.__version__.startswith("2.0."):
        torch.nn.functional.softmax = old_softmax
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    with torch.device("cuda"):
        model = BertForSequenceClassification(config)
    Trainer(model=model, args=arguments, train_dataset=Dummy()).train()


if __name__ == "__main__":
    main()
