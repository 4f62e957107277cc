"""Checkpointing that a model has switched on already: a plan beside it would recompute what is recomputed anyway.

Known by the attributes that modules read when they run, one way a row of ``_WAYS``, so that no library is imported.
Calls of ``torch.utils.checkpoint`` in a model's own code have no switch: steps that are watched tell of these.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

KEEP, REPLACE = "keep", "replace"
_GRANULARITY = "recompute_granularity"
# What Megatron-Core's modules note of that setting when they are built.
_MEGATRON_FLAGS = (
    "checkpoint_core_attention", "recompute_input_layernorm", "recompute_pre_mlp_layernorm", "recompute_mlp",
    "recompute_up_proj", "activation_recompute", "moe_layer_recompute", "shared_experts_recompute",
)  # fmt: skip
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
_NOT_THERE = object()


def run_plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What stands in for a function that checkpoints."""
    return function(*args, **kwargs)


class _Way(NamedTuple):
    """How the modules of a library are told to checkpoint.

    Attributes:
        name: The attribute that they read when they run.
        owner: What has the attribute: of some modules a configuration, or a state that lies elsewhere. None: this
            module is not checkpointed in this way.
        is_on: Of the owner.
        off: The attribute's value while the model is fitted.
        told_as: What users call it; filled with the attribute's value.
    """

    name: str
    owner: Callable[[nn.Module], Any]
    is_on: Callable[[Any], bool]
    off: Callable[[Any], Any]
    told_as: str


def _flag(name: str, told_as: str, *, owner: Callable[[nn.Module], Any] | None = None) -> _Way:
    def itself(module: nn.Module) -> Any:
        # An attribute of its own, that is: PEFT's wrappers answer for what is inside them.
        return module if name in vars(module) or hasattr(type(module), name) else None

    return _Way(name, owner or itself, lambda has: getattr(has, name, False) is True, lambda _: False, told_as)


def _reads_it_to_checkpoint(name: str) -> Callable[[nn.Module], Any]:
    """The module, where a method of its class reads the flag and calls ``checkpoint``: elsewhere the name may mean
    something else."""

    def owner(module: nn.Module) -> Any:
        if name not in vars(module):
            return None
        methods = (getattr(m, "__code__", None) for c in type(module).__mro__ for m in vars(c).values())
        return module if any(code and {name, "checkpoint"} <= {*code.co_names} for code in methods) else None

    return owner


def _wrapper(kind: str, inner: str) -> Callable[[nn.Module], Any]:
    """The module, if it is a wrapper of this name around the module in its attribute ``inner``."""

    def owner(module: nn.Module) -> Any:
        is_kind = any(c.__name__ == kind for c in type(module).__mro__)
        return module if is_kind and inner in module._modules else None

    return owner


def _composable_state(module: nn.Module) -> Any:
    composable = sys.modules.get(_COMPOSABLE)
    return None if composable is None else composable.checkpoint.state(module)


def _megatron_config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if hasattr(config, _GRANULARITY) else None


def _megatron_module(module: nn.Module) -> Any:
    return None if _megatron_config(module) is None else module


_WAYS = (
    # transformers, diffusers and others; TRL and the Trainer switch it on too
    _flag("gradient_checkpointing", "gradient checkpointing"),
    # timm, OpenCLIP
    _flag("grad_checkpointing", "gradient checkpointing (grad_checkpointing)"),
    # MONAI, Swin Transformer and what descends from it
    *(
        _flag(name, f"gradient checkpointing ({name})", owner=_reads_it_to_checkpoint(name))
        for name in ("use_checkpoint", "use_checkpointing")
    ),
    # torch.distributed's wrapper: torchtitan, Accelerate, FSDP's utilities
    _Way(
        "checkpoint_fn",
        _wrapper("CheckpointWrapper", "_checkpoint_wrapped_module"),
        lambda wrapper: wrapper.checkpoint_fn is not run_plainly,
        lambda _: run_plainly,
        "checkpoint_wrapper",
    ),
    # MONAI's, which has no switch: it calls what it wraps instead
    _Way(
        "forward",
        _wrapper("ActivationCheckpointWrapper", "module"),
        lambda wrapper: "forward" not in vars(wrapper),
        lambda wrapper: wrapper.module.__call__,
        "ActivationCheckpointWrapper",
    ),
    # torch.distributed._composable.checkpoint
    _flag("enable_hook", "checkpoint (torch.distributed._composable)", owner=_composable_state),
    # Megatron-Core
    _Way(
        _GRANULARITY,
        _megatron_config,
        lambda config: bool(getattr(config, _GRANULARITY)),
        lambda _: None,
        f"Megatron's {_GRANULARITY}={{!r}}",
    ),
    *(_flag(name, f"Megatron's {name}", owner=_megatron_module) for name in _MEGATRON_FLAGS),
)


class _Switch(NamedTuple):
    """A way and whom it is of."""

    owner: weakref.ref[Any]
    way: _Way


class ExistingCheckpointing:
    """The switches of one model: off while the model is fitted."""

    def __init__(self, model: nn.Module, say: Callable[[str], None] | None = None, what: str = REPLACE) -> None:
        # Those there are: looked at before every step, so finding them anew would cost.
        self._switches = list(_switches_of(model))
        self._say, self._keep = say or (lambda _: None), what == KEEP
        self._switched_off: list[tuple[_Switch, Any]] = []  # and what the owner itself had there

    def switch_off(self) -> None:
        """Whatever has been switched on since the last look: by a Trainer when training begins, by TRL when it has
        generated."""
        found = list(self._switched_on())
        if not found:
            return
        told = self.told
        if self._keep:
            self._say(f"{told} is on and stays on: nothing inside the checkpointed modules is planned")
            return
        for owner, way in found:
            self._switched_off.append((_Switch(weakref.ref(owner), way), vars(owner).get(way.name, _NOT_THERE)))
            setattr(owner, way.name, way.off(owner))
        self._say(
            f"{told} was on: switched off while the model is fitted, since a plan recomputes less. "
            'remove() switches it on again; checkpointing="keep" leaves it on'
        )

    @property
    def told(self) -> str:
        """What is on, as users call it; "" where nothing is."""
        names = (way.told_as.format(getattr(owner, way.name, None)) for owner, way in self._switched_on())
        return " and ".join(dict.fromkeys(names))

    @property
    def will_be_replaced(self) -> bool:
        """Some is on, and the next ``switch_off`` switches it off."""
        return not self._keep and any(self._switched_on())

    def restore(self) -> None:
        """Have it as it was. Safe to call twice."""
        while self._switched_off:
            switch, before = self._switched_off.pop()
            owner = switch.owner()
            if owner is None:
                continue
            if before is _NOT_THERE:
                delattr(owner, switch.way.name)
            else:
                setattr(owner, switch.way.name, before)

    def _switched_on(self) -> Iterator[tuple[Any, _Way]]:
        for switch in self._switches:
            owner = switch.owner()
            if owner is not None and switch.way.is_on(owner):
                yield owner, switch.way


def _switches_of(model: nn.Module) -> Iterator[_Switch]:
    seen = set()
    for module in model.modules():
        for way in _WAYS:
            owner = way.owner(module)
            if owner is None or not hasattr(owner, way.name):
                continue
            if (id(owner), way.name) not in seen:  # modules share a configuration
                seen.add((id(owner), way.name))
                yield _Switch(weakref.ref(owner), way)
