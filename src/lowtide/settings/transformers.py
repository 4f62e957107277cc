"""transformers' activation checkpointing: whole layers, every n-th of them, their inputs in host memory or not.

Read in transformers 5.23: ``TrainingArguments.__post_init__`` (the old names are used only where the new ones are not
given), ``Trainer._prepare_for_training`` (``every_n_layers`` and ``offload`` are taken out of the kwargs; empty kwargs
mean ``use_reentrant=False``), ``PreTrainedModel._set_gradient_checkpointing`` (layers are counted over the whole model,
and layer 0 is one of them), ``GradientCheckpointingLayer`` (a checkpoint only in train mode; caches are dropped).
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lowtide.settings import accelerate
from lowtide.settings.blocks import blocks
from lowtide.settings.checkpointing_names import NEW as _NEW
from lowtide.settings.checkpointing_names import OLD as _OLD
from lowtide.settings.description import Checkpoint, Description
from lowtide.settings.given import Given, near

_OWN = ("every_n_layers", "offload")
_TORCH = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
GROUPS = (f"{_NEW}_kwargs", f"{_OLD}_kwargs", "fsdp_config")
KEYS = (_NEW, f"{_NEW}_kwargs", _OLD, f"{_OLD}_kwargs", *_OWN, "use_reentrant", "fsdp_config")


def describe(given: Given, model: nn.Module) -> Description:
    """What ``TrainingArguments``, or the arguments of ``activation_checkpointing_enable``, mean.

    Raises:
        SettingsError: transformers or PyTorch would raise, or the model has no layer that can be a checkpoint.
    """
    direct = [name for name in (*_OWN, "use_reentrant") if name in given]
    _find_old_name(given)
    on = given.flag(_NEW, given.flag(_OLD, bool(direct)))
    if given.section("fsdp_config"):
        return _with_fsdp(given, model, on)
    kwargs = _kwargs(given)
    for name in direct:
        given.note(name, f"read as an argument of {_NEW}_enable(); in TrainingArguments it belongs in {_NEW}_kwargs")
        kwargs.setdefault(name, given.value(name))
    if not on:
        for name in (n for n in (f"{_NEW}_kwargs", f"{_OLD}_kwargs", *direct) if n in given):
            given.does_nothing(name, f"{_NEW} is off")
        return Description("no checkpointing")
    return checkpointed_layers(given, model, kwargs)


def checkpointed_layers(
    given: Given, model: nn.Module, kwargs: Mapping[str, Any], keeps: frozenset[str] = frozenset()
) -> Description:
    """Every n-th layer as transformers enables it with ``kwargs``.

    Args:
        keeps: Operators whose outputs are kept inside.
    """
    inner = Given(given.framework, kwargs)
    every, offload = inner.count("every_n_layers", 1) or 1, inner.flag("offload")
    known = (*_OWN, *_TORCH)
    passed = {name: value for name, value in kwargs.items() if name not in _OWN}
    for name in passed:
        if name not in _TORCH:
            raise given.error(
                f"{_NEW}_kwargs has {name!r}, which torch.utils.checkpoint does not take.{near(name, known)}",
                f"Use some of {', '.join(known)}.",
            )
    reentrant = _reentrant(given, passed)
    layers = checkpoint_layers(given, model)
    chosen = layers[::every]
    if every > 1 and len(chosen) == 1:
        given.note("every_n_layers", f"{every}, and the model has {len(layers)} layers: only the first is a checkpoint")
    if not model.training:
        given.does_nothing(_NEW, "the model is in eval mode, where transformers' layers are no checkpoints")
        return Description("no checkpointing in eval mode")
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        given.note("use_cache", "is on in the model's config; checkpointed layers drop the cache, plain ones keep it")
    what = "all layers" if every == 1 else f"one layer in {every}"
    return Description(
        f"transformers checkpoints {what}, {len(chosen)} of {len(layers)}" + (", reentrant" if reentrant else ""),
        tuple(Checkpoint((path,), keeps) for path in chosen),
        offloads=tuple(chosen) if offload else (),
        enable={"kwargs": passed or None, "every_n_layers": every, "offload": offload},
    )


def checkpoint_layers(given: Given, model: nn.Module) -> list[str]:
    """Paths of the layers that transformers counts.

    Raises:
        SettingsError: the model says that it has none, or there is none.
    """
    if getattr(model, "supports_gradient_checkpointing", True) is False:
        raise given.error(
            f"transformers refuses: {type(model).__name__} does not support activation checkpointing.",
            f"Leave {_NEW} out.",
        )
    found = [path for path, module in model.named_modules() if is_layer(module)]
    if found:
        return found
    found = blocks(model)
    if not found:
        raise given.error(
            f"{type(model).__name__} has no layer that transformers checkpoints, and no repeated blocks.",
            f"Leave {_NEW} out, or plan it with lowtide.solve.",
        )
    given.note(
        _NEW, f"{type(model).__name__} has none of transformers' checkpoint layers: its repeated blocks are taken"
    )
    return found


def is_layer(module: nn.Module) -> bool:
    """One that transformers checkpoints by a flag in it."""
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _kwargs(given: Given) -> dict[str, Any]:
    _find_old_name(given, "_kwargs")
    return given.section(f"{_NEW}_kwargs" if f"{_NEW}_kwargs" in given else f"{_OLD}_kwargs")


def _find_old_name(given: Given, suffix: str = "") -> None:
    """The new name counts where it is given, else the old one."""
    new, old = _NEW + suffix, _OLD + suffix
    if old in given:
        given.deprecated(old, f"write {new}; it goes in transformers 6")
        if new in given:
            given.does_nothing(old, f"{new} is given too, and is the one that counts")


def _reentrant(given: Given, passed: Mapping[str, Any]) -> bool:
    """Whether the reentrant variant runs.

    Raises:
        SettingsError: with arguments that it does not take.
    """
    reentrant = passed.get("use_reentrant")
    if passed and reentrant is None:
        given.note("use_reentrant", "is not given beside other kwargs: PyTorch warns, and takes the reentrant variant")
        reentrant = True
    wrong = sorted(name for name in ("context_fn", "determinism_check", "debug", "early_stop") if name in passed)
    if reentrant and wrong:
        raise given.error(
            f"{', '.join(wrong)} cannot be combined with use_reentrant=True.", "Set use_reentrant: false."
        )
    if reentrant:
        given.note("use_reentrant", "true: a layer whose inputs need no gradient gives its parameters none")
    return bool(reentrant)


def _with_fsdp(given: Given, model: nn.Module, on: bool) -> Description:
    found = accelerate.describe(given.inner(given.section("fsdp_config"), "accelerate"), model)
    if on and found.checkpoints:
        raise given.error(
            f"{_NEW} and fsdp_config's activation_checkpointing are both on, which the Trainer refuses.",
            f"Keep that of fsdp_config, and set {_NEW}: false.",
        )
    if on:
        return checkpointed_layers(given, model, _kwargs(given))
    return found
