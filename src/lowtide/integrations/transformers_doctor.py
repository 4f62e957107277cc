"""The doctor in transformers' ``Trainer``: looks at one batch when training begins.

Trainer(..., callbacks=[DoctorCallback()]).train()
"""

from collections.abc import Collection
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from lowtide.doctor.diagnosis import Diagnosis, checks_named, diagnose

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
            batch = next(iter(given["train_dataloader"]))
            model = given["model"].train()
            self.found = diagnose(
                model, dict(batch), arguments=args, optimizer=_own(given.get("optimizer")), only=self._only,
                skip=self._skip,
            )  # fmt: skip
        except Exception as error:  # a look never ends a training run
            logger.warning(f"lowtide: the doctor could not look: {type(error).__name__}: {error}")
            return
        if state.is_world_process_zero and (self.found or self.found.notes):
            logger.warning(f"lowtide: {self.found}")


def _own(optimizer: Any) -> Any:
    """What Accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
