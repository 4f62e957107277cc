"""Runs of transformers' Trainer, and of those built on it, with and without lowtide, and what each step took."""

import gc
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from step_probe import resident_bytes
from support import checkpointing_word
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from lowtide.integrations.transformers import LowtideCallback
from lowtide.measurement.allocator import measuring
from lowtide.step.module_calls import is_lowtide_call
from lowtide.step.operators import tensors_in

VOCABULARY = 96
PADDING = 0


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    defaults = dict(
        hidden_size=64, num_hidden_layers=3, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, attention_dropout=0.1, pad_token_id=PADDING, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**defaults, **settings}))


def sentences(count: int = 16, shortest: int = 32, longest: int = 32) -> list[dict[str, list[int]]]:
    """Rows of tokens of different lengths, at random but always the same."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    rows_of_ids = [torch.tensor(row["input_ids"]) for row in rows]
    ids = nn.utils.rnn.pad_sequence(rows_of_ids, batch_first=True, padding_value=PADDING)
    mask = (ids != PADDING).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@dataclass
class Run:
    """What a run left: losses of its steps and evaluations, weights, and of each step the peak and what was there."""

    trainer: Any
    losses: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    planned: list[bool] = field(default_factory=list)  # of each step: it ran under a plan

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.trainer.model.state_dict()

    def budget(self, part: float) -> int:
        """So much of a plain run's activations, beside what is there: with all gradients, as in accumulation."""
        missing = resident_bytes(self.trainer.model, gradients_to_come=True) - resident_bytes(self.trainer.model)
        there = max(self.resident)
        return there + missing + int(part * (max(self.peaks) - there))

    def same_as(self, other: "Run") -> bool:
        same = [torch.equal(w, other.weights[name]) for name, w in self.weights.items()]
        return bool(self.losses) and self.losses == other.losses and len(same) > 1 and all(same)


class WaitForPlan(TrainerCallback):
    """After the first step of a run, until its plan is there: else short runs end before.

    ``every_step``: after each, where a later shape's plan is what counts.
    """

    def __init__(self, of: LowtideCallback, *, every_step: bool = False) -> None:
        self.of, self.every_step = of, every_step

    def on_step_end(self, *_: Any, **__: Any) -> None:
        fit = self.of.fit
        assert fit is not None
        if self.every_step or not fit.plans:
            fit.wait(120)


def probed(kind: type[Trainer], run: Run) -> type[Trainer]:
    """``kind`` with its steps noted in ``run``."""

    class Probed(kind):  # type: ignore[misc,valid-type]
        def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            states = list(getattr(self.optimizer, "state", {}).values())
            there = resident_bytes(model, (inputs, list(tensors_in(states))))
            fits = [c.fit for c in self.callback_handler.callbacks if isinstance(c, LowtideCallback)]
            planned = sum(fit.status().planned_steps for fit in fits)
            gc.collect()
            with measuring("cpu") as counter:
                loss = super().training_step(model, inputs, *args, **kwargs)
            run.resident.append(there)
            run.peaks.append(there + counter.peak)
            run.losses.append(loss.item())
            run.planned.append(sum(fit.status().planned_steps for fit in fits) > planned)
            return loss

    return Probed


def train(
    model: nn.Module,
    folder: Any,
    callback: LowtideCallback | None = None,
    *,
    kind: type[Trainer] = Trainer,
    data: Any = None,
    resume: bool = False,
    wait_every_step: bool = False,
    **settings: Any,
) -> Run:
    """Train for a few steps; settings of the Trainer itself (``compute_loss_func``, ...) are told from arguments."""
    run, own = Run(None), {}
    for name in ("compute_loss_func", "eval_dataset", "data_collator"):
        if name in settings:
            own[name] = settings.pop(name)
    args = TrainingArguments(**arguments(folder, **settings))
    own.setdefault("data_collator", padded)
    callbacks = [] if callback is None else [callback, WaitForPlan(callback, every_step=wait_every_step)]
    run.trainer = probed(kind, run)(model, args, train_dataset=data or sentences(), callbacks=callbacks, **own)
    run.trainer.train(resume_from_checkpoint=resume)
    run.losses += [entry["eval_loss"] for entry in run.trainer.state.log_history if "eval_loss" in entry]
    return run


def arguments(folder: Any, **settings: Any) -> dict[str, Any]:
    defaults = dict(
        output_dir=str(folder), use_cpu=True, max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2,
        save_strategy="no", report_to=[], logging_strategy="no", disable_tqdm=True, optim="sgd",
    )  # fmt: skip
    return {**defaults, **settings}


def is_as_before(model: nn.Module) -> bool:
    """Nothing of lowtide is left on it."""
    return not any(is_lowtide_call(module._compiled_call_impl) for module in model.modules())


def train_in_rank(rank: int, folder: str, with_lowtide: bool) -> dict[str, Any]:
    """One of the processes that train together, as ``torchrun`` starts them."""
    world = torch.distributed.get_world_size()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    callback = LowtideCallback("70%") if with_lowtide else None
    model = llama(hidden_size=32, intermediate_size=96, num_hidden_layers=2)
    run = train(model, folder, callback, gradient_accumulation_steps=2, **checkpointing_word.asking())
    wrapper = run.trainer.model_wrapped
    return {
        "wrapper": type(wrapper).__name__,
        "find_unused": wrapper.find_unused_parameters,
        "losses": run.losses,
        "weights": [w.double().sum().item() for w in run.weights.values()],
        "planned": 0 if callback is None else callback.fit.status().planned_steps,
        "as_before": is_as_before(model),
    }
