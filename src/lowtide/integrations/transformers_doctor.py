"""The doctor in transformers' ``Trainer``: looks at one batch when training begins.

Where a trainer has a loss or inputs of its own, as TRL's have, it looks at the first step's inputs, with that loss.

Trainer(..., callbacks=[DoctorCallback()]).train()
"""

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from lowtide.doctor.diagnosis import Diagnosis, checks_named, diagnose
from lowtide.doctor.step_listener import frames
from lowtide.step.optimizer_state import checked_optimizer
from lowtide.step.restore import TrainingState
from lowtide.tracing.tracer import Step

logger = logging.get_logger("transformers.trainer")


class DoctorCallback(TrainerCallback):
    """Logs what is silently wrong with the step that is about to be trained.

    Args:
        only, skip: Codes, as for ``lowtide.diagnose``.

    Attributes:
        found: The diagnosis; None before it has looked, or where it could not: then a warning says why.
    """

    def __init__(self, *, only: Collection[str] = (), skip: Collection[str] = ()) -> None:
        checks_named(only, skip)
        self.found: Diagnosis | None = None
        self._only, self._skip = only, skip

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **given: Any) -> None:
        """The Trainer has enabled checkpointing and wrapped the model by now."""
        trainer = _calling_trainer()
        if trainer is None or not has_own_step(trainer):
            self._look(given["model"], args, state, given, lambda model: _first_batch(args, given, model))
        elif args.world_size > 1:
            why = f"{type(trainer).__name__} has a step of its own, which may gather between ranks"
            logger.warning(f"lowtide: the doctor could not look: {why}. Train a step in one process to look.")
        else:
            self._look_at_first_inputs(trainer, args, state, given)

    def _look_at_first_inputs(
        self, trainer: Trainer, args: TrainingArguments, state: TrainerState, given: dict[str, Any]
    ) -> None:
        """Wait for what the first step really gets: GRPO's data set holds prompts, and its steps get completions."""
        train, prepare = trainer.training_step, trainer._prepare_inputs

        def first_step(wrapped: nn.Module, raw: Any, items: Any = None) -> torch.Tensor:
            def step(model: nn.Module, inputs: Any) -> torch.Tensor:
                with trainer.compute_loss_context_manager():
                    return trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)

            def prepared(raw: Any) -> Any:
                del trainer._prepare_inputs
                inputs = prepare(raw)
                with _metrics_kept(trainer):
                    self._look(given["model"], args, state, given, lambda _: inputs, step)
                return inputs

            del trainer.training_step
            trainer._prepare_inputs = prepared
            return train(wrapped, raw, items)

        trainer.training_step = first_step

    def _look(
        self, model: nn.Module, args: TrainingArguments, state: TrainerState, given: dict[str, Any],
        batch: Callable[[nn.Module], Any], step: Step | None = None,
    ) -> None:  # fmt: skip
        try:
            model.train()
            before = TrainingState(model)  # a data set may draw random numbers
            try:
                self.found = diagnose(
                    model, batch(model), step, arguments=args, optimizer=checked_optimizer(given.get("optimizer")),
                    only=self._only, skip=self._skip,
                )  # fmt: skip
            finally:
                before.restore()
        except Exception as error:  # a look never ends a training run
            logger.warning(f"lowtide: the doctor could not look: {type(error).__name__}: {error}")
            return
        if state.is_world_process_zero and (self.found or self.found.notes):
            logger.warning(f"lowtide: {self.found}")


def has_own_step(trainer: Trainer) -> bool:
    """Whether a step is more than the model's own loss of what the collator gives, as in TRL's trainers."""
    kind = type(trainer)
    own = kind.compute_loss is not Trainer.compute_loss or kind._prepare_inputs is not Trainer._prepare_inputs
    return own or trainer.compute_loss_func is not None


def _calling_trainer() -> Trainer | None:
    """Callbacks are told everything but the Trainer that calls them."""
    owners = (frame.f_locals.get("self") for frame in frames())
    return next((owner for owner in owners if isinstance(owner, Trainer)), None)


@contextmanager
def _metrics_kept(trainer: Trainer) -> Iterator[None]:
    """Losses of TRL's trainers append to metrics, which means over the steps would count, and to counters."""
    names, metrics = set(vars(trainer)), copy.deepcopy(getattr(trainer, "_metrics", None))
    plain = {n: v for n, v in vars(trainer).items() if isinstance(v, (int, float, torch.Tensor, type(None)))}
    try:
        yield
    finally:
        for name in vars(trainer).keys() - names:
            delattr(trainer, name)
        vars(trainer).update(plain)
        if metrics is not None:
            trainer._metrics = metrics


def _first_batch(args: TrainingArguments, given: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Made of the data set: iterating the loader would move its sampler, and Accelerate would count it."""
    loader = given["train_dataloader"]
    rows = [loader.dataset[i] for i in range(min(args.train_batch_size, len(loader.dataset)))]
    device = next(model.parameters()).device
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in loader.collate_fn(rows).items()}
