"""ROLL's: transformers' full checkpointing unless it is disabled, or Megatron's recomputation.

Read in ROLL (``roll/models/model_providers.py`` of August 2026 and before; ``mcore_adapter/training_args.py`` and
``model_config.py``): ``disable_gradient_checkpointing`` False enables transformers' checkpointing;
``gradient_checkpointing_use_reentrant`` None is decided by the architecture, reentrant for mixtures of experts;
``full`` with neither method nor layers becomes ``uniform`` with one layer. It is not on a package index.
"""

from torch import nn

from lowtide.settings import megatron, transformers
from lowtide.settings.blocks import has_moe
from lowtide.settings.description import Description
from lowtide.settings.given import Given

_DISABLE, _REENTRANT = "disable_gradient_checkpointing", "gradient_checkpointing_use_reentrant"
OWN = (_DISABLE, _REENTRANT)  # the rest are Megatron's as well
KEYS = (*OWN, *megatron.KEYS)
SECTIONS = ("model_args", "training_args", "strategy_args", "strategy_config", "actor_train", "critic")


def describe(given: Given, model: nn.Module) -> Description:
    """What ``model_args``, or the strategy settings of a Megatron actor, mean.

    Raises:
        SettingsError: transformers, PyTorch or Megatron would raise.
    """
    if any(name in given for name in megatron.KEYS):
        for name in (_DISABLE, _REENTRANT):
            if name in given:
                given.does_nothing(name, "a Megatron strategy reads only Megatron's settings")
        return megatron.describe(_megatron_settings(given), model)
    reentrant = given.flag(_REENTRANT) if _REENTRANT in given else None
    if given.flag(_DISABLE):
        if reentrant is not None:
            given.does_nothing(_REENTRANT, f"{_DISABLE} is true")
        return Description("no checkpointing")
    if reentrant is None:
        reentrant = has_moe(model)
        why = "a mixture of experts" if reentrant else "no mixture of experts"
        given.note(_REENTRANT, f"not given: {str(reentrant).lower()}, because the model is {why}")
    return transformers.checkpointed_layers(given, model, {"use_reentrant": reentrant})


def _megatron_settings(given: Given) -> Given:
    """As ROLL passes them on to Megatron.

    Raises:
        SettingsError: ROLL's own second choice of a method, which Megatron rejects.
    """
    values = {name: given.value(name) for name in megatron.KEYS if name in given}
    if values.get("recompute_method") == "recompute":
        raise given.error(
            "recompute_method='recompute' is one of ROLL's documented choices, and Megatron rejects it.",
            "Write recompute_method: uniform or block.",
        )
    if (
        values.get("recompute_granularity") == "full"
        and not {"recompute_method", "recompute_num_layers"} & values.keys()
    ):
        given.note("recompute_method", "not given: ROLL makes it uniform, one layer each")
        values |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return given.inner(values)
