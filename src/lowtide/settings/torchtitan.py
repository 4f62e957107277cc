"""torchtitan's activation checkpointing of transformer blocks: none, full, selective by layer or by op, or a ratio.

Read in ``torchtitan/distributed/activation_checkpoint.py`` of 2025 and 2026: blocks are the children of ``layers``;
``selective_ac_option`` n checkpoints blocks n, 2n, ... counted from 1; ``op`` keeps the dear ops but every second
matrix product (``mm``; those with a bias are ``addmm`` and never kept); the ratio is that of PyTorch's compiler.
torchtitan 0.3 calls the modes ``FullAC``, ``SelectiveAC`` and ``MemoryBudgetAC``.
"""

from torch import nn

from lowtide.settings.blocks import blocks
from lowtide.settings.description import Checkpoint, Description
from lowtide.settings.given import Given
from lowtide.settings.torch_policies import compiled_ratio

_OPTION, _BUDGET = "selective_ac_option", "memory_budget"
_MODES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget", "None": "none"}
KEYS = (
    "mode", _OPTION, _BUDGET, "early_stop", "preserve_rng_state", "determinism_check", "debug",
    "per_op_sac_force_recompute_mm_shapes_by_fqns", "visualize_memory_budget_pareto",
)  # fmt: skip
SECTIONS = ("activation_checkpoint",)
KEEPS = frozenset({
    "mm", "linear", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_flash_attention_for_cpu",
    "reduce_scatter_tensor", "max",
})  # fmt: skip


def describe(given: Given, model: nn.Module) -> Description:
    """What the ``activation_checkpoint`` section means.

    Raises:
        SettingsError: torchtitan would raise, or the model has no blocks.
    """
    mode = given.choice("mode", ("none", "full", "selective", "memory_budget", *_MODES)) or "selective"
    mode = _MODES.get(mode, mode)
    if mode != "memory_budget" and _BUDGET in given:
        given.does_nothing(_BUDGET, f"mode is {mode}")
    if mode != "selective" and _OPTION in given:
        given.does_nothing(_OPTION, f"mode is {mode}")
    if mode == "none":
        return Description("no checkpointing")
    if mode == "memory_budget":
        ratio = given.ratio(_BUDGET)
        return compiled_ratio(given, _BUDGET, 0.5 if ratio is None else ratio)
    layers = blocks(model)
    if not layers:
        raise given.error(f"{type(model).__name__} has no repeated layers.", "Plan it with lowtide.solve.")
    if mode == "full":
        chosen = [Checkpoint((path,)) for path in layers]
        return Description(f"all {len(layers)} blocks are checkpoints", tuple(chosen))
    option = str(given.value(_OPTION, "op"))
    if option == "op":
        if given.value("per_op_sac_force_recompute_mm_shapes_by_fqns"):
            given.note("per_op_sac_force_recompute_mm_shapes_by_fqns", "not read here: counted like other products")
        chosen = [Checkpoint((path,), KEEPS, skips_every=2) for path in layers]
        summary = f"all {len(layers)} blocks are checkpoints that keep attention and every other matrix product"
        return Description(summary, tuple(chosen))
    if not option.isdigit():
        raise given.error(
            f"{_OPTION}={option!r} is neither 'op' nor a number.", "Write op, or 2 for every second block."
        )
    every = int(option) or 1
    chosen = [Checkpoint((path,)) for path in layers[every - 1 :: every]]
    if not chosen:
        given.does_nothing(_OPTION, f"{every} is more than the {len(layers)} blocks that there are")
    return Description(f"{len(chosen)} of {len(layers)} blocks are checkpoints", tuple(chosen))
