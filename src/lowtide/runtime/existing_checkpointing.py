"""Checkpointing that a model has switched on already: a plan beside it would recompute what is recomputed anyway."""

import weakref
from collections.abc import Callable

from torch import nn

_FLAG = "gradient_checkpointing"  # of transformers' models and layers; TRL and the Trainer switch it on too
REPLACE, KEEP = "replace", "keep"


class ExistingCheckpointing:
    """Transformers' flag on one model: switched off while the model is fitted."""

    def __init__(self, model: nn.Module, say: Callable[[str], None], what: str) -> None:
        # Those that can have it: looked at before every step, so finding them anew would cost.
        self._modules = [weakref.ref(module) for module in model.modules() if _has_flag(module)]
        self._say, self._keep = say, what == KEEP
        self._switched_off: list[weakref.ref[nn.Module]] = []

    def switch_off(self) -> None:
        """Whatever has been switched on since the last look: by a Trainer when training begins, by TRL when it has
        generated."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        found = [module for module in modules if getattr(module, _FLAG) is True]
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


def _has_flag(module: nn.Module) -> bool:
    """Of its own: PEFT's wrappers answer for what is inside them."""
    return _FLAG in vars(module) or hasattr(type(module), _FLAG)
