"""Settings as they are really carried out in this process: by transformers, or by ``torch.utils.checkpoint``."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowtide.settings import checkpointing_names
from lowtide.settings.checkpointing_names import can_enable
from lowtide.settings.decisions import PRODUCTS, base_name
from lowtide.settings.description import Checkpoint, Description


def why_not(description: Description, model: nn.Module) -> str:
    """Why these settings cannot be carried out here; "" where they can."""
    if description.moves:
        return "it moves tensors to host memory, which only the library itself does"
    if description.kept_ratio is not None:
        return "it is a rule of the compiler"
    if not description.checkpoints:
        return "it checkpoints nothing"
    if any(len(c.modules) > 1 for c in description.checkpoints):
        return "several layers in one checkpoint are one call of the library's own loop over layers"
    if any(c.attention_only or c.discards_output for c in description.checkpoints):
        return "it is a part of a layer that only the library's own layer can run again"
    return ""


def carrier(description: Description, model: nn.Module) -> str:
    """Who carries them out."""
    enables = description.enable is not None and can_enable(model)
    return "transformers" if enables else "torch.utils.checkpoint"


@contextmanager
def carried_out(description: Description, model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` runs with the checkpoints of ``description``; ``why_not`` has to be ""."""
    context = _context_fn(description.checkpoints[0])
    if carrier(description, model) == "transformers":
        with _enabled(model, dict(description.enable or {}), context):
            yield
        return
    changed = [model.get_submodule(path) for c in description.checkpoints for path in c.modules]
    with checkpointed_modules(changed, **context):
        yield


@contextmanager
def checkpointed_modules(modules: Collection[nn.Module], **options: Any) -> Iterator[None]:
    """Inside, a call of one of these modules is a checkpointed call."""
    before = [(m, "forward" in vars(m), m.forward) for m in modules]
    try:
        for module, _, forward in before:
            module.forward = partial(checkpoint, forward, use_reentrant=False, **options)
        yield
    finally:
        for module, has_own, forward in before:
            if has_own:
                module.forward = forward
            else:
                del module.forward


@contextmanager
def _enabled(model: Any, enable: dict[str, Any], context: dict[str, Any]) -> Iterator[None]:
    """transformers' own switch, and afterwards everything as it was."""
    kwargs = {**(enable.pop("kwargs") or {}), **context} or None
    if kwargs:
        kwargs.setdefault("use_reentrant", not context)
    with settings_kept(model):
        checkpointing_names.enable(model, kwargs, **enable)
        yield


@contextmanager
def settings_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards checkpointing is set as before: flags, functions, and the hooks that come with them."""
    before = [(vars(m), dict(vars(m)), dict(m._forward_hooks)) for m in model.modules()]
    try:
        yield
    finally:
        for attributes, values, hooks in before:
            attributes.clear()
            attributes.update(values)
            attributes["_forward_hooks"].clear()
            attributes["_forward_hooks"].update(hooks)


def _context_fn(rule: Checkpoint) -> dict[str, Any]:
    """The argument that makes ``torch.utils.checkpoint`` keep the outputs of some ops."""
    if not rule.keeps:
        return {}

    def contexts() -> Any:
        seen = {True: 0, False: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = base_name(str(op))
            if name in PRODUCTS and name in rule.keeps and rule.skips_every:
                seen[ctx.is_recompute] += 1
                if seen[ctx.is_recompute] % rule.skips_every == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if name in rule.keeps else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return {"context_fn": contexts}
