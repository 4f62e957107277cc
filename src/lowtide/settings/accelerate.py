"""FSDP's activation checkpointing as Accelerate applies it: each module that the wrap policy wraps is a checkpoint.

Read in accelerate 1.15: ``FullyShardedDataParallelPlugin`` (``activation_checkpointing_offload`` needs the flag and
version 2), ``fsdp2_apply_ac`` (``checkpoint_wrapper(layer, preserve_rng_state=False)``), ``AcceleratorState`` (without
an accelerator the plugin is not used). Keys are those of the plugin, with or without the ``fsdp_`` of its config file.
"""

from torch import nn

from lowtide.settings.blocks import blocks
from lowtide.settings.description import Checkpoint, Description
from lowtide.settings.given import Given, near

_ON, _OFFLOAD = "activation_checkpointing", "activation_checkpointing_offload"
_LAYERS = "transformer_layer_cls_to_wrap"
_NAMES = (_ON, _OFFLOAD, _LAYERS, "version")
KEYS = (*_NAMES, *(f"fsdp_{name}" for name in _NAMES), "fsdp_config")
GROUPS = ("fsdp_config",)


def describe(given: Given, model: nn.Module) -> Description:
    """What the flags mean.

    Raises:
        SettingsError: Accelerate would raise, or there is no module to wrap.
    """
    nested = given.section("fsdp_config")
    if nested:
        for key in nested:
            if "checkpoint" in key and key not in KEYS and "state_dict" not in key:
                raise given.error(f"fsdp_config has {key!r}, which is not known.{near(key, KEYS)}", "Correct its name.")
        given = given.inner(nested)
    name = {short: f"fsdp_{short}" if f"fsdp_{short}" in given else short for short in _NAMES}
    on, offload = given.flag(name[_ON]), given.flag(name[_OFFLOAD])
    if offload and not on:
        raise given.error(f"{name[_OFFLOAD]} needs {name[_ON]}.", f"Set {name[_ON]}: true.")
    if offload and given.count(name["version"]) == 1:
        raise given.error(f"{name[_OFFLOAD]} needs FSDP version 2.", f"Set {name['version']}: 2.")
    if not on:
        return Description("no checkpointing")
    classes = given.words(name[_LAYERS])
    chosen = blocks(model)
    if classes:
        chosen = [path for path, module in model.named_modules() if type(module).__name__ in classes]
    if not chosen:
        raise given.error(
            f"no module of {type(model).__name__} is wrapped"
            + (f": none is a {' or '.join(classes)}." if classes else ": it has no repeated blocks."),
            f"Name the class of its layers in {name[_LAYERS]}.",
        )
    if next(model.parameters()).device.type == "cpu":
        given.note(name[_ON], "on a CPU Accelerate uses no FSDP and so no checkpoint: this is what it does on a GPU")
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        given.note(name[_ON], "random states are not kept: dropout draws other masks when a layer runs again")
    return Description(
        f"each of {len(chosen)} wrapped modules is a checkpoint",
        tuple(Checkpoint((path,)) for path in chosen),
        offloads=tuple(chosen) if offload else (),
    )
