"""Checkpointing that a model has switched on already: a plan beside it would recompute what is recomputed anyway."""

import weakref
from collections.abc import Callable

from torch import nn

_FLAG = "gradient_checkpointing"  # of transformers' models and layers; TRL and the Trainer switch it on too
REPLACE, KEEP = "replace", "keep"


class ExistingCheckpointing:
    """Transformers' flag on one model: switched off while the model is fitted."""

    def __init__(self, model: nn.Module, say: Callable[[str], None], what: str) -> None:
        self._model = weakref.ref(model)
        self._say, self._keep = say, what == KEEP
        self._switched_off: list[weakref.ref[nn.Module]] = []

    def switch_off(self) -> None:
        """Whatever has been switched on since the last look. A Trainer does that when training begins."""
        model = self._model()
        found = [] if model is None else [m for m in model.modules() if getattr(m, _FLAG, False) is True]
        if found and self._keep:
            self._say("gradient checkpointing is on and stays on: nothing inside the checkpointed modules is planned")
            return
        for module in found:
            setattr(module, _FLAG, False)
            self._switched_off.append(weakref.ref(module))
        if found:
            self._say(
                "gradient checkpointing was on: switched off while the model is fitted, since a plan recomputes less. "
                'remove() switches it on again; checkpointing="keep" leaves it on'
            )

    def restore(self) -> None:
        """Have it as it was. Safe to call twice."""
        while self._switched_off:
            module = self._switched_off.pop()()
            if module is not None:
                setattr(module, _FLAG, True)
