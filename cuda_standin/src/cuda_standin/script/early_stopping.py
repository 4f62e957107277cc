"""Early stopping is off where values are skipped: a loss of zeros never improves, and a run would end before its steps.

transformers' and Lightning's; a loop that stops by a rule of its own has the values that it has.
"""

import functools
import os
from typing import Any

from cuda_standin import imports
from cuda_standin.script import record

_LIGHTNING = ("lightning.pytorch.callbacks.early_stopping", "pytorch_lightning.callbacks.early_stopping")


def install() -> None:
    if "STANDIN_SKIP_BYTES" not in os.environ:
        return
    imports.after_import("transformers.trainer_callback", _of_transformers)
    for name in _LIGHTNING:
        imports.after_import(name, _of_lightning)


def _of_transformers(module: Any) -> None:
    callback = module.EarlyStoppingCallback
    said = callback.on_evaluate

    @functools.wraps(said)
    def goes_on(self: Any, args: Any, state: Any, control: Any, *rest: Any, **more: Any) -> Any:
        before = control.should_training_stop
        found = said(self, args, state, control, *rest, **more)
        if control.should_training_stop and not before:
            control.should_training_stop = False
            _note("transformers' EarlyStoppingCallback")
        return found

    callback.on_evaluate = goes_on


def _of_lightning(module: Any) -> None:
    callback = module.EarlyStopping
    said = callback._evaluate_stopping_criteria

    @functools.wraps(said)
    def goes_on(self: Any, current: Any) -> tuple[bool, str | None]:
        stops, reason = said(self, current)
        if not stops:
            return stops, reason
        _note("Lightning's EarlyStopping")
        return False, None

    callback._evaluate_stopping_criteria = goes_on


def _note(who: str) -> None:
    record.notes.add(f"{who} would have ended it, by values that are none: it goes on")
