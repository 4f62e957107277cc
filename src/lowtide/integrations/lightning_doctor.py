"""The doctor in Lightning's ``Trainer``: looks at the first batch, before it is trained on.

Trainer(..., callbacks=[DoctorCallback()])
"""

from collections.abc import Collection
from typing import Any
from unittest.mock import patch

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn
except ImportError:  # the same code under its older name
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.rank_zero import rank_zero_warn
import torch
from torch import nn

from lowtide.doctor.diagnosis import Diagnosis, checks_named, diagnose


class DoctorCallback(Callback):
    """Warns of what is silently wrong with the step that is about to be trained.

    Args:
        only, skip: Codes, as for ``lowtide.diagnose``.

    Attributes:
        found: The diagnosis; None before the first batch, or where there is no step to look at (manual optimization).
    """

    def __init__(self, *, only: Collection[str] = (), skip: Collection[str] = ()) -> None:
        checks_named(only, skip)
        self.found: Diagnosis | None = None
        self._only, self._skip, self._looked = only, skip, False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The strategy has wrapped the model and moved the batch by now."""
        if self._looked:
            return
        self._looked = True

        def step(_: nn.Module, batch: Any) -> torch.Tensor:
            with trainer.precision_plugin.train_step_context():
                output = pl_module.training_step(batch, batch_idx)
            return output["loss"] if isinstance(output, dict) else output

        try:
            if not pl_module.automatic_optimization:
                raise ValueError("with manual optimization training_step updates the weights")
            # ``self.log`` leaves no trace: means over an epoch would count the look.
            with patch.multiple(pl_module, log=_nothing, log_dict=_nothing):
                self.found = diagnose(
                    trainer.strategy.model, batch, step, only=self._only, skip=self._skip,
                    optimizer=trainer.optimizers[0] if len(trainer.optimizers) == 1 else None,
                )  # fmt: skip
        except Exception as error:  # a look never ends a training run
            rank_zero_warn(f"lowtide: the doctor could not look: {type(error).__name__}: {error}")
            return
        if self.found or self.found.notes:
            rank_zero_warn(f"lowtide: {self.found}")


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a method."""
