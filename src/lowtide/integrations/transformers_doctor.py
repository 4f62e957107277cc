"""The doctor in transformers' ``Trainer``: looks at one batch when training begins.

Trainer(..., callbacks=[DoctorCallback()]).train()
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from lowtide.doctor.diagnosis import Diagnosis, checks_named, diagnose
from lowtide.tracing.restore import TrainingState

logger = logging.get_logger("transformers.trainer")


class DoctorCallback(TrainerCallback):
    """Logs what is silently wrong with the step that is about to be trained.

    Args:
        only, skip: Codes, as for ``lowtide.diagnose``.

    Attributes:
        found: The diagnosis; None before training has begun, or where the batch could not be had.
    """

    def __init__(self, *, only: Collection[str] = (), skip: Collection[str] = ()) -> None:
        checks_named(only, skip)
        self.found: Diagnosis | None = None
        self._only, self._skip = only, skip

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **given: Any) -> None:
        """The Trainer has enabled checkpointing and wrapped the model by now."""
        try:
            model = given["model"].train()
            before = TrainingState(model)  # a data set may draw random numbers
            try:
                self.found = diagnose(
                    model, _first_batch(args, given["train_dataloader"], model), arguments=args,
                    optimizer=_own(given.get("optimizer")), only=self._only, skip=self._skip,
                )  # fmt: skip
            finally:
                before.restore()
        except Exception as error:  # a look never ends a training run
            logger.warning(f"lowtide: the doctor could not look: {type(error).__name__}: {error}")
            return
        if state.is_world_process_zero and (self.found or self.found.notes):
            logger.warning(f"lowtide: {self.found}")


def _first_batch(args: TrainingArguments, loader: Any, model: nn.Module) -> dict[str, Any]:
    """Made of the data set: iterating the loader would move its sampler, and Accelerate would count it."""
    rows = [loader.dataset[i] for i in range(min(args.train_batch_size, len(loader.dataset)))]
    device = next(model.parameters()).device
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in loader.collate_fn(rows).items()}


def _own(optimizer: Any) -> Any:
    """What Accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
