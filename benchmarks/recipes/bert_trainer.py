"""BERT-large under transformers' Trainer, as its page on one GPU of 2022 has it; weights of zeros, tokens at random.

    python bert_trainer.py [--OPTION VALUE of TrainingArguments ...]

https://huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one
"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset

sys.modules.update(dict.fromkeys(("datasets", "pandas", "sklearn")))  # of today: not for transformers of then
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments  # noqa: E402


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
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    with torch.device("cuda"):
        model = BertForSequenceClassification(config)
    Trainer(model=model, args=arguments, train_dataset=Dummy()).train()


if __name__ == "__main__":
    main()
