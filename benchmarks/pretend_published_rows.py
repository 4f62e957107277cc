"""What others measured on GPUs, as runs of scripts: which script, of which commit, on which versions, and what it said.

A ``Run`` is one command under ``lowtide pretend``. A ``Measured`` is one published number, an ``OutOfMemoryReport`` one
published error. Numbers are as the sources state them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from published_rows import ALLOCATED, DRIVER, GB, GIB, MIB, RESERVED

TODAY = "2.14.1"  # on which each run is repeated, with the same script and packages
_LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main"
_ERA_2023 = (
    "setuptools<80",
    "lightning-utilities==0.10.1",
    "torchmetrics==1.3.2",
    "jsonargparse==4.25.0",
    "docstring_parser",
    "typeshed-client",
    "importlib_resources",
    "scipy<1.13",
    "numpy<2",
)
# What is put before the packages of the environment: requirements of pip, or REPOSITORY@COMMIT:FOLDER.
PACKAGES: dict[str, tuple[str, ...]] = {
    "litgpt 2023-10": ("Lightning-AI/pytorch-lightning@71aed751f7:src", "bitsandbytes==0.41.1", *_ERA_2023),
    "litgpt 2024-01": ("Lightning-AI/pytorch-lightning@6dfa5cca9d:src", "bitsandbytes==0.41.1", *_ERA_2023),
    "rasbt": ("torchvision==0.15.2", "lightning==2.1.4", *_ERA_2023, "pillow"),
    "liger": ("transformers==4.44.2", "tokenizers==0.19.1", "huggingface_hub==0.23.5"),
    "transformers 4.25": ("transformers==4.25.1", "tokenizers==0.13.3", "huggingface_hub==0.23.5", "numpy<2"),
    "transformers 4.28": ("transformers==4.28.1", "tokenizers==0.13.3", "huggingface_hub==0.23.5", "numpy<2",
                          "accelerate==0.18.0", "sentencepiece"),
    "timm": ("timm==1.0.7", "torchvision==0.19.1", "huggingface_hub==0.23.5", "pillow"),
    "litgpt 2024-06": ("litgpt==0.4.1",),
    "lit-llama": ("lightning==2.1.4", "sentencepiece", *_ERA_2023),
    "torchtitan": ("torchdata==0.10.1", "tiktoken", "regex"),
}  # fmt: skip


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
    return [*_litgpt(), *_rasbt(), *_hugging_face(), *_liger(), *_others()]


def reports() -> list[OutOfMemoryReport]:
    return [*_nanogpt(), *_alpaca(), *_litgpt_out_of_memory()]


def runs() -> list[Run]:
    """Each run once, in the order of the tables."""
    return list(dict.fromkeys([*(row.run for row in measured()), *(row.run for row in reports())]))


_TOKENS = {"phi-1_5": 1044, "stablelm-base-alpha-3b": 1034, "Llama-2-7b-hf": 1304, "Llama-2-13b-hf": 1304}
_OCTOBER = "Lightning-AI/litgpt@8641822b"  # which the page names
_JANUARY = "Lightning-AI/litgpt@0f021f3a"  # which brought the adapters rows and their quantization


_LATER = (
    "the script is of January 2024, the first that quantizes adapters, with RMSNorm as the commit of the page has it"
)
_NORMS = (
    "measured in a pull request whose commit is not known; with norms that are trained, Llama 2 kept 0.65 GB more than "
    "the commit that the page names does, which is one copy in bfloat16 of what each norm computes"
)


def _litgpt_run(script: str, model: str, precision: str, quantize: str, rows: int, over: bool = False) -> Run:
    later = quantize != "none" and script != "lora"
    return Run(
        f"litgpt {script} {model} {precision} {quantize} {rows}",
        (
            "python",
            "{RECIPES}/litgpt_script.py",
            "{CHECKOUT}",
            f"{script}.py",
            model,
            precision,
            quantize,
            str(rows),
            str(_TOKENS[model]),
            *(["--norm-before-606"] if later else []),
        ),
        "2.1.2",
        "a100-40gb",
        _JANUARY if later else _OCTOBER,
        "litgpt 2024-01" if later else "litgpt 2023-10",
        steps=1,
        today=quantize == "none" and not over,
    )


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
        yield Measured(
            f"{_LITGPT}/tutorials/resource-tables.md",
            words,
            ALLOCATED,
            published,
            "GB",
            _litgpt_run(script, model, "bf16-true", quantize, rows),
            reason=_NORMS if script == "adapter_v2" else "",
            guessed="" if script == "lora" or quantize == "none" else _LATER,
        )
    yield Measured(
        f"{_LITGPT}/tutorials/finetune_lora.md",
        f"lora {stable}, bf16-mixed, 1 x 1034",
        ALLOCATED,
        26.92,
        "GB",
        _litgpt_run("lora", stable, "bf16-mixed", "none", 1),
    )


def _litgpt_out_of_memory() -> Iterator[OutOfMemoryReport]:
    _, _, llama, large = _TOKENS
    for model, rows in ((llama, 4), (large, 2), (large, 4)):
        yield OutOfMemoryReport(
            f"{_LITGPT}/tutorials/resource-tables.md",
            f"lora {model}, bf16, {rows} x 1304, 40 GB",
            _litgpt_run("lora", model, "bf16-true", "none", rows, over=True),
            None,
            None,
        )
    for issue, gpu, at, asked_mib, allocated, unused_mib, free_mib in (
        (263, "a10", "f0916607", 316, 21.23, 57.37, 144.12),
        (240, "l4", "0a7018db", 80, 21.62, 58.35, 70.88),
    ):
        reserved = allocated + unused_mib / 1024
        yield OutOfMemoryReport(
            f"https://github.com/Lightning-AI/litgpt/issues/{issue}",
            f"LitGPT, adapter_v2 on Falcon 7B, {gpu.upper()} 24 GB",
            Run(
                f"litgpt {issue}",
                ("python", "{RECIPES}/litgpt_script.py", "{CHECKOUT}", "adapter_v2.py", "falcon-7b", "bf16-mixed",
                 "none", "4", "1000"),
                "2.1.2",
                gpu,
                f"Lightning-AI/litgpt@{at}",
                "litgpt 2023-10",
                memory=_left(reserved, free_mib / 1024),
                today=False,
            ),
            asked_mib / 1024,
            allocated,
            reserved,
            guessed="" if issue == 263 else "precision: the script's own, bf16-mixed",
        )  # fmt: skip


_RASBT = "https://github.com/rasbt/pytorch-memory-optim/blob/main/logs.md"


def _rasbt() -> Iterator[Measured]:
    for script, words, published in (
        ("01_pytorch-vit.py", "fp32, 64 images, Adam", 26.79),
        ("01-2_pytorch-fabric.py", "fp32, 64 images, Adam, Fabric", 26.84),
        ("03_bfloat16.py", "bf16, 64 images, Adam", 13.82), ("04_lower-batchsize.py", "bf16, 16 images, Adam", 5.69),
        ("06_sgd-with-scheduler.py", "bf16, 4 x 4 images, SGD", 2.02),
    ):  # fmt: skip
        run = Run(
            f"rasbt {script}",
            ("python", "{RECIPES}/rasbt_script.py", "{CHECKOUT}", script),
            "2.0.1",
            "a100-40gb",
            "rasbt/pytorch-memory-optim@f6eddcd",
            "rasbt",
            steps=0,
        )
        yield Measured(
            _RASBT,
            f"torchvision ViT-L/16, {words}",
            RESERVED,
            published,
            "GB",
            run,
            guessed="the GPU; PyTorch was 2.1.0.dev20230623",
        )


def _hugging_face() -> Iterator[Measured]:
    for words, published, options in (
        ("fp32, 4 rows, AdamW", 14949, "--per_device_train_batch_size 4"),
        ("fp32, 1 x 4 rows, AdamW", 8681, "--per_device_train_batch_size 1 --gradient_accumulation_steps 4"),
        ("fp32, 1 x 4 rows, checkpointing, AdamW", 6775,
         "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --gradient_checkpointing True"),
        ("fp16 AMP, 4 rows, AdamW", 13939, "--per_device_train_batch_size 4 --fp16 True"),
        ("fp16 AMP, 1 x 4 rows, checkpointing, AdamW", 7275,
         "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --gradient_checkpointing True --fp16 True"),
        ("fp32, 4 rows, Adafactor", 12295, "--per_device_train_batch_size 4 --optim adafactor"),
        ("fp16 AMP, 1 x 4 rows, checkpointing, Adafactor", 4847,
         "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --gradient_checkpointing True --fp16 True "
         "--optim adafactor"),
    ):  # fmt: skip
        run = Run(
            f"bert {words}",
            ("python", "{RECIPES}/bert_trainer.py", *options.split()),
            "2.0.1",
            "v100-16gb",
            packages="transformers 4.25",
            steps=3,
        )
        yield Measured(
            "https://huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one",
            f"BERT-large, 512 tokens, {words}",
            DRIVER,
            published,
            "MiB",
            run,
            cuda="11.2",
            reason="four rows without checkpointing took 0.6 to 1.6 GiB more, of which the cause is not known"
            if "4 rows" in words and "1 x" not in words
            else "",
            guessed="PyTorch was 1.10 or so; 2.0.1 stands for it, of which softmax keeps its input as then",
        )


_LIGER = "https://github.com/linkedin/Liger-Kernel/blob/main/benchmark/data/all_benchmark_data.csv"


def _liger_run(script: str, at: str, torch: str, gpu: str = "a100-80gb") -> Run:
    return Run(
        f"liger {script}",
        ("python", "{RECIPES}/liger_script.py", "{CHECKOUT}", f"benchmark_{script}.py"),
        torch,
        gpu,
        f"linkedin/Liger-Kernel@{at}",
        "liger",
        steps=0,
        says=True,
    )


_PREFERENCES = (
    "off by whole copies of the head, 1,002 MiB, in all rows alike: what earlier cases of the same process had left "
    "behind; the speed tests that ran before are left out here"
)


def _liger() -> Iterator[Measured]:
    run = _liger_run("cross_entropy", "26a578e8", "2.4.1")
    for kind, who, numbers in (
        ("PyTorch", "huggingface", {4096: 1280.1259765625, 32768: 10240.1259765625, 131072: 40960.125}),
        ("Liger", "liger", {4096: 256.32861328125, 8192: 512.32861328125, 16384: 1024.32861328125,
                            32768: 2048.32861328125, 65536: 4096.32861328125, 131072: 8192.328125}),
    ):  # fmt: skip
        for size, published in numbers.items():
            yield Measured(
                _LIGER,
                f"cross entropy, {kind}, 16384 x {size}, fp32",
                ALLOCATED,
                published,
                "MiB",
                run,
                f"cross_entropy {who} V={size} T=2048",
            )
    run = _liger_run("fused_linear_cross_entropy", "7e3683e2", "2.5.1")
    for kind, who, numbers in (
        ("PyTorch", "huggingface", {4096: 6092.2822265625, 8192: 9162.3134765625, 16384: 15302.3759765625,
                                    32768: 27582.5}),
        ("Liger", "liger", {4096: 4245.5478515625, 8192: 4466.9697265625, 16384: 4910.4384765625,
                            32768: 5794.6259765625}),
    ):  # fmt: skip
        for size, published in numbers.items():
            yield Measured(
                _LIGER,
                f"head and cross entropy, {kind}, {size} x 128256, bf16",
                ALLOCATED,
                published,
                "MiB",
                run,
                f"fused_linear_cross_entropy {who} BT={size} T=None",
                reason="about a chunk of logits and a BLAS workspace less: the row came with the change that it "
                "measures, in a pull request whose commits are not known",
            )
    for name, by_who in (
        ("cpo", {"huggingface": (8645.314453125, 12184.330078125, 19262.361328125, 33418.42578125),
                 "liger": (8161.34619140625, 8209.361328125, 8305.392578125, 8497.455078125)}),
        ("simpo", {"huggingface": (8645.314453125, 12184.330078125, 19262.361328125, 33418.42578125),
                   "liger": (7675.3291015625, 7723.3447265625, 7819.3759765625, 8011.4384765625)}),
    ):  # fmt: skip
        run = _liger_run(f"{name}_loss", {"cpo": "16d06edf", "simpo": "ebd53035"}[name], "2.5.1")
        for who, numbers in by_who.items():
            for rows, published in zip((2, 4, 8, 16), numbers, strict=True):
                kind = "PyTorch" if who == "huggingface" else "Liger"
                yield Measured(
                    _LIGER,
                    f"head and {name.upper()} loss, {kind}, {rows} x 1024, bf16",
                    ALLOCATED,
                    published,
                    "MiB",
                    run,
                    f"fused_linear_{name}_loss {who} B={rows} T=1024",
                    reason=_PREFERENCES,
                )


_TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_PR_940 = "https://github.com/Lightning-AI/lightning-thunder/pull/940"


def _titan_run(name: str, *more: str) -> Run:
    options = (
        "--job.config_file",
        "train_configs/llama3_8b.toml",
        "--training.batch_size",
        "2",
        "--training.seed",
        "1",
        *more,
    )
    return Run(
        f"torchtitan {name}",
        ("torchrun", "--nproc-per-node", "8", "{RECIPES}/torchtitan_script.py", *options),
        "2.6.0",
        "h100",
        "pytorch/torchtitan@9dec370",
        "torchtitan",
        memory="94.7GiB",
        today=True,
    )


def _others() -> Iterator[Measured]:
    yield Measured(
        _TITAN,
        "Llama 3.1 8B, FSDP2 on 8, 2 x 8192, selective op",
        RESERVED,
        82.4,
        "GiB",
        _titan_run("eager"),
        guessed="allocator settings: without expandable segments",
    )
    yield Measured(
        _TITAN,
        "Llama 3.1 8B, FSDP2 on 8, 2 x 8192, selective op, compiled",
        RESERVED,
        77.0,
        "GiB",
        _titan_run("compiled", "--training.compile"),
        guessed="allocator settings: without expandable segments",
    )
    run = Run(
        "thunder 7b zero2",
        ("python", "{RECIPES}/litgpt_training.py", "Llama-2-7b-hf", "1", "4096", "1", "1", "0"),
        "2.5.1",
        "h100",
        packages="litgpt 2024-06",
        ranks=8,
    )
    yield Measured(_PR_940, "Llama 2 7B, FSDP2 on 8, not resharded, 1 x 4096", ALLOCATED, 47.45, "GB", run)
    run = Run(
        "thunder tinyllama",
        ("python", "{RECIPES}/litgpt_training.py", "tiny-llama-1.1b", "4", "2048", "8", "0", "1"),
        "2.5.1",
        "a100-40gb",
        packages="litgpt 2024-06",
    )
    yield Measured(
        f"{_LITGPT}/extensions/thunder/README.md",
        "TinyLlama 1.1B, 8 x 4 x 2048, bf16",
        ALLOCATED,
        29.84,
        "GB",
        run,
    )
    run = Run("timm vit_h14", ("python", "{RECIPES}/timm_vit_h14.py"), "2.4.1", "rtx4090", packages="timm")
    yield Measured(
        "https://github.com/pytorch/ao/pull/478",
        "timm ViT-H/14, bf16 AMP, 4 images, Adam",
        ALLOCATED,
        12.98,
        "GB",
        run,
        guessed="the GPU, a 4070 Ti SUPER, of which the properties are not here",
    )


def _left(reserved: float, free: float, ranks: int = 1) -> str:
    """Memory of a device that leaves PyTorch what it had: other processes took the rest of the card.

    Args:
        reserved, free: GiB, of the message.
    """
    return f"{reserved + free + (450 + (512 if ranks > 1 else 0)) / 1024:.2f}GiB"


_NANOGPT = "https://github.com/karpathy/nanoGPT/issues"


def _nanogpt_run(at: str, gpu: str, memory: str, *arguments: str, no_weights: bool = False, ranks: int | None = None,
                 packages: str = "") -> Run:  # fmt: skip
    return Run(
        f"nanogpt {at} {' '.join(arguments)}",
        ("python", "{RECIPES}/nanogpt_script.py", "{CHECKOUT}", *arguments),
        "2.0.1",
        gpu,
        f"karpathy/nanoGPT@{at}",
        packages,
        memory=memory,
        no_weights=no_weights,
        ranks=ranks,
        today=False,
    )


def _nanogpt() -> Iterator[OutOfMemoryReport]:
    yield OutOfMemoryReport(
        f"{_NANOGPT}/88#issuecomment",
        "nanoGPT, GPT-2, batch 32, V100 16 GB",
        _nanogpt_run("36c7db8c", "v100-16gb", "15.78GiB", "--batch_size=32", "--compile=False", "--dtype=float16"),
        6.14,
        10.16,
        guessed="float16: a V100 has no bfloat16",
    )
    yield OutOfMemoryReport(
        f"{_NANOGPT}/208",
        "nanoGPT, GPT-2 XL, batch 1, 24 GB",
        _nanogpt_run(
            "a82b33b5",
            "rtx3090",
            _left(21.92, 85.06 / 1024),
            "config/finetune_shakespeare.py",
            "--compile=False",
            "--no-sdpa",
            no_weights=True,
            packages="transformers 4.28",
        ),
        100 / 1024,
        21.67,
        21.92,
        reason="ours has 0.1 GiB more allocated, and stops at a smaller tensor of the same layer",
        guessed="not compiled; PyTorch before 2.0: 100 MiB are the scores of a layer, which no fused attention has",
    )
    yield OutOfMemoryReport(
        f"{_NANOGPT}/88",
        "nanoGPT, GPT-2, batch 2, float16, DDP on 4, V100 16 GB",
        _nanogpt_run(
            "e0e94a10",
            "v100-16gb",
            _left(5.25, 0.3, 4),
            "--dataset=shakespeare",
            "--dtype=float16",
            "--batch_size=2",
            "--compile=False",
            ranks=4,
        ),
        394 / 1024,
        5.17,
        5.25,
        guessed="the message says that 8.68 GiB were free; they are not given",
    )
    run = Run(
        "lit-llama train.py",
        ("python", "{RECIPES}/litllama_script.py", "{CHECKOUT}", "train.py"),
        "2.0.1",
        "rtx3090",
        "Lightning-AI/lit-llama@f135ed8",
        "lit-llama",
        memory=_left(22.89, 120.75 / 1024, 4),
        ranks=4,
        today=False,
    )
    yield OutOfMemoryReport(
        "https://github.com/Lightning-AI/lit-llama/issues/137",
        "lit-llama, 7B from scratch, 24 GB",
        run,
        172 / 1024,
        22.87,
        22.89,
    )
    run = Run(
        "lit-llama adapter",
        ("python", "{RECIPES}/litllama_script.py", "{CHECKOUT}", "finetune/adapter.py", "166"),
        "2.0.1",
        "rtx3090",
        "Lightning-AI/lit-llama@9969571",
        "lit-llama",
        memory=_left(13.13, 7.31 / 1024),
        today=False,
    )
    yield OutOfMemoryReport(
        "https://github.com/Lightning-AI/lit-llama/issues/402",
        "lit-llama, adapter on 7B, 24 GB of which others held ten",
        run,
        12 / 1024,
        13.07,
        13.13,
        guessed="tokens: its four samples have 166 tokens, as many as make it ask for 12 MiB",
    )


_ALPACA = "https://github.com/tatsu-lab/stanford_alpaca/issues"


def _alpaca_run(name: str, gpu: str, memory: str, ranks: int, accumulate: int, precision: str = "--bf16 True",
                tf32: str = "True", model: str = "llama-7b") -> Run:  # fmt: skip
    options = (
        f"--model_name_or_path {model} --data_path ./alpaca_data.json --output_dir out --num_train_epochs 3 "
        f"{precision} --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --gradient_accumulation_steps "
        f"{accumulate} --evaluation_strategy no --save_strategy steps --save_steps 2000 --save_total_limit 1 "
        "--learning_rate 2e-5 --weight_decay 0. --warmup_ratio 0.03 --lr_scheduler_type cosine --logging_steps 1 "
        f"--report_to none --tf32 {tf32} --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer"
    ).split()
    return Run(
        f"alpaca {name}",
        (
            "torchrun",
            f"--nproc_per_node={ranks}",
            "{RECIPES}/alpaca_script.py",
            "{CHECKOUT}",
            *options,
            "--fsdp",
            "full_shard auto_wrap",
        ),
        "2.0.1",
        gpu,
        "tatsu-lab/stanford_alpaca@3783d18",
        "transformers 4.28",
        memory=memory,
        no_weights=True,
        today=False,
    )


def _alpaca() -> Iterator[OutOfMemoryReport]:
    yield OutOfMemoryReport(
        f"{_ALPACA}/189",
        "Stanford Alpaca, LLaMA 7B, one A100 80 GB",
        _alpaca_run("189", "a100-80gb", _left(72.18, 0.7), 1, 8),
        774 / 1024,
        71.96,
        72.18,
    )
    yield OutOfMemoryReport(
        f"{_ALPACA}/218",
        "Stanford Alpaca, LLaMA 7B, one RTX 3060 12 GB",
        _alpaca_run("218", "rtx3090", _left(10.61, 697.94 / 1024), 1, 8),
        774 / 1024,
        10.58,
        10.61,
    )
    yield OutOfMemoryReport(
        f"{_ALPACA}/223",
        "Stanford Alpaca, LLaMA 7B, FSDP on five V100 32 GB, fp16",
        _alpaca_run("223", "v100-32gb", _left(30.39, 340.94 / 1024, 5), 5, 8, "--fp16 True --bf16 False", "False"),
        388 / 1024,
        28.42,
        30.39,
        reason="1.97 GiB of theirs were fragments, 0.17 of ours; how many steps they had made is not said",
    )
    yield OutOfMemoryReport(
        f"{_ALPACA}/73",
        "Stanford Alpaca, LLaMA 7B, FSDP on four RTX 3090",
        _alpaca_run("73", "rtx3090", _left(22.50, 127.56 / 1024, 4), 4, 1),
        194 / 1024,
        22.21,
        22.50,
    )
    yield OutOfMemoryReport(
        f"{_ALPACA}/86",
        "Stanford Alpaca, LLaMA 13B, FSDP on two A100 80 GB, fp16",
        _alpaca_run("86", "a100-80gb", _left(77.41, 468.31 / 1024, 2), 2, 8, "--fp16 True", "False", "llama-13b"),
        606 / 1024,
        77.07,
        77.41,
    )
