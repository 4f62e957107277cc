"""What others measured on GPUs, as runs of scripts: which script, of which commit, on which versions, and what it said.

A ``Run`` is one command under ``lowtide pretend``. A ``Measured`` is one published number, an ``OutOfMemoryReport`` one
published error. Numbers are as the sources state them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from published_rows import ALLOCATED, DRIVER, GB, GIB, MIB, RESERVED

TODAY = "2.14.1"  # on which each run is repeated, with the same script and packages
_LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main"
_ERA_2023 = ("lightning-utilities==0.10.1", "torchmetrics==1.3.2", "jsonargparse==4.25.0", "docstring_parser",
             "typeshed-client", "importlib_resources", "scipy<1.13", "numpy<2")  # fmt: skip
# What is put before the packages of the environment: requirements of pip, or REPOSITORY@COMMIT:FOLDER.
PACKAGES: dict[str, tuple[str, ...]] = {
    "litgpt 2023-10": ("Lightning-AI/pytorch-lightning@71aed751f7:src", "bitsandbytes==0.41.1", *_ERA_2023),
    "litgpt 2024-01": ("Lightning-AI/pytorch-lightning@6dfa5cca9d:src", "bitsandbytes==0.41.1", *_ERA_2023),
}


@dataclass(frozen=True)
class Run:
    """A script as it ran, or a recipe of ours where the script cannot be had.

    Attributes:
        command: ``{CHECKOUT}`` is a folder with ``checkout``, ``{RECIPES}`` one with ours.
        checkout: ``OWNER/REPOSITORY@COMMIT``.
        torch: The PyTorch of the time; ``today``: also on ``TODAY``.
        memory: What the report says of its GPU; None: what the device has.
        says: Rows are what the script itself prints, not the peaks of the run.
    """

    name: str
    command: tuple[str, ...]
    torch: str
    gpu: str
    checkout: str = ""
    packages: str = ""
    steps: int = 2
    ranks: int | None = None
    memory: str | None = None
    no_weights: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    today: bool = True
    says: bool = False


@dataclass(frozen=True)
class Measured:
    """One published number.

    Attributes:
        said: Of a run that ``says``: the name of the number.
        reason: Why it is more than one percent off.
        guessed: What the source does not say.
        cuda: Of the driver's context, for what ``nvidia-smi`` showed.
    """

    source: str
    configuration: str
    kind: str
    published: float
    unit: str
    run: Run
    said: str = ""
    reason: str = ""
    guessed: str = ""
    cuda: str | None = None

    @property
    def scale(self) -> float:
        return {"GB": GB, "GiB": GIB, "MiB": MIB}[self.unit]


@dataclass(frozen=True)
class OutOfMemoryReport:
    """One published error.

    Attributes:
        asked, allocated, reserved: GiB, as the message has them; None: it does not say.
        line: Where it was; empty: the report does not say.
    """

    source: str
    configuration: str
    run: Run
    asked: float | None
    allocated: float | None
    reserved: float | None = None
    line: str = ""
    reason: str = ""
    guessed: str = ""


def measured() -> list[Measured]:
    return [*_litgpt()]


def reports() -> list[OutOfMemoryReport]:
    return [*_litgpt_out_of_memory()]


def runs() -> list[Run]:
    """Each run once, in the order of the tables."""
    return list(dict.fromkeys([*(row.run for row in measured()), *(row.run for row in reports())]))


_TOKENS = {"phi-1_5": 1044, "stablelm-base-alpha-3b": 1034, "Llama-2-7b-hf": 1304, "Llama-2-13b-hf": 1304}
_OCTOBER = "Lightning-AI/litgpt@6178c7cc"
_JANUARY = "Lightning-AI/litgpt@0f021f3a"  # the adapters' scripts quantize from here on


def _litgpt_run(script: str, model: str, precision: str, quantize: str, rows: int) -> Run:
    later = quantize != "none" and script != "lora"
    return Run(
        f"litgpt {script} {model} {precision} {quantize} {rows}",
        ("python", "{RECIPES}/litgpt_script.py", "{CHECKOUT}", f"{script}.py", model, precision, quantize, str(rows),
         str(_TOKENS[model])),
        "2.1.2", "a100-40gb", _JANUARY if later else _OCTOBER, "litgpt 2024-01" if later else "litgpt 2023-10", steps=1,
    )  # fmt: skip


def _litgpt() -> Iterator[Measured]:
    phi, stable, llama, large = _TOKENS
    for script, model, quantize, rows, published in (
        ("lora", phi, "none", 1, 4.82), ("lora", phi, "none", 2, 6.76), ("lora", phi, "none", 4, 10.68),
        ("lora", stable, "none", 1, 9.69), ("lora", stable, "none", 2, 12.10), ("lora", stable, "none", 4, 16.92),
        ("lora", llama, "none", 1, 21.30), ("lora", llama, "none", 2, 29.07), ("lora", large, "none", 1, 38.12),
        ("adapter", stable, "none", 1, 9.10), ("adapter", llama, "none", 1, 19.98),
        ("adapter_v2", stable, "none", 1, 10.71), ("adapter_v2", llama, "none", 1, 25.51),
        ("lora", phi, "bnb.nf4", 1, 3.78), ("lora", phi, "bnb.nf4-dq", 1, 3.72),
        ("lora", stable, "bnb.nf4", 1, 6.35), ("lora", stable, "bnb.nf4-dq", 1, 6.19),
        ("lora", llama, "bnb.nf4", 1, 14.14), ("lora", llama, "bnb.nf4-dq", 1, 13.84),
        ("lora", large, "bnb.nf4", 1, 23.14), ("lora", large, "bnb.nf4-dq", 1, 22.55),
        ("adapter", stable, "bnb.nf4", 1, 5.65), ("adapter", stable, "bnb.nf4-dq", 1, 5.48),
        ("adapter", llama, "bnb.nf4", 1, 12.68), ("adapter", llama, "bnb.nf4-dq", 1, 12.38),
        ("adapter_v2", stable, "bnb.nf4", 1, 7.41), ("adapter_v2", stable, "bnb.nf4-dq", 1, 7.25),
        ("adapter_v2", llama, "bnb.nf4", 1, 18.30), ("adapter_v2", llama, "bnb.nf4-dq", 1, 17.98),
    ):  # fmt: skip
        words = f"{script} {model}, {'bf16' if quantize == 'none' else quantize}, {rows} x {_TOKENS[model]}"
        yield Measured(f"{_LITGPT}/tutorials/resource-tables.md", words, ALLOCATED, published, "GB",
                       _litgpt_run(script, model, "bf16-true", quantize, rows))  # fmt: skip
    yield Measured(f"{_LITGPT}/tutorials/finetune_lora.md", f"lora {stable}, bf16-mixed, 1 x 1034", ALLOCATED, 26.92,
                   "GB", _litgpt_run("lora", stable, "bf16-mixed", "none", 1))  # fmt: skip


def _litgpt_out_of_memory() -> Iterator[OutOfMemoryReport]:
    _, _, llama, large = _TOKENS
    for model, rows in ((llama, 4), (large, 2), (large, 4)):
        yield OutOfMemoryReport(f"{_LITGPT}/tutorials/resource-tables.md", f"lora {model}, bf16, {rows} x 1304, 40 GB",
                                _litgpt_run("lora", model, "bf16-true", "none", rows), None, None)  # fmt: skip
