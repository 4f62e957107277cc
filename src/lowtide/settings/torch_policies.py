"""PyTorch's own: selective checkpointing by a list of ops, and the compiler's activation memory budget.

Read in torch 2.13: ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` (outputs of listed ops are kept, all
others made again), ``torch._functorch.config.activation_memory_budget`` (a share of the stored bytes, in compiled
regions only; 1 leaves it to the compiler's own choice).
"""

from torch import nn

from lowtide.settings.blocks import blocks
from lowtide.settings.description import Checkpoint, Description
from lowtide.settings.given import Given

_OPS, _MODULES, _BUDGET = "save_ops", "modules", "activation_memory_budget"
KEYS = (_OPS, _MODULES, _BUDGET)


def describe(given: Given, model: nn.Module) -> Description:
    """``save_ops``: operators kept inside checkpoints; ``modules``: paths of these, by default the repeated blocks;
    ``activation_memory_budget``: a ratio.

    Raises:
        SettingsError: both are given, or a path names no module.
    """
    ratio, ops = given.ratio(_BUDGET), given.words(_OPS)
    if ratio is not None and (ops is not None or _MODULES in given):
        raise given.error(
            f"{_BUDGET} beside {_OPS} or {_MODULES}: tags of one win over the other.", "Keep one of them."
        )
    if ratio is not None:
        return compiled_ratio(given, _BUDGET, ratio)
    have = {path for path, _ in model.named_modules()}
    chosen = given.words(_MODULES) or blocks(model)
    if missing := [path for path in chosen if path not in have]:
        raise given.error(
            f"modules has {missing[0]!r}, which the model does not have.", "Use names of named_modules()."
        )
    if not chosen:
        raise given.error(f"{type(model).__name__} has no repeated blocks.", f"Name the checkpoints in {_MODULES}.")
    names = frozenset(op.removeprefix("torch.ops.").removeprefix("aten.").partition(".")[0] for op in ops or ())
    kept = f" that keep {', '.join(sorted(names))}" if names else ""
    return Description(
        f"{len(chosen)} modules are checkpoints{kept}",
        tuple(Checkpoint((path,), names) for path in chosen),
    )


def compiled_ratio(given: Given, name: str, ratio: float) -> Description:
    """The compiler's budget: it bounds stored bytes, not the peak, and holds in compiled regions only."""
    if ratio == 1:
        given.does_nothing(name, "1 is the default: the compiler decides by itself")
        return Description("no budget")
    given.note(
        name, "holds in compiled regions only and does nothing in an eager step; it bounds stored bytes, no peak"
    )
    return Description(
        f"at most {100 * ratio:g} % of the stored bytes stay (as the compiler's knapsack chooses)",
        kept_ratio=ratio,
    )
