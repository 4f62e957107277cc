"""torchtitan: one activation checkpointing policy more, ``LowtideAC``, in the place of full, selective, memory budget.

    config.activation_checkpoint = LowtideAC.Config(budget="60GiB")

torchtitan applies a policy before it compiles, shards and initializes the model, and makes the optimizer after that. So
the policy wraps nothing: the model is fitted when it is first called in training. For a Trainer that is there already,
whatever its policy, ``fit(trainer, budget=...)``; checkpoint wrappers of its own are off while the model is fitted.

Where torchtitan compiles the blocks, ``lowtide.compile`` does in its place, with a plan inside each of them: what
compiled code stores is out of reach from outside, and cannot run again there while the parameters are in parts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.tools.logging import logger

import lowtide
from lowtide.compiled.compiled_model import CompiledModel
from lowtide.device.names import is_accelerator
from lowtide.errors import IntegrationError
from lowtide.integrations.made_optimizers import MadeOptimizers
from lowtide.integrations.versions import check_version
from lowtide.options import WARN
from lowtide.step.module_calls import compiled_parts
from lowtide.step.other_hooks import frame_in
from lowtide.training.fitted_model import Fit
from lowtide.units import parse_budget

_CUDA_GRAPHS = (
    "torchtitan runs its training step as a CUDA graph, which replays one step whatever a plan says.\n"
    "Set training.disable_cuda_graphs=True (--training.disable_cuda_graphs)."
)


class LowtideAC(ActivationCheckpointing):
    """Keeps each training step of a rank within a budget: recomputes what costs least, gradients bitwise the same.

    Attributes:
        fits: Those of the models that were trained last, on this rank.
    """

    fits: list[Fit | CompiledModel] = []  # noqa: RUF012 - torchtitan makes a policy and throws it away

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        budget: str = "auto"
        """
        Peak allocated bytes of a rank in forward and backward, parameters, gradients and optimizer state included:
        "60GiB", "40%" of the plain step's activation memory, or "auto": what is free, less a tenth (which compiled
        blocks do not follow).
        """

        on_excess: str = "warn"
        """
        What follows a step that took more: "warn", "raise" or "lower"; of compiled blocks "warn".
        """

    def __init__(self, config: "LowtideAC.Config", dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        check_version("torchtitan")
        parse_budget(config.budget)  # a typing error shows before the model is made

    def apply(self, model: nn.Module) -> None:
        """Have ``model`` fitted when it is first called in training."""
        type(self).fits = []
        optimizers = MadeOptimizers()
        options = {"budget": self.config.budget, "on_excess": self.config.on_excess}

        def first_call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                if frame_in("torchtitan.distributed.cudagraph"):  # whose first call runs without a graph
                    raise IntegrationError(_CUDA_GRAPHS)
                model._compiled_call_impl = None
                optimizers.stop()
                self.fits.append(_fit(model, optimizers.of(model), options))
                return model(*args, **kwargs)
            return model._call_impl(*args, **kwargs)

        model._compiled_call_impl = first_call
        logger.info(f"Applied LowtideAC: the model is fitted to {self.config.budget} when training begins")


def fit(trainer: Any, *, budget: int | str = "auto", **options: Any) -> Fit | CompiledModel:
    """Make the training step of a torchtitan ``Trainer`` fit ``budget``. Call it before ``trainer.train()``.

    Args:
        budget, options: As in ``lowtide.fit``, but for ``batch``, ``step`` and ``optimizer``, which the Trainer has.
            Where blocks are compiled, as in ``lowtide.compile``.

    Raises:
        IntegrationError: another version of torchtitan, CUDA graphs, or several parts of the model on this rank. Or
            blocks are compiled, and ``on_excess`` has no meaning there.
    """
    check_version("torchtitan")
    if len(trainer.model_parts) != 1:
        raise IntegrationError(
            f"this rank has {len(trainer.model_parts)} parts of the model (an interleaved pipeline), and one budget is "
            "for one.\nUse one stage for each rank, or call lowtide.fit for each part."
        )
    config = trainer.config
    if is_accelerator(trainer.device) and not config.training.disable_cuda_graphs:
        raise IntegrationError(_CUDA_GRAPHS)
    if hasattr(config.activation_checkpoint, "memory_budget"):
        raise IntegrationError(
            "MemoryBudgetAC has the compiler recompute what a plan decides about.\nSet activation_checkpoint=None."
        )
    return _fit(trainer.model_parts[0], list(trainer.optimizers.optimizers), {"budget": budget, **options})


def _fit(model: nn.Module, optimizers: list[torch.optim.Optimizer], options: dict[str, Any]) -> Fit | CompiledModel:
    blocks = compiled_parts(model)
    fitted: Fit | CompiledModel
    if blocks and "" not in blocks and options["budget"] != "auto":
        fitted = _compiled(model, blocks, options)
    else:
        fitted = lowtide.fit(model, optimizer=optimizers or None, **options)
    logger.info(f"lowtide keeps each step of {type(model).__name__} within {options['budget']}")
    return fitted


def _compiled(model: nn.Module, blocks: list[str], options: dict[str, Any]) -> CompiledModel:
    """``lowtide.compile`` in the place of torchtitan's compilation of these blocks, which has run no code yet."""
    if options.get("on_excess", WARN) != WARN:
        raise IntegrationError(
            f"on_excess={options['on_excess']!r} has no meaning where blocks are compiled.\nLeave it out, or set "
            "compile.enable=False."
        )
    calls = [(block := model.get_submodule(path), block._compiled_call_impl) for path in blocks]
    for block, _ in calls:
        block._compiled_call_impl = None
    try:
        known = {name: value for name, value in options.items() if name != "on_excess"}
        return lowtide.compile(model, layers=blocks, **known)
    except Exception:
        for block, call in calls:
            block._compiled_call_impl = call
        raise
