"""Inputs for the scripts of ``pretend_cases``: random words, tokens and images, and models without weights.

Names of hubs are folders here: ``from_pretrained("bert-base-cased")`` and ``load_dataset("nyu-mll/glue")`` look for a
folder of that name before they ask for one.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Maker = Callable[[Path], None]
_WORDS = 4000
FACTORY = """model_name_or_path: Llama-3.1-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: alpaca
template: llama3
cutoff_len: 2048
max_samples: 1000
output_dir: out
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 0.1
bf16: true
"""
_CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def words(number: int, seed: int = 0) -> str:
    """Words of two to nine letters, the same ones for the same seed."""
    return " ".join(random.Random(seed).choices(_vocabulary(), k=number))


@functools.cache
def _vocabulary() -> tuple[str, ...]:
    chance = random.Random(1)
    return tuple("".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(_WORDS))


# -- tokens and text --------------------------------------------------------------------------------------------


def token_file(path: str, vocabulary: int, tokens: int) -> Maker:
    """Numbers of 16 bits, as nanoGPT keeps them."""

    def make(folder: Path) -> None:
        import numpy as np

        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        np.random.default_rng(0).integers(0, vocabulary, tokens, dtype=np.uint16).tofile(target)

    return make


def text_file(path: str, number: int, begins: str = "") -> Maker:
    """Lines of 20 words.

    Args:
        begins: The first line, for a script that looks for letters of its own.
    """

    def make(folder: Path) -> None:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        lines = (words(20, seed) for seed in range(number // 20))
        target.write_text("\n".join([*([begins] if begins else []), *lines]) + "\n")

    return make


def dataset(path: str, row: Callable[[int], dict[str, Any]], rows: int = 512, card: str = "", **more: int) -> Maker:
    """A folder for ``load_dataset``, with ``train`` and ``test`` and the splits of ``more``.

    Args:
        card: The name of its configuration, where a script asks for one.
    """

    def make(folder: Path) -> None:
        target = folder / path
        target.mkdir(parents=True, exist_ok=True)
        splits = {"train": rows, "test": 64} | more
        for split, number in splits.items():
            (target / f"{split}.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(number)))
        if card:
            files = "".join(f"\n  - split: {split}\n    path: {split}.jsonl" for split in splits)
            (target / "README.md").write_text(f"---\nconfigs:\n- config_name: {card}\n  data_files:{files}\n---\n")

    return make


def pair(number: int) -> dict[str, Any]:
    """As in GLUE's MRPC: two sentences, and whether they say the same."""
    return {
        "sentence1": words(24, number), "sentence2": words(24, number + 1), "label": number % 2, "idx": number,
    }  # fmt: skip


def long_text(number: int) -> dict[str, Any]:
    return {"text": words(4000, number)}


def conversation(number: int) -> dict[str, Any]:
    return {"messages": [_said("user", 300, number), _said("assistant", 1300, number + 1)]}


def preference(number: int) -> dict[str, Any]:
    return {
        "prompt": [_said("user", 200, number)], "chosen": [_said("assistant", 400, number + 1)],
        "rejected": [_said("assistant", 400, number + 2)],
    }  # fmt: skip


def prompt(number: int) -> dict[str, Any]:
    return {"prompt": [_said("user", 60, number)], "solution": words(3, number)}


def instruction(number: int) -> dict[str, Any]:
    return {"instruction": words(80, number), "input": "", "output": words(300, number + 1)}


def long_instruction(number: int) -> dict[str, Any]:
    return {"instruction": words(80, number), "input": "", "output": words(700, number + 1)}


def scored_pair(number: int) -> dict[str, Any]:
    return {"sentence1": words(24, number), "sentence2": words(24, number + 1), "score": number % 6 / 5}


def _said(role: str, number: int, seed: int) -> dict[str, str]:
    return {"role": role, "content": words(number, seed)}


# -- models -------------------------------------------------------------------------------------------------------


def model(path: str, kind: str, config: dict[str, Any], architecture: str = "") -> Maker:
    """A folder with ``config.json`` and a tokenizer, and no weights.

    Args:
        kind: transformers' ``model_type``.
        architecture: The class that the file names.
    """

    def make(folder: Path) -> None:
        target = folder / path
        target.mkdir(parents=True, exist_ok=True)
        body = {"model_type": kind, **({"architectures": [architecture]} if architecture else {}), **config}
        (target / "config.json").write_text(json.dumps(body))
        tokenizer(target, "bert" if kind in ("bert", "distilbert") else "gpt")

    return make


def tokenizer(folder: Path, style: str = "gpt") -> None:
    """One of 4,000 tokens or fewer, trained on the words; with a template for conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_trained(style))
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
             "unk_token": "[UNK]"} if style == "bert" else {
             "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}  # fmt: skip
    body = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512 if style == "bert" else 131072,
            "chat_template": _CHAT, **names}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(body))


@functools.cache
def _trained(style: str) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    texts = [words(2000, seed) for seed in range(20)]
    if style == "bert":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        made = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
        made.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
        )
        return made.to_str()
    special = ["<unk>", "<bos>", "<eos>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>"]
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False,
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    return made.to_str()


def litgpt_checkpoint(path: str, name: str) -> Maker:
    """What ``litgpt download`` leaves: the configuration, a tokenizer, and a file of weights that is a hole."""

    def make(folder: Path) -> None:
        import torch
        from litgpt import GPT, Config
        from litgpt.utils import save_config
        from torch._subclasses.fake_tensor import FakeTensorMode

        target = folder / path / name
        config = Config.from_name(name)
        tokenizer(target)
        save_config(config, target)
        with FakeTensorMode():
            state = {key: tensor.to(torch.bfloat16) for key, tensor in GPT(config).state_dict().items()}
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, target / "lit_model.pth")

    return make


def clip_tokenizer(folder: Path) -> None:
    """Stable Diffusion's has two files: single letters, no merges."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(code) for code in range(33, 127)]
    symbols = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({symbol: number for number, symbol in enumerate(symbols)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
             "unk_token": "<|endoftext|>"}  # fmt: skip
    body = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(body))


def stable_diffusion(path: str) -> Maker:
    """The five parts of version 1.5."""

    def make(folder: Path) -> None:
        parts: dict[str, dict[str, Any]] = {
            "unet": {"_class_name": "UNet2DConditionModel", "sample_size": 64, "cross_attention_dim": 768,
                     "attention_head_dim": 8},
            "vae": {"_class_name": "AutoencoderKL", "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
                    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
                    "latent_channels": 4, "sample_size": 512},
            "text_encoder": {"model_type": "clip_text_model", "architectures": ["CLIPTextModel"], "hidden_size": 768,
                             "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
                             "projection_dim": 768},
        }  # fmt: skip
        for name, config in parts.items():
            (folder / path / name).mkdir(parents=True, exist_ok=True)
            (folder / path / name / "config.json").write_text(json.dumps(config))
        (folder / path / "scheduler").mkdir(exist_ok=True)
        schedule = {"_class_name": "PNDMScheduler", "beta_end": 0.012, "beta_schedule": "scaled_linear",
                    "beta_start": 0.00085, "num_train_timesteps": 1000, "steps_offset": 1}  # fmt: skip
        (folder / path / "scheduler" / "scheduler_config.json").write_text(json.dumps(schedule))
        clip_tokenizer(folder / path / "tokenizer")

    return make


# -- images -------------------------------------------------------------------------------------------------------


def images(
    path: str, number: int, side: int = 256, classes: int = 4, captions: bool = False, flat: bool = False
) -> Maker:
    """JPEG files in folders of classes; 32 of them differ, the rest are links.

    Args:
        captions: With the file that ``load_dataset("imagefolder")`` reads texts from.
        flat: All in one folder, and no classes.
    """

    def make(folder: Path) -> None:
        names = list(_image_files(folder / path, number, side, classes, flat))
        if captions:
            rows = ({"file_name": name, "text": words(12, n)} for n, name in enumerate(names))
            (folder / path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return make


def _image_files(target: Path, number: int, side: int, classes: int, flat: bool) -> Iterator[str]:
    import numpy as np
    from PIL import Image

    chance = np.random.default_rng(0)
    first: list[Path] = []
    for n in range(number):
        name = f"pet_{n % classes}_{n}.jpg" if flat else f"class{n % classes}/{n}.jpg"
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if n < 32:
            small = chance.integers(0, 255, (side // 8, side // 8, 3), dtype=np.uint8)
            Image.fromarray(small).resize((side, side)).save(file)
            first.append(file)
        else:
            os.link(first[n % 32], file)
        yield name


def boxes(path: str, number: int) -> Maker:
    """Eight boxes of two classes for each of the flat folder's images, as YOLO reads them."""

    def make(folder: Path) -> None:
        chance = random.Random(0)
        (folder / path).mkdir(parents=True, exist_ok=True)
        for n in range(number):
            lines = (f"{k % 2} {chance.random():.4f} {chance.random():.4f} 0.1 0.2" for k in range(8))
            (folder / path / f"pet_{n % 4}_{n}.txt").write_text("\n".join(lines) + "\n")

    return make


def mnist(path: str) -> Maker:
    """The four files of digits."""

    def make(folder: Path) -> None:
        import numpy as np

        target = folder / path / "MNIST" / "raw"
        target.mkdir(parents=True, exist_ok=True)
        chance = np.random.default_rng(0)
        for name, number in (("train", 60000), ("t10k", 10000)):
            pixels = chance.integers(0, 255, number * 784, dtype=np.uint8).tobytes()
            head = b"".join(n.to_bytes(4, "big") for n in (2051, number, 28, 28))
            (target / f"{name}-images-idx3-ubyte").write_bytes(head + pixels)
            head = b"".join(n.to_bytes(4, "big") for n in (2049, number))
            digits = chance.integers(0, 10, number, dtype=np.uint8).tobytes()
            (target / f"{name}-labels-idx1-ubyte").write_bytes(head + digits)

    return make


def file(path: str, text: str) -> Maker:
    """A file that a script's user writes by hand: a configuration, a metric."""

    def make(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)

    return make


def built(path: str) -> Maker:
    """What a Makefile of the source makes, which the first rank alone would make by itself."""

    def make(folder: Path) -> None:
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        subprocess.run(["make", "-s", "-C", str(folder / path)], check=True, env={**os.environ, "PATH": search})

    return make


def metric(path: str) -> Maker:
    """What ``evaluate.load`` finds: the share of right answers."""
    return file(
        f"{path}/{path}.py",
        "import datasets\nimport evaluate\n\n\nclass Share(evaluate.Metric):\n    def _info(self):\n"
        "        features = datasets.Features({'predictions': datasets.Value('int64'),\n"
        "                                      'references': datasets.Value('int64')})\n"
        "        return evaluate.MetricInfo(description='', citation='', inputs_description='', features=features)\n\n"
        "    def _compute(self, predictions, references):\n"
        "        return {'accuracy': sum(p == r for p, r in zip(predictions, references)) / len(references)}\n",
    )
