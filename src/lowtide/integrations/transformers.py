"""transformers' ``Trainer`` within a memory budget, as one argument.

    Trainer(..., callbacks=[LowtideCallback(budget="20GiB")]).train()

The model is fitted when training begins: by then Accelerate has put autocast around its forward, and checkpointing is
on. It is as it was when ``train()`` ends, also by an exception. The Trainer tells its callbacks nothing of those, and
not who it is either. So ``Trainer.train`` is wrapped once, when this module is imported, and ``Trainer.log``, which
then logs the numbers beside the losses. A Trainer without a ``LowtideCallback`` runs as before.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from lowtide.api import fit as fit_model
from lowtide.compiled.compiled_model import CompiledModel
from lowtide.compiled.compiled_model import compile as compile_model
from lowtide.errors import IntegrationError
from lowtide.integrations import trl
from lowtide.integrations.metrics import metrics_of
from lowtide.integrations.versions import check_version
from lowtide.plan import Plan
from lowtide.settings.checkpointing_names import asked_in
from lowtide.step import module_calls
from lowtide.step.optimizer_state import checked_optimizer
from lowtide.training.fitted_model import Fit
from lowtide.units import format_bytes, parse_budget

logger = logging.get_logger("transformers.trainer")
# In a process that was started with a budget (``lowtide.attaching``): gives a Trainer its callback, or None.
make_callback: Callable[[Trainer, list[TrainerCallback]], "LowtideCallback | None"] | None = None


class LowtideCallback(TrainerCallback):
    """Keeps each training step within ``budget``: watches the first steps, then recomputes what costs least.

    Losses and gradients are bitwise those without it. The Trainer's own checkpointing is off meanwhile, whatever its
    arguments say, and need not be on. What is in force is logged by the Trainer's logger. Budget, peaks, overhead and
    number of plans stand where the losses do (``report_to``).

    Args:
        budget: See ``lowtide.fit``.
        compile: Compile each layer and plan inside of the compiled code, by ``lowtide.compile``. Losses and gradients
            are then those of layers that are compiled without lowtide. It takes the place of ``torch_compile``.
        **options: Of ``lowtide.fit``, except ``batch`` and ``step``: the Trainer has them. ``optimizer`` is the
            Trainer's; with ``optimizer=None`` its state counts once it is there. With ``compile`` those of
            ``lowtide.compile``.

    Attributes:
        fit: The ``Fit`` of the last run, or the ``CompiledModel``; None before training has begun.

    Raises:
        IntegrationError: a version or a setting that lowtide does not work with; here, or when ``train()`` is called.
    """

    def __init__(self, budget: int | str = "auto", *, compile: bool = False, **options: Any) -> None:
        check_version("transformers")
        check_version("accelerate")
        if taken := {"model", "batch", "step"} & options.keys():
            raise IntegrationError(f"{sorted(taken)[0]}= is the Trainer's.\nLeave it out: its real steps are watched.")
        if options.get("optimizer") is not None:
            raise IntegrationError(
                "optimizer= is the Trainer's.\n"
                "Leave it out, or pass optimizer=None: then its state counts once it is there."
            )
        if parse_budget(budget) == "auto" and compile:  # a typing error shows here, not when training begins
            raise IntegrationError(
                'budget="auto" is not offered for compiled layers.\nPass bytes, "20GiB" or "40%", or leave compile out.'
            )
        self.fit: Fit | CompiledModel | None = None
        self._compiles = compile
        self._budget, self._options = budget, options
        self._trainer: Callable[[], Trainer | None] = lambda: None
        self._is_announced = False

    def on_init_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._check(args)

    def _check(self, args: TrainingArguments) -> None:
        _check_arguments(args)
        if self._compiles and args.torch_compile:
            raise IntegrationError(
                "torch_compile=True compiles the model as a whole, and LowtideCallback(compile=True) each layer.\n"
                "Leave torch_compile out."
            )

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **given: Any) -> None:
        """Fit the model. Comes again for each batch size that is tried, and in the next ``train()``."""
        self._detach()
        self._check(args)
        model = _called_model(self._trainer(), given["model"])
        if any(module_calls.is_lowtide_call(module._compiled_call_impl) for module in model.modules()):
            raise IntegrationError(
                "the model has a plan already, from lowtide.fit or from another Trainer's LowtideCallback: two plans "
                "cannot drive one model.\nCall remove() of that fit first, or leave the LowtideCallback out."
            )
        self._is_announced = False
        options = {"optimizer": checked_optimizer(given["optimizer"]), **self._options}
        if self._compiles:
            if model is not given["model"]:
                raise IntegrationError(
                    f"the Trainer calls a {type(model).__name__}, and plans inside of compiled layers were not tried "
                    "there.\nLeave compile out, or train with FSDP2."
                )
            self.fit = compile_model(model, budget=self._budget, **options)
        else:
            self.fit = fit_model(model, budget=self._budget, **options)
        if not state.is_world_process_zero:
            return
        within = "what is free" if self._budget == "auto" else str(self._budget)
        if module_calls.is_compiled(model):
            _say(
                f"NOT planned within its budget ({within}): torch_compile=True compiles the model as a whole, and real "
                "steps of such a model have no plan. Leave torch_compile out and pass LowtideCallback(budget, "
                "compile=True): it compiles each layer and plans inside"
            )
        else:
            _say(
                f"keeps each training step within its budget ({within}): the first steps are watched, then the tensors "
                "that cost least are recomputed. Losses and gradients stay bitwise the same"
                + (" as of layers that PyTorch compiles" if self._compiles else "")
            )
        if args.world_size > 1 and args.ddp_find_unused_parameters is None and not asked_in(args)[0]:
            _say(
                "without checkpointing the Trainer has DDP look for unused parameters in every step; "
                "ddp_find_unused_parameters=False saves that"
            )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Tell once that a plan is in force."""
        fit = self.fit
        if self._is_announced or fit is None or not state.is_world_process_zero or not fit.status().in_force:
            return
        self._is_announced = True
        plan = fit.plan
        assert plan is not None  # it is in force
        _say(
            f"a plan is in force: {_budget_of(fit)}, predicted peak {format_bytes(plan.predicted_peak_bytes)} (plain "
            f"{format_bytes(plan.plain_peak_bytes)}), {_overhead_of(plan)}, plans: {len(fit.plans)}"
        )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Give the model back as it was."""
        fit = self.fit
        if fit is not None and state.is_world_process_zero:
            status, plans = fit.status(), fit.plans
            seen = status.observed_peak_bytes
            peak = "not measured" if seen is None else format_bytes(seen)
            overhead = f"{_overhead_of(plans[-1])}, " if plans else ""
            why_not = "" if status.in_force else f". No plan was in force at the end: {status.why_not}"
            _say(
                f"{status.planned_steps} of {status.steps} steps ran under a plan: {_budget_of(fit)}, observed peak "
                f"{peak}, {overhead}plans: {len(plans)}{why_not}"
            )
        self._detach()

    def _detach(self) -> None:
        """Give the model back. Safe to call twice."""
        if self.fit is not None:
            self.fit.remove()


def fit(trainer: Trainer, budget: int | str = "auto", **options: Any) -> LowtideCallback:
    """Have ``trainer`` train within ``budget``, as with a ``LowtideCallback``, for trainers that are there already.

    The whole step is planned, with losses outside the model (``compute_loss_func``, label smoothing, TRL's).

    Args:
        budget, **options: As of ``LowtideCallback``.

    Returns:
        The callback, which the trainer has now. ``.fit`` is the ``Fit`` once training has begun.

    Raises:
        IntegrationError: a version or a setting that lowtide does not work with, or the trainer has a plan already.
    """
    callback = LowtideCallback(budget, **options)
    _check_arguments(trainer.args)
    if any(isinstance(other, LowtideCallback) for other in trainer.callback_handler.callbacks):
        raise IntegrationError(_TWICE)
    trainer.add_callback(callback)
    return callback


_TWICE = (
    "this Trainer has a plan already: LowtideCallback and fit(trainer) are two ways to say the same, and it takes one "
    "of them, once.\nLeave the other out; trainer.remove_callback(LowtideCallback) takes one away."
)


def _check_arguments(args: TrainingArguments) -> None:
    """Raises: IntegrationError: a setting under which no plan would be carried out, or that does the same work."""
    if args.n_gpu > 1:
        raise IntegrationError(
            f"one process for {args.n_gpu} GPUs: the Trainer would use nn.DataParallel, whose threads run copies of "
            "the model, and a plan is for one.\nStart one process for each GPU (torchrun --nproc-per-node, or "
            "accelerate launch), or set CUDA_VISIBLE_DEVICES to one GPU."
        )
    if args.fsdp and int((args.fsdp_config or {}).get("version", 2)) == 1:
        raise IntegrationError(
            "FSDP version 1 frees parameters that a plan would read.\n"
            'Set fsdp_config={"version": 2}, or train without lowtide.'
        )
    deepspeed = getattr(args, "hf_deepspeed_config", None)
    if deepspeed is not None and deepspeed.get_value("activation_checkpointing.cpu_checkpointing"):
        raise IntegrationError(
            "DeepSpeed's cpu_checkpointing moves activations that a plan decides about.\n"
            "Remove it from the DeepSpeed config: lowtide offloads where that is cheaper than recomputing."
        )
    trl.check_arguments(args)


def _called_model(trainer: Trainer | None, model: nn.Module) -> nn.Module:
    """What the Trainer calls: the model that callbacks get, or what ``torch.compile`` or DDP made of it."""
    wrapped = None if trainer is None else trainer.model_wrapped
    if isinstance(wrapped, DistributedDataParallel) or (wrapped is not None and module_calls.compiled_parts(wrapped)):
        return wrapped
    return model


def _budget_of(fit: Fit | CompiledModel) -> str:
    budget_bytes = fit.status().budget_bytes
    return "budget not known yet" if budget_bytes is None else f"budget {format_bytes(budget_bytes)}"


def _overhead_of(plan: Plan) -> str:
    return f"overhead {100 * plan.predicted_overhead:.1f} %"


def _say(text: str) -> None:
    """As a warning: the Trainer's logger shows nothing else unless it is told to."""
    logger.warning(f"lowtide: {text}.")


def _detaching(train: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer.train``, after which the model is as it was, however it ended."""

    @functools.wraps(train)
    def detaching(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if make_callback is not None and (added := make_callback(self, self.callback_handler.callbacks)) is not None:
            self.add_callback(added)
        callbacks = [c for c in self.callback_handler.callbacks if isinstance(c, LowtideCallback)]
        if len(callbacks) > 1:
            raise IntegrationError(_TWICE)
        for callback in callbacks:
            callback._check(self.args)
            callback._trainer = weakref.ref(self)
        try:
            return train(self, *args, **kwargs)
        finally:
            # Also one that was added meanwhile.
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, LowtideCallback):
                    callback._detach()

    return detaching


def _logging_numbers(log: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer.log``, whose lines of a training have lowtide's numbers too."""

    @functools.wraps(log)
    def logging_numbers(self: Trainer, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        callback = next((c for c in self.callback_handler.callbacks if isinstance(c, LowtideCallback)), None)
        if callback is not None and callback.fit is not None and _LOGGED & logs.keys():
            logs = {**logs, **metrics_of(callback.fit)}  # the Trainer goes on with its own
        return log(self, logs, *args, **kwargs)

    return logging_numbers


_LOGGED = {"loss", "train_runtime"}  # in lines of a training: after some steps, and at the end
Trainer.train = _detaching(Trainer.train)
Trainer.log = _logging_numbers(Trainer.log)
