"""Checkpointing that a model has switched on already: a plan beside it would recompute what is recomputed anyway.

Known by the attributes that the models read when they run, so that no library is imported.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

KEEP, REPLACE = "keep", "replace"
_FLAG = "gradient_checkpointing"  # of transformers' models and layers; TRL and the Trainer switch it on too
# Megatron-Core's setting, and what its modules note of it when they are built.
_GRANULARITY = "recompute_granularity"
_MEGATRON_FLAGS = (
    "checkpoint_core_attention", "recompute_input_layernorm", "recompute_pre_mlp_layernorm", "recompute_mlp",
    "recompute_up_proj", "activation_recompute", "moe_layer_recompute", "shared_experts_recompute",
)  # fmt: skip


class _Switch(NamedTuple):
    """An attribute that switches checkpointing on, of a module or of a configuration that modules share."""

    owner: Any
    name: str
    on: Any
    off: Any
    told_as: str


class ExistingCheckpointing:
    """The switches of one model: off while the model is fitted."""

    def __init__(self, model: nn.Module, say: Callable[[str], None], what: str) -> None:
        # Those that can have it: looked at before every step, so finding them anew would cost.
        self._modules = [weakref.ref(module) for module in model.modules() if _can_be_switched(module)]
        self._say, self._keep = say, what == KEEP
        self._switched_off: list[tuple[weakref.ref[Any], str, Any]] = []

    def switch_off(self) -> None:
        """Whatever has been switched on since the last look: by a Trainer when training begins, by TRL when it has
        generated."""
        found = _switched_on([module for reference in self._modules if (module := reference()) is not None])
        told = " and ".join(dict.fromkeys(switch.told_as for switch in found))
        if found and self._keep:
            self._say(f"{told} is on and stays on: nothing inside the checkpointed modules is planned")
            return
        for switch in found:
            setattr(switch.owner, switch.name, switch.off)
            self._switched_off.append((weakref.ref(switch.owner), switch.name, switch.on))
        if found:
            self._say(
                f"{told} was on: switched off while the model is fitted, since a plan recomputes less. "
                'remove() switches it on again; checkpointing="keep" leaves it on'
            )

    def restore(self) -> None:
        """Have it as it was. Safe to call twice."""
        while self._switched_off:
            reference, name, on = self._switched_off.pop()
            owner = reference()
            if owner is not None:
                setattr(owner, name, on)


def _can_be_switched(module: nn.Module) -> bool:
    """A flag of its own, that is: PEFT's wrappers answer for what is inside them."""
    own_flag = _FLAG in vars(module) or hasattr(type(module), _FLAG)
    return own_flag or hasattr(getattr(module, "config", None), _GRANULARITY)


def _switched_on(modules: Iterable[nn.Module]) -> list[_Switch]:
    found: dict[tuple[int, str], _Switch] = {}
    for module in modules:
        switches = []
        if getattr(module, _FLAG, False) is True:
            switches.append(_Switch(module, _FLAG, True, False, "gradient checkpointing"))
        config = getattr(module, "config", None)
        granularity = getattr(config, _GRANULARITY, None)
        if granularity:
            told_as = f"Megatron's {_GRANULARITY}={granularity!r}"
            switches.append(_Switch(config, _GRANULARITY, granularity, None, told_as))
            flags = (name for name in _MEGATRON_FLAGS if getattr(module, name, False) is True)
            switches += (_Switch(module, name, True, False, told_as) for name in flags)
        found.update({(id(switch.owner), switch.name): switch for switch in switches})
    return list(found.values())
