"""DeepSpeed's ``activation_checkpointing`` block: it configures ``deepspeed.checkpointing`` and wraps nothing.

Read in deepspeed 0.19.8: ``runtime/config.py`` reads the block, ``runtime/activation_checkpointing/checkpointing.py``
uses it in ``checkpoint()``, which only a model's own code calls; a model that does is transformers' or Megatron's with
a setting of its own. So the block alone stores what the plain step stores.
"""

from torch import nn

from lowtide.settings.description import Description
from lowtide.settings.given import Given, near

_BLOCK = "activation_checkpointing"
_INNER = (
    "partition_activations", "contiguous_memory_optimization", "cpu_checkpointing", "number_checkpoints",
    "synchronize_checkpoint_boundary", "profile",
)  # fmt: skip
GROUPS = (_BLOCK,)
KEYS = (_BLOCK, *_INNER)
_NEEDS_CALLS = "only deepspeed.checkpointing.checkpoint() reads it, and nothing calls that by itself"


def describe(given: Given, model: nn.Module) -> Description:
    """What the block means: nothing by itself.

    Raises:
        SettingsError: an entry of the block is not known, or two contradict.
    """
    nested = given.section(_BLOCK)
    for name in nested:
        if name not in _INNER:
            raise given.error(
                f"{_BLOCK} has {name!r}, which is not known.{near(name, _INNER)}", f"Use {', '.join(_INNER)}."
            )
    inner = Given(given.framework, nested or {name: given.value(name) for name in _INNER if name in given})
    if inner.flag("contiguous_memory_optimization") and not inner.flag("partition_activations"):
        raise given.error(
            "contiguous_memory_optimization needs partition_activations.", "Set partition_activations: true."
        )
    given.does_nothing(_BLOCK, "it wraps no module: switch checkpointing on in the model's own framework")
    for name in _INNER:
        if name in inner:
            given.does_nothing(name, _NEEDS_CALLS)
    return Description("nothing is checkpointed")
