"""Published GPU measurements as data: source, configuration, device, number, unit, and what kind of number it is.

``published_recipes.py`` builds what ``recipe`` and ``options`` name. Numbers and configurations are as the sources
state them; what a source does not say is in ``guessed``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ALLOCATED, RESERVED, DRIVER, TIME = "allocated", "reserved", "nvidia-smi", "time"
GB, GIB, MIB = 1e9, 2.0**30, 2.0**20
_LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main"
_TABLES = f"{_LITGPT}/tutorials/resource-tables.md"
_THUNDER = f"{_LITGPT}/extensions/thunder/README.md"
_RASBT = "https://github.com/rasbt/pytorch-memory-optim/blob/main/logs.md"
_HUGGING_FACE = "https://huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one"
_LIGER = "https://github.com/linkedin/Liger-Kernel/blob/main/benchmark/data/all_benchmark_data.csv"
_MPT = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
_TIMM = (
    "https://github.com/huggingface/pytorch-image-models/blob/main/results/"
    "benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
)
_TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_PR_940 = "https://github.com/Lightning-AI/lightning-thunder/pull/940"
_PR_961 = "https://github.com/meta-pytorch/torchtune/pull/961"
_AO = "https://github.com/pytorch/ao/pull/478"

# Why a row is more than 5 % off, or what is not the recipe's.
MADE = "its gradients are made in backward; a trace counts them as there before the step"
IN_BACKWARD = "the optimizer runs in backward, so no gradient is kept; a trace counts them all"


@dataclass(frozen=True)
class Row:
    """One published number.

    Attributes:
        unit: Of ``published``: ``GB``, ``GiB``, ``MiB``; of times what is done in a second.
        scale: Bytes of a unit of memory.
        recipe: A function of ``published_recipes.py``; ``options`` are its arguments.
        calibrated: A time on which the shares of ``roofline.py`` were chosen; the other times test them.
        gradients: ``""``, or why they are not as a trace counts them: ``MADE`` or ``IN_BACKWARD``.
        reason: What is known of the difference.
        guessed: What the source does not say.
    """

    source: str
    configuration: str
    gpu: str
    kind: str
    published: float
    unit: str
    recipe: str
    options: dict[str, Any] = field(default_factory=dict)
    calibrated: bool = False
    gradients: str = ""
    reason: str = ""
    guessed: str = ""

    @property
    def scale(self) -> float:
        return {"GB": GB, "GiB": GIB, "MiB": MIB}[self.unit]

    @property
    def key(self) -> str:
        return f"{self.kind}: {self.configuration} on {self.gpu}"


_HUB = f"{_LITGPT}/config_hub/finetune/README.md"
_IMPOSSIBLE = "less than parameters, gradients and AdamW's states in bfloat16"
# What cannot be re-created: source, configuration, GPU, published, and why.
NOT_CREATED = (
    (_HUB, "LitGPT full llama-3.2-1b", "A10G", "8.70 GB", f"{_IMPOSSIBLE}, 9.9 GB"),
    (_HUB, "LitGPT full llama-3.2-3b", "A10G", "16.51 GB", f"{_IMPOSSIBLE}, 25.7 GB"),
    (_HUB, "LitGPT full phi-3", "A10G", "17.01 GB", f"{_IMPOSSIBLE}, 30.6 GB"),
)


def rows() -> list[Row]:
    """All of them, by source."""
    return [*_litgpt(), *_rasbt(), *_hugging_face(), *_liger(), *_others(), *_times()]


def _litgpt() -> Iterator[Row]:
    tokens = {"phi-1.5": 1044, "stablelm-alpha-3b": 1034, "llama-2-7b": 1304, "llama-2-13b": 1304}
    for method, model, bits, rows, published in (
        ("lora", "phi-1.5", "16", 1, 4.82), ("lora", "phi-1.5", "16", 2, 6.76), ("lora", "phi-1.5", "16", 4, 10.68),
        ("lora", "stablelm-alpha-3b", "16", 1, 9.69), ("lora", "stablelm-alpha-3b", "16", 2, 12.10),
        ("lora", "stablelm-alpha-3b", "16", 4, 16.92), ("lora", "llama-2-7b", "16", 1, 21.30),
        ("lora", "llama-2-7b", "16", 2, 29.07), ("lora", "llama-2-13b", "16", 1, 38.12),
        ("adapter", "stablelm-alpha-3b", "16", 1, 9.10), ("adapter", "llama-2-7b", "16", 1, 19.98),
        ("adapter_v2", "stablelm-alpha-3b", "16", 1, 10.71), ("adapter_v2", "llama-2-7b", "16", 1, 25.51),
        ("lora", "phi-1.5", "nf4", 1, 3.78), ("lora", "phi-1.5", "nf4-dq", 1, 3.72),
        ("lora", "stablelm-alpha-3b", "nf4", 1, 6.35), ("lora", "stablelm-alpha-3b", "nf4-dq", 1, 6.19),
        ("lora", "llama-2-7b", "nf4", 1, 14.14), ("lora", "llama-2-7b", "nf4-dq", 1, 13.84),
        ("lora", "llama-2-13b", "nf4", 1, 23.14), ("lora", "llama-2-13b", "nf4-dq", 1, 22.55),
        ("adapter", "stablelm-alpha-3b", "nf4", 1, 5.65), ("adapter", "stablelm-alpha-3b", "nf4-dq", 1, 5.48),
        ("adapter", "llama-2-7b", "nf4", 1, 12.68), ("adapter", "llama-2-7b", "nf4-dq", 1, 12.38),
        ("adapter_v2", "stablelm-alpha-3b", "nf4", 1, 7.41), ("adapter_v2", "stablelm-alpha-3b", "nf4-dq", 1, 7.25),
        ("adapter_v2", "llama-2-7b", "nf4", 1, 18.30), ("adapter_v2", "llama-2-7b", "nf4-dq", 1, 17.98),
    ):  # fmt: skip
        options = {"model": model, "method": method, "bits": bits, "rows": rows, "tokens": tokens[model]}
        words = f"LitGPT {method} {model}, {'bf16' if bits == '16' else bits}, {rows} x {tokens[model]}"
        yield Row(_TABLES, words, "a100-40gb", ALLOCATED, published, "GB", "litgpt", options)
    options = {"model": "stablelm-alpha-3b", "method": "lora", "bits": "mixed", "rows": 1, "tokens": 1034}
    words = "LitGPT lora stablelm-alpha-3b, bf16-mixed, 1 x 1034"
    yield Row(f"{_LITGPT}/tutorials/finetune_lora.md", words, "a100-40gb", ALLOCATED, 26.92, "GB", "litgpt", options)


def _rasbt() -> Iterator[Row]:
    old = "PyTorch of June 2023: a ViT block of half precision saves one tensor more, Adam's temporaries are twice"
    for words, published, precision, rows, optimizer, accumulate, reason in (
        ("fp32, 64 images, Adam", 26.84, "fp32", 64, "adam", 1, ""),
        ("bf16, 64 images, Adam", 13.82, "bf16", 64, "adam", 1, old),
        ("bf16, 16 images, Adam", 5.69, "bf16", 16, "adam", 1, old),
        ("bf16, 4 x 4 images, SGD", 2.02, "bf16", 4, "sgd", 4, old),
    ):
        options = {"precision": precision, "rows": rows, "optimizer": optimizer, "accumulate": accumulate}
        yield Row(_RASBT, f"torchvision ViT-L/16, {words}", "a100-40gb", RESERVED, published, "GB", "vit_l16", options,
                  reason=reason, guessed="the GPU: the log does not name it")  # fmt: skip


def _hugging_face() -> Iterator[Row]:
    for words, published, precision, rows, accumulate, recompute, optimizer in (
        ("fp32, 4 rows, AdamW", 14949, "fp32", 4, 1, False, "adamw"),
        ("fp32, 1 x 4 rows, AdamW", 8681, "fp32", 1, 4, False, "adamw"),
        ("fp32, 1 x 4 rows, checkpointing, AdamW", 6775, "fp32", 1, 4, True, "adamw"),
        ("fp16 AMP, 4 rows, AdamW", 13939, "fp16-mixed", 4, 1, False, "adamw"),
        ("fp16 AMP, 1 x 4 rows, checkpointing, AdamW", 7275, "fp16-mixed", 1, 4, True, "adamw"),
        ("fp32, 4 rows, Adafactor", 12295, "fp32", 4, 1, False, "adafactor"),
        ("fp16 AMP, 1 x 4 rows, checkpointing, Adafactor", 4847, "fp16-mixed", 1, 4, True, "adafactor"),
    ):
        options = {"precision": precision, "rows": rows, "accumulate": accumulate, "recompute": recompute,
                   "optimizer": optimizer}  # fmt: skip
        yield Row(_HUGGING_FACE, f"BERT-large, 512 tokens, {words}", "v100-16gb", DRIVER, published, "MiB", "bert",
                  options, reason="transformers and PyTorch 1.10 of 2022; not separable here")  # fmt: skip


def _liger() -> Iterator[Row]:
    for vocabulary, published in ((4096, 1280.1259765625), (32768, 10240.1259765625), (131072, 40960.125)):
        yield Row(_LIGER, f"cross entropy, 16384 x {vocabulary}, fp32", "a100-80gb", ALLOCATED, published, "MiB",
                  "cross_entropy", {"vocabulary": vocabulary})  # fmt: skip
    for tokens, published in ((4096, 6092.2822265625), (8192, 9162.3134765625), (16384, 15302.3759765625),
                              (32768, 27582.5)):  # fmt: skip
        yield Row(_LIGER, f"head and cross entropy, {tokens} x 128256, bf16", "a100-80gb", ALLOCATED, published,
                  "MiB", "head_and_loss", {"tokens": tokens})  # fmt: skip


def _others() -> Iterator[Row]:
    yield Row(_PR_961, "Llama 2 7B, 4 x 2048, checkpointing, AdamW in backward", "a100-80gb",
              ALLOCATED, 20.2, "GB", "torchtune_7b", gradients=IN_BACKWARD)  # fmt: skip
    yield Row(_TITAN, "Llama 3.1 8B, FSDP2 on 8, 2 x 8192, selective op", "h100", RESERVED, 82.4, "GiB",
              "torchtitan_8b", gradients=MADE)  # fmt: skip
    yield Row(_THUNDER, "TinyLlama 1.1B, 8 x 4 x 2048, bf16", "a100-40gb", ALLOCATED, 29.84, "GB",
              "tinyllama", reason="whether Fabric of then cast the logits to float32 is not known: without, it is "
              "less")  # fmt: skip
    yield Row(_PR_940, "Llama 2 7B, FSDP2 on 8, not resharded, 1 x 4096", "h100", ALLOCATED,
              47.45, "GB", "thunder_7b", gradients=MADE)  # fmt: skip
    yield Row(_AO, "timm ViT-H/14, bf16 AMP, 4 images, Adam", "rtx4090", ALLOCATED, 12.98, "GB", "vit_h14",
              gradients=MADE, guessed="the GPU: a 4070 Ti SUPER, which the table does not have")  # fmt: skip


def _times() -> Iterator[Row]:
    rate = "tokens/s/GPU"
    for gpu, size, rows, tokens, recompute, published, calibrated in (
        ("h100", "1b", 14, 2048, False, 45455, False), ("h100", "3b", 10, 2048, False, 24142, False),
        ("h100", "7b", 6, 2048, False, 10643, True), ("h100", "7b", 16, 4096, True, 8611, False),
        ("h100", "1b", 3, 8192, False, 29157, False), ("a100-80gb", "3b", 10, 2048, False, 10811, False),
        ("a100-80gb", "7b", 6, 2048, False, 4641, True), ("a100-80gb", "13b", 2, 2048, False, 2262, False),
        ("a100-80gb", "1b", 3, 8192, False, 13814, False), ("a100-40gb", "7b", 12, 2048, True, 3679, False),
    ):  # fmt: skip
        options = {"size": size, "rows": rows, "tokens": tokens, "recompute": recompute}
        words = f"MPT {size}, FSDP on 8, {rows} x {tokens}, bf16{', checkpointing' if recompute else ''}"
        reason = "attention of 2023, before FlashAttention-2" if tokens == 8192 else ""
        yield Row(_MPT, words, gpu, TIME, published, rate, "mpt", options, calibrated=calibrated, reason=reason)
    for model, rows, published in (("vit_small_patch16_224", 384, 1057.92), ("vit_base_patch32_224", 512, 1708.63),
                                   ("mixer_b32_224", 512, 1856.75)):  # fmt: skip
        yield Row(_TIMM, f"timm {model}, fp16 AMP, {rows} images", "rtx3090", TIME, published, "images/s", "timm",
                  {"model": model, "rows": rows})  # fmt: skip
    for words, published, precision, rows, accumulate, recompute in (
        ("fp32, 4 rows", 8.86, "fp32", 4, 1, False), ("fp32, 1 x 4 rows", 7.75, "fp32", 1, 4, False),
        ("fp32, 1 x 4 rows, checkpointing", 5.99, "fp32", 1, 4, True),
        ("fp16 AMP, 4 rows", 18.64, "fp16-mixed", 4, 1, False),
        ("fp16 AMP, 1 x 4 rows, checkpointing", 10.09, "fp16-mixed", 1, 4, True),
    ):  # fmt: skip
        options = {"precision": precision, "rows": rows, "accumulate": accumulate, "recompute": recompute,
                   "optimizer": "adamw"}  # fmt: skip
        yield Row(_HUGGING_FACE, f"BERT-large, 512 tokens, {words}, AdamW", "v100-16gb", TIME, published,
                  "sequences/s", "bert", options,
                  reason="host time of transformers' loop of 2022 is guessed" if "fp16" in words else "")  # fmt: skip
    yield Row(_TITAN, "Llama 3.1 8B, FSDP2 on 8, 2 x 8192, selective op", "h100", TIME, 5762, rate,
              "torchtitan_8b", reason="an H100 limited to 500 W with HBM2e")  # fmt: skip
    yield Row("https://github.com/pytorch/torchtune/blob/main/README.md", "Llama 3.2 3B, 2 x 4096, bf16",
              "a100-80gb", TIME, 7075, "tokens/s", "torchtune_3b")  # fmt: skip
    yield Row(_PR_940, "Llama 2 7B, FSDP2 on 8, not resharded, 1 x 4096", "h100", TIME, 9325,
              rate, "thunder_7b")  # fmt: skip
    yield Row(_THUNDER, "TinyLlama 1.1B, 8 x 4 x 2048, bf16", "a100-40gb", TIME, 18300, "tokens/s",
              "tinyllama")  # fmt: skip
