"""Published training rates as commands that ``lowtide pretend`` can run: source, command, devices, number.

Numbers and configurations are as the sources state them; what is guessed is said in ``guessed``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MPT = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
THUNDER = "https://github.com/Lightning-AI/lightning-thunder/pull/940"
LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main/extensions/thunder/README.md"
TORCHTUNE = "https://github.com/pytorch/torchtune/blob/main/README.md"
FMS = "https://github.com/foundation-model-stack/fms-fsdp/blob/main/README.md"
HUGGING_FACE = "https://huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one"
FOUR_YEARS_OLD = "transformers and PyTorch of 2022"


@dataclass(frozen=True)
class TimeRow:
    """One published rate.

    Attributes:
        options: Of ``published_training.py``.
        published: Tokens (of ``bert`` sequences) per second of one device.
        family: Rows whose matrix products are as fast: a measured one of them says how fast.
        is_anchor: It is that one.
        per_step: What is counted in one step of one rank.
        network_gbit: Of each device to other machines; None: as clouds have it.
    """

    source: str
    configuration: str
    device: str
    ranks: int
    options: str
    published: float
    family: str
    per_step: int
    is_anchor: bool = False
    network_gbit: float | None = None
    guessed: str = ""
    unit: str = "tokens/s/GPU"

    @property
    def key(self) -> str:
        return f"{self.configuration} on {self.ranks} x {self.device}"


def rows() -> list[TimeRow]:
    return [*_mpt(), *_llama(), *_bert()]


def _mpt() -> Iterator[TimeRow]:
    for device, size, batch, tokens, accumulate, ranks, recompute, is_pure, published in (
        ("h100", "7b", 6, 2048, 1, 8, False, False, 10643), ("h100", "1b", 14, 2048, 1, 8, False, False, 45455),
        ("h100", "1b", 20, 2048, 1, 64, False, False, 44402), ("h100", "3b", 10, 2048, 3, 16, False, False, 24142),
        ("h100", "3b", 6, 2048, 3, 64, False, False, 22525), ("h100", "13b", 2, 2048, 1, 8, False, False, 4792),
        ("h100", "13b", 2, 2048, 1, 64, False, False, 4800), ("h100", "7b", 16, 4096, 2, 8, True, False, 8611),
        ("h100", "13b", 10, 4096, 3, 8, True, False, 4717), ("h100", "30b", 10, 2048, 3, 16, True, False, 2263),
        ("h100", "30b", 14, 2048, 3, 32, True, False, 2308), ("h100", "70b", 8, 2048, 4, 64, True, False, 1039),
        ("h100", "1b", 56, 512, 4, 8, False, False, 52275), ("h100", "760m", 24, 2048, 1, 32, False, False, 67971),
        ("h100", "7b", 8, 8192, 2, 8, True, False, 6935), ("h100", "1b", 3, 8192, 4, 8, False, False, 29157),
        ("a100-80gb", "7b", 6, 2048, 2, 8, False, False, 4641),
        ("a100-80gb", "1b", 14, 2048, 4, 8, False, False, 20513),
        ("a100-80gb", "3b", 10, 2048, 2, 8, False, False, 10811),
        ("a100-80gb", "13b", 2, 2048, 3, 8, False, False, 2262),
        ("a100-80gb", "7b", 16, 4096, 2, 8, True, False, 3684),
        ("a100-80gb", "13b", 10, 4096, 3, 8, True, False, 2060),
        ("a100-80gb", "1b", 56, 512, 4, 8, False, False, 23148),
        ("a100-80gb", "350m", 32, 2048, 2, 8, False, False, 58782),
        ("a100-80gb", "125m", 32, 2048, 2, 8, False, False, 141737),
        ("a100-80gb", "70b", 8, 2048, 4, 64, True, True, 410), ("a100-80gb", "1b", 3, 8192, 4, 8, False, False, 13814),
        ("a100-40gb", "7b", 12, 2048, 4, 8, True, False, 3679), ("a100-40gb", "7b", 18, 2048, 1, 128, True, True, 3623),
        ("a100-40gb", "13b", 14, 2048, 1, 32, True, True, 1998), ("a100-40gb", "30b", 4, 2048, 1, 32, True, True, 857),
        ("a100-40gb", "70b", 4, 2048, 1, 128, True, True, 376),
    ):  # fmt: skip
        words = f"MPT {size}, FSDP, {accumulate} x {batch} x {tokens}, {'bf16' if is_pure else 'bf16, reduced in fp32'}"
        options = f"--model mpt-{size} --rows {batch} --tokens {tokens} --accumulate {accumulate} --wrap fsdp1 "
        options += "--loss-float32 --clip --optimizer loop --loss-read"
        options += "" if is_pure else " --reduce-float32"
        options += " --recompute whole" if recompute else ""
        yield TimeRow(
            MPT, words + (", checkpointing" if recompute else ""), device, ranks, options, published,
            "a100" if device.startswith("a100") else device, batch * tokens * accumulate,
            is_anchor=(size, batch, tokens, ranks) == ("7b", 6, 2048, 8),
        )  # fmt: skip


def _llama() -> Iterator[TimeRow]:
    titan = "--model llama-3.1-8b --rows 2 --tokens 8192 --wrap fsdp2 --recompute op --optimizer fused --loss-float32 "
    titan += "--clip --reduce-float32"
    limited = "an H100 of 500 W with HBM2e, taken as a whole one"
    for ranks, compiled, published in ((8, False, 5762), (8, True, 6667), (128, False, 5605), (128, True, 6514)):
        words = f"Llama 3.1 8B, FSDP2, 2 x 8192, selective op{', compile' if compiled else ''}"
        yield TimeRow(TITAN, words, "h100", ranks, titan + (" --compile" if compiled else ""), published, "h100 500 W",
                      2 * 8192, guessed=limited)  # fmt: skip
    for device, ranks, model, batch, recompute, network, published in (
        ("a100-80gb", 128, "llama-2-7b", 2, False, 50, 3700), ("a100-80gb", 128, "llama-34b", 2, True, 50, 700),
        ("h100", 96, "llama-2-7b", 2, False, 100, 7500), ("h100", 96, "llama-34b", 2, True, 100, 1550),
    ):  # fmt: skip
        wrap = "fsdp1-hybrid" if model == "llama-2-7b" else "fsdp1"
        options = f"--model {model} --rows {batch} --tokens 4096 --wrap {wrap} --clip"
        options += " --recompute whole" if recompute else ""
        words = f"{model}, {'HSDP' if wrap.endswith('hybrid') else 'FSDP'}, {batch} x 4096, bf16"
        yield TimeRow(FMS, words + (", checkpointing" if recompute else ""), device, ranks, options, published,
                      device.split("-")[0], batch * 4096, network_gbit=network)  # fmt: skip
    yield TimeRow(THUNDER, "Llama 2 7B, FSDP2 not resharded, 1 x 4096, bf16", "h100", 8,
                  "--model llama-2-7b --rows 1 --tokens 4096 --wrap fsdp2-keep --dtype bf16 --optimizer fused", 9325,
                  "h100", 4096)  # fmt: skip
    for compiled, published in ((False, 7075), (True, 8998)):
        yield TimeRow(TORCHTUNE, f"Llama 3.2 3B, 2 x 4096, bf16{', compile' if compiled else ''}", "a100-80gb", 1,
                      "--model llama-3.2-3b --rows 2 --tokens 4096 --dtype bf16 --loss-float32 --optimizer fused"
                      + (" --compile --compile-loss" if compiled else ""), published, "a100", 2 * 4096,
                      unit="tokens/s")  # fmt: skip
    yield TimeRow(LITGPT, "TinyLlama 1.1B, 8 x 4 x 2048, bf16", "a100-40gb", 1,
                  "--model tinyllama --rows 4 --tokens 2048 --accumulate 8 --dtype bf16 --loss-float32", 18300, "a100",
                  8 * 4 * 2048, unit="tokens/s")  # fmt: skip


def _bert() -> Iterator[TimeRow]:
    for dtype, batch, accumulate, recompute, published in (
        ("fp32", 4, 1, False, 8.86), ("fp32", 1, 4, False, 7.75), ("fp32", 1, 4, True, 5.99),
        ("fp16-amp", 4, 1, False, 18.64), ("fp16-amp", 1, 4, True, 10.09),
    ):  # fmt: skip
        options = f"--model bert-large --rows {batch} --tokens 512 --accumulate {accumulate} --dtype {dtype} --clip"
        options += " --optimizer loop" + (" --recompute whole" if recompute else "")
        words = f"BERT-large, {accumulate} x {batch} x 512, {dtype}{', checkpointing' if recompute else ''}"
        yield TimeRow(HUGGING_FACE, words, "v100-16gb", 1, options, published, "v100", batch * accumulate,
                      is_anchor=(dtype, batch) == ("fp32", 4), unit="sequences/s")  # fmt: skip
