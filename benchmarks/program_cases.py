"""The programs of ``programs.py``: their commands, as their users write them, and the files that these need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

FILES = Path(__file__).parent / "program_files"
_ON_CPU = (("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0"))


@dataclass(frozen=True)
class Run:
    """What a command is made of.

    Attributes:
        python: The interpreter.
        kind: The program's case.
        checkpointed: With the program's own checkpointing.
        steps: Forward and backward passes.
        output: Where the trained weights go.
    """

    python: str
    kind: str
    checkpointed: bool
    steps: int
    output: Path

    def module(self, name: str, *words: object) -> list[str]:
        return [self.python, "-m", name, *map(str, words)]


@dataclass(frozen=True)
class Program:
    """A program's command.

    Attributes:
        name: As its users write it.
        package: Whose version is told.
        kinds: Its cases.
        command: The command of a run, in the folder of ``tiny_model.py``.
        has_checkpointing: Whether the program has checkpointing of its own that one process can use.
        prepare: A file of ``program_files/`` that turns the model into the program's form; "": none.
        variables: Of the environment.
    """

    name: str
    package: str
    kinds: tuple[str, ...]
    command: Callable[[Run], list[str]]
    has_checkpointing: bool = True
    prepare: str = ""
    variables: tuple[tuple[str, str], ...] = ()


def _llama_factory(run: Run) -> list[str]:
    return run.module(
        "llamafactory.cli", "train", FILES / "llamafactory.yaml", f"output_dir={run.output}",
        f"finetuning_type={run.kind}", f"max_steps={run.steps}",
        f"disable_gradient_checkpointing={not run.checkpointed}",
    )  # fmt: skip


def _swift(run: Run) -> list[str]:
    return run.module(
        "swift.cli.main", "sft", FILES / "swift.yaml", "--output_dir", run.output, "--tuner_type", run.kind,
        "--max_steps", run.steps, "--save_steps", run.steps, "--gradient_checkpointing", str(run.checkpointed).lower(),
    )  # fmt: skip


def _axolotl(run: Run) -> list[str]:
    adapter = ("--adapter", "lora") if run.kind == "lora" else ()
    return run.module(
        "axolotl.cli.main", "train", FILES / "axolotl.yaml", "--launcher", "python", "--output-dir", run.output,
        "--max-steps", run.steps, *adapter, "--gradient-checkpointing", str(run.checkpointed).lower(),
    )  # fmt: skip


def _litgpt(run: Run) -> list[str]:
    return run.module(
        "litgpt", f"finetune_{run.kind}", "litgpt", "--config", FILES / "litgpt.yaml", "--out_dir", run.output,
        "--train.max_steps", run.steps,
    )  # fmt: skip


def _verl(run: Run) -> list[str]:
    settings = {
        "data.train_files": "data/messages.parquet", "data.train_batch_size": 8, "data.micro_batch_size_per_gpu": 8,
        "data.use_dynamic_bsz": False, "data.max_length": 160, "data.num_workers": 0,
        "data.ignore_input_ids_mismatch": True, "model.path": "model", "model.use_remove_padding": False,
        "+model.override_config.attn_implementation": "sdpa", "model.enable_gradient_checkpointing": run.checkpointed,
        "engine.strategy": "fsdp2", "engine.param_offload": False, "trainer.logger": "[console]",
        "trainer.total_training_steps": run.steps, "trainer.total_epochs": 1000, "trainer.device": "cpu",
        "trainer.default_local_dir": run.output, "checkpoint.save_contents": "[model]",
    }  # fmt: skip
    return run.module(
        "torch.distributed.run", "--nproc-per-node", "1", "--master-port", "29541", FILES / "verl_on_cpu.py",
        *(f"{name}={value}" for name, value in settings.items()),
    )  # fmt: skip


def _openrlhf(run: Run) -> list[str]:
    words = (
        "--model.model_name_or_path model --data.dataset data/chats.json --data.input_key instruction "
        "--data.output_key output --data.max_len 128 --train.micro_batch_size 8 --train.batch_size 8 "
        f"--train.max_epochs {run.steps // 12} --ds.zero_stage 0 --ds.param_dtype bf16 --ds.attn_implementation sdpa "
        f"--adam.lr 1e-3 --ckpt.output_dir {run.output} --logger.logging_steps 1 --eval.steps -1 --train.seed 0"
    )
    return run.module(
        "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", "29545", FILES / "openrlhf_on_cpu.py",
        *words.split(), *["--model.gradient_checkpointing_enable"] * run.checkpointed,
    )  # fmt: skip


def _script(name: str, *launcher: str, checkpoints: bool = True) -> Callable[[Run], list[str]]:
    """A script of ``program_files/``, by a launcher's module and its words; some have no checkpointing."""

    def command(run: Run) -> list[str]:
        words = [FILES / name, "--output", run.output, "--steps", run.steps]
        words += ["--checkpointing"] * (run.checkpointed and checkpoints) + ["--full"] * (run.kind == "full")
        if launcher:
            return run.module(*launcher, *words)
        return [run.python, *map(str, words)]

    return command


_without = partial(_script, checkpoints=False)


def _trl(run: Run) -> list[str]:
    data = {"reward": "data/preferences", "KTO": "data/judged"}[run.kind]
    return run.module(
        f"trl.scripts.{run.kind.lower()}", "--model_name_or_path", "model", "--dataset_name", data, "--output_dir",
        run.output, "--max_steps", run.steps, "--per_device_train_batch_size", 4, "--max_length", 160,
        "--learning_rate", "1e-3", "--logging_steps", 1, "--report_to", "none", "--save_strategy", "no", "--use_cpu",
        "--bf16", "False", "--dtype", "float32", "--gradient_checkpointing", str(run.checkpointed),
    )  # fmt: skip


def _nano_gpt(run: Run) -> list[str]:
    settings = {
        "device": "cpu", "compile": False, "dataset": "letters", "eval_interval": run.steps, "eval_iters": 1,
        "log_interval": 1, "block_size": 64, "batch_size": 12, "n_layer": 4, "n_head": 4, "n_embd": 128, "dropout": 0.1,
        "gradient_accumulation_steps": 2, "max_iters": run.steps, "lr_decay_iters": run.steps, "warmup_iters": 10,
        "always_save_checkpoint": True, "out_dir": run.output,
    }  # fmt: skip
    return [run.python, "train.py", *(f"--{name}={value}" for name, value in settings.items())]


PROGRAMS = (
    Program("LLaMA-Factory", "llamafactory", ("full", "lora"), _llama_factory),
    Program("ms-swift", "ms_swift", ("full", "lora"), _swift),
    Program("axolotl", "axolotl", ("full", "lora"), _axolotl, variables=(("AXOLOTL_DO_NOT_TRACK", "1"),)),
    Program("litgpt", "litgpt", ("full", "lora"), _litgpt, has_checkpointing=False, prepare="litgpt_model.py"),
    Program(
        "verl", "verl", ("SFT worker, FSDP2",), _verl, prepare="verl_data.py",
        variables=(("HYDRA_FULL_ERROR", "1"),),
    ),
    Program("OpenRLHF", "openrlhf", ("SFT, DeepSpeed, bf16",), _openrlhf, variables=_ON_CPU),
    Program("Composer", "mosaicml", ("all weights",), _script("composer_train.py")),
    Program("Unsloth", "unsloth", ("full", "lora"), _script("unsloth_train.py")),
    Program(
        "accelerate launch", "accelerate", ("accumulated, clipped",),
        _script("accelerate_train.py", "accelerate.commands.launch", "--cpu", "--num_processes", "1"),
    ),
    Program(
        "torchrun", "torch", ("DDP, two ranks",),
        _script("torchrun_train.py", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"),
    ),
    Program(
        "deepspeed", "deepspeed", ("ZeRO-2, accumulated",),
        _script("deepspeed_train.py", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", "29535"),
        variables=_ON_CPU,
    ),
    Program("Fabric", "lightning", ("bf16-mixed, accumulated",), _script("fabric_train.py")),
    Program("TRL", "trl", ("reward", "KTO"), _trl, prepare="trl_data.py"),
    Program("nanoGPT", "", ("train.py, dropout",), _nano_gpt, has_checkpointing=False, prepare="nanogpt_here.py"),
    Program(
        "transformers Seq2SeqTrainer", "transformers", ("Whisper, LayerDrop",), _script("speech_train.py"),
    ),
    Program(
        "sentence-transformers", "sentence_transformers", ("pairs, in-batch negatives",),
        _script("sentence_transformers_train.py"),
    ),
    Program("diffusers", "diffusers", ("UNet, EMA, clipped",), _script("diffusers_train.py")),
    Program("timm", "timm", ("ViT, stochastic depth, Mixup, EMA",), _script("timm_train.py")),
    Program("OpenCLIP", "open_clip_torch", ("its main, bf16",), _script("openclip_train.py")),
    Program("Ultralytics", "ultralytics", ("YOLOv8n, augmented, EMA",), _without("yolo_train.py"), False),
    Program("torchvision", "torchvision", ("Faster R-CNN, lists of images",), _without("detection_train.py"), False),
    Program("MONAI", "monai", ("SwinUNETR, SupervisedTrainer",), _script("monai_train.py")),
    Program("PyTorch Geometric", "torch_geometric", ("GraphSAGE, parts of a graph",), _without("pyg_train.py"), False),
    Program("MACE", "mace_torch", ("energies and forces",), _without("mace_train.py"), False, "mace_data.py"),
    Program("Opacus", "opacus", ("DP-SGD, Poisson batches",), _without("opacus_train.py"), False),
    Program("Ignite", "pytorch_ignite", ("accumulated, EMA",), _without("ignite_train.py"), False),
    Program("skorch", "skorch", ("transformer, validated",), _without("skorch_train.py"), False),
    Program("pytorch-tabnet", "pytorch_tabnet", ("a table",), _without("tabnet_train.py"), False),
    Program("Stable-Baselines3", "stable_baselines3", ("PPO, images",), _without("ppo_train.py"), False),
    Program(
        "pytorch-forecasting", "pytorch_forecasting", ("temporal fusion transformer",),
        _without("forecasting_train.py"), False,
    ),
    Program("GluonTS", "gluonts", ("DeepAR",), _without("gluonts_train.py"), False),
    Program("NeuralForecast", "neuralforecast", ("PatchTST",), _without("neuralforecast_train.py"), False),
)  # fmt: skip
