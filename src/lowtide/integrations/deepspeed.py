"""DeepSpeed: the model that an engine trains, within a memory budget.

``lowtide.fit(engine, budget=...)`` does the same without looking at DeepSpeed's version and settings. ZeRO-0 to 3 work.
What DeepSpeed allocates inside forward and backward counts: above all its buckets, which by default hold 5e8
elements each (``reduce_bucket_size``, ``allgather_bucket_size``).
"""

import sys
from typing import Any

import lowtide
from lowtide.errors import IntegrationError
from lowtide.integrations.versions import check_version
from lowtide.step.deepspeed_engines import unwrap_engine
from lowtide.training.fitted_model import Fit

_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"


def fit(engine: Any, batch: Any = None, *, budget: int | str = "auto", **options: Any) -> Fit:
    """Make the training step of a DeepSpeed engine fit ``budget``.

    Call it after ``deepspeed.initialize``. The loop stays as it is: ``engine(x)``, ``engine.backward(loss)``,
    ``engine.step()``. Each rank has a plan of its own.

    Args:
        engine: What ``deepspeed.initialize`` has returned first.
        batch: As in ``lowtide.fit``; None under ZeRO-3.
        budget, options: As in ``lowtide.fit``. Optimizer state is not counted unless ``optimizer=`` is given.

    Raises:
        IntegrationError: another version of DeepSpeed, an engine of another kind, or ``cpu_checkpointing`` is on.
        UnsupportedModelError: ZeRO-3 partitions the model, and there is a batch to rehearse.
    """
    check_version("deepspeed")
    if unwrap_engine(engine) is engine:
        raise IntegrationError(
            f"{type(engine).__name__} is no DeepSpeedEngine that lowtide has been tried with (pipeline and hybrid "
            "engines have not).\nPass the engine of deepspeed.initialize, or fit the module inside it."
        )
    module = sys.modules.get(_CHECKPOINTING)
    settings = engine._config.activation_checkpointing_config
    if settings.cpu_checkpointing or getattr(module, "CPU_CHECKPOINT", False):
        raise IntegrationError(
            "activation_checkpointing.cpu_checkpointing is on: DeepSpeed would move checkpointed inputs to the CPU, "
            "and no plan can count them.\n"
            "Take it out of DeepSpeed's configuration: with offload=lowtide.Offload(...) a plan moves tensors itself."
        )
    fitted = lowtide.fit(engine, batch, budget=budget, **options)
    if "activation_checkpointing" in engine._config._param_dict:
        fitted._reasons.say(
            "DeepSpeed's activation_checkpointing block wraps nothing by itself: it is for calls of "
            "deepspeed.checkpointing.checkpoint in the model. Leave both out, and a plan can recompute less"
        )
    return fitted
