"""ColossalAI's: the first layers of the model, or of each pipeline stage.

Read in ``colossalai/shardformer/shard/grad_ckpt_config.py`` of ColossalAI 0.5: ``GradientCheckpointConfig`` checkpoints
``int(ratio * layers)``, ``PipelineGradientCheckpointConfig`` a number for each stage, which wins over the ratio.
"""

from torch import nn

from lowtide.settings.blocks import blocks, stacks
from lowtide.settings.description import Checkpoint, Description
from lowtide.settings.given import Given

_RATIO, _STAGES = "gradient_checkpointing_ratio", "num_ckpt_layers_per_stage"
KEYS = (_RATIO, _STAGES, "num_layers_per_stage", "num_stages", "num_model_chunks", "num_model_layers")


def describe(given: Given, model: nn.Module) -> Description:
    """What the configuration means.

    Raises:
        SettingsError: ColossalAI would raise, or it is for another number of layers.
    """
    ratio = given.ratio(_RATIO)
    layers = blocks(model)
    if not layers:
        raise given.error(f"{type(model).__name__} has no repeated layers.", "Plan it with lowtide.solve.")
    total = given.count("num_model_layers")
    if total is not None and total != len(layers):
        raise given.error(f"num_model_layers={total}, and the model has {len(layers)}.", "Write the model's number.")
    if _STAGES in given:
        if ratio is not None:
            given.does_nothing(_RATIO, f"{_STAGES} is given too, and is the one that counts")
        chosen = _by_stage(given, layers)
    else:
        for name in ("num_layers_per_stage", "num_stages", "num_model_chunks"):
            if name in given:
                given.does_nothing(name, f"without {_STAGES}")
        chosen = [path for stack in stacks(model) for path in stack[: int((ratio or 0.0) * len(stack))]]
        if not chosen:
            given.does_nothing(_RATIO, f"{ratio or 0.0:g} of {len(layers)} layers is less than one")
    return Description(
        f"{len(chosen)} of {len(layers)} layers are checkpoints, the first",
        tuple(Checkpoint((path,)) for path in chosen),
    )


def _by_stage(given: Given, layers: list[str]) -> list[str]:
    counts, sizes = given.value(_STAGES), given.value("num_layers_per_stage")
    wanted = (given.count("num_stages", 1) or 0) * (given.count("num_model_chunks", 1) or 1)
    if wanted and len(counts) != wanted:
        raise given.error(
            f"{_STAGES} has {len(counts)} numbers for {wanted} stages and chunks.", f"Write {wanted} numbers."
        )
    if sizes is None:
        if len(layers) % len(counts):
            raise given.error(
                f"{len(layers)} layers over {len(counts)} stages do not come out even.", "Add num_layers_per_stage."
            )
        sizes = [len(layers) // len(counts)] * len(counts)
    if len(sizes) != len(counts) or sum(sizes) != len(layers):
        raise given.error(
            f"num_layers_per_stage has {len(sizes)} stages of {sum(sizes)} layers, the model {len(layers)} layers in "
            f"{len(counts)} stages.",
            "Write one number for each stage, which add up to the model's layers.",
        )
    if wrong := [(c, s) for c, s in zip(counts, sizes) if c > s]:
        raise given.error(
            f"{_STAGES} asks for {wrong[0][0]} of {wrong[0][1]} layers.", "Ask for no more than there are."
        )
    given.note(_STAGES, "all stages are shown in one process, as the whole model runs")
    chosen, start = [], 0
    for count, size in zip(counts, sizes):
        chosen += layers[start : start + count]
        start += size
    return chosen
