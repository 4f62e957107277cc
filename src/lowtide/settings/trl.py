"""TRL's: transformers' checkpointing, on by default, besides ``selective`` and activation offloading.

Read in trl 1.16: ``_BaseConfig`` (``gradient_checkpointing`` is True unless switched off), ``SFTTrainer``
(``selective`` in the kwargs keeps attention's outputs; it needs checkpointing, and not the reentrant variant; other
trainers pass it on to PyTorch), ``OffloadActivations`` (stored tensors of 1024 bytes and more, but not those of the
output head).
"""

from torch import nn

from lowtide.settings import transformers
from lowtide.settings.checkpointing_names import NEW as _NEW
from lowtide.settings.checkpointing_names import OLD as _OLD
from lowtide.settings.description import Description
from lowtide.settings.given import Given

KEYS = (*transformers.KEYS, "activation_offloading")
_ATTENTION = frozenset({
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
})  # fmt: skip
_LEAST_BYTES = 1024


def describe(given: Given, model: nn.Module) -> Description:
    """What an ``SFTConfig`` and its likes mean.

    Raises:
        SettingsError: TRL, transformers or PyTorch would raise.
    """
    on = given.flag(_NEW, given.flag(_OLD, True))
    kwargs = given.section(f"{_OLD}_kwargs") | given.section(f"{_NEW}_kwargs")
    selective = bool(kwargs.pop("selective", False))
    if selective and f"{_NEW}_kwargs" in given and f"{_OLD}_kwargs" not in given:
        raise given.error(
            f"selective in {_NEW}_kwargs: TRL 1.16 looks for it in {_OLD}_kwargs, and PyTorch refuses it.",
            f"Write it in {_OLD}_kwargs.",
        )
    if selective and not on:
        raise given.error(f"selective needs {_OLD}, which is off.", f"Set {_OLD}: true.")
    if selective and kwargs.get("use_reentrant"):
        raise given.error("selective needs the variant that is not reentrant.", "Set use_reentrant: false.")
    if not on:
        found = Description("no checkpointing")
    else:
        if _OLD not in given and _NEW not in given:
            given.note(_OLD, "on by default in TRL")
        keeps = _ATTENTION if selective else frozenset()
        if selective:
            kwargs["use_reentrant"] = False
        found = transformers.checkpointed_layers(given, model, kwargs, keeps)
    if not given.flag("activation_offloading"):
        return found
    head = "its last linear layer too here; TRL leaves that out"
    given.note("activation_offloading", f"every stored tensor of {_LEAST_BYTES} bytes and more moves, {head}")
    return Description(
        f"{found.summary}; what is stored moves to host memory",
        found.checkpoints,
        offloads_from_bytes=_LEAST_BYTES,
    )
