"""A callback for Lightning: ``Trainer(callbacks=[LowtideCallback(budget="6GiB")])``.

On one device Lightning calls ``training_step`` and never the module itself, so the step begins at
``strategy.training_step``. Under DDP it goes through the module's own call, which a fitted model sees by itself.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.rank_zero import rank_zero_info
except ImportError:  # the same code under its older name
    try:
        from pytorch_lightning import Callback
        from pytorch_lightning.utilities.rank_zero import rank_zero_info
    except ImportError:
        from lowtide.integrations.versions import check_version

        check_version("lightning")
        raise

from lowtide.api import fit
from lowtide.errors import IntegrationError
from lowtide.integrations.metrics import metrics_of
from lowtide.integrations.versions import check_version
from lowtide.training.fitted_model import Fit
from lowtide.units import format_bytes

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
# Built on these, and another matter.
_REFUSED = {
    "FSDPStrategy": "it shards by FSDP1, whose flat parameters no plan can follow",
    "DeepSpeedStrategy": "its engine moves parameters and gradients during the step",
    "ModelParallelStrategy": "sharded models are not watched: call lowtide.fit(model, batch, ...) in on_train_start",
    "XLAStrategy": "its operators are not seen",
    "SingleDeviceXLAStrategy": "its operators are not seen",
}


class LowtideCallback(Callback):
    """Keeps each training step within ``budget``. The first steps are watched, later ones run under a plan.

    Losses and weights are bitwise those without it. Checkpoints hold nothing of it. With manual optimization every
    backward ends a step, and the next call of a module begins another. What it does is logged: each plan when it comes,
    and a line at the end. Budget, peaks, overhead and number of plans go to the Trainer's loggers.

    Args:
        budget: Peak memory of forward and backward; see ``lowtide.fit``.
        **options: Of ``lowtide.fit``, but for ``batch`` and ``step``. ``optimizer`` is the Trainer's, if it has one
            only; what several keep is not counted.

    Attributes:
        fit: The ``Fit``; None before training. After training it is removed from the model, and can still be asked.

    Raises:
        IntegrationError: when training would start: another version of Lightning, a strategy that does not work, a
            second such callback, or checkpoint wrappers in the model.
    """

    def __init__(self, budget: int | str = "auto", **options: Any) -> None:
        for name in ("batch", "step"):
            if name in options:
                raise TypeError(f"{name}= is not taken here: the steps that the Trainer runs are watched.")
        self.fit: Fit | None = None
        self._options = {"budget": budget, **options}
        self._unwrap: Callable[[], None] | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        check_version("lightning" if type(trainer).__module__.startswith("lightning.") else "pytorch-lightning")
        if sum(isinstance(callback, LowtideCallback) for callback in trainer.callbacks) > 1:
            raise IntegrationError("there are two LowtideCallbacks, and one model has one budget.\nLeave one out.")
        _check_strategy(trainer.strategy)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._detach()
        options = {"optimizer": trainer.optimizers[0] if len(trainer.optimizers) == 1 else None, **self._options}
        self.fit = fit(pl_module, **options)
        if trainer.strategy.model is pl_module:  # else the module itself is called, by what wraps it
            self._unwrap = _wrap_training_step(trainer.strategy, self.fit)
        budget_bytes = self.fit.status().budget_bytes
        budget = self._options["budget"] if budget_bytes is None else format_bytes(budget_bytes)
        rank_zero_info(f"lowtide: the budget of a training step is {budget}; the first steps are watched")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the numbers where and when the Trainer logs its own."""
        if self.fit is not None and trainer.loggers and trainer._logger_connector.should_update_logs:
            metrics, step = metrics_of(self.fit), trainer.fit_loop.epoch_loop._batches_that_stepped
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.fit is not None:
            rank_zero_info(f"lowtide: {_summary(self.fit)}")
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach()

    def _detach(self) -> None:
        if self.fit is not None:
            self.fit.remove()
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None


def _check_strategy(strategy: Any) -> None:
    name, bases = type(strategy).__name__, [base.__name__ for base in type(strategy).__mro__]
    refused = next((base for base in bases if base in _REFUSED), None)
    if refused is None and any(base in _STRATEGIES for base in bases):
        return
    why = _REFUSED.get(refused or "", "nobody has tried it")
    raise IntegrationError(f"strategy {name} does not work with lowtide: {why}.\nUse one of {', '.join(_STRATEGIES)}.")


def _wrap_training_step(strategy: Any, fitted: Fit) -> Callable[[], None]:
    """Make each call of ``strategy.training_step`` a step of ``fitted``; returns the undo."""
    training_step, before = strategy.training_step, vars(strategy).get("training_step")

    @wraps(training_step)
    def in_region(*args: Any, **kwargs: Any) -> Any:
        with fitted.step_region((*args, *kwargs.values())):
            return training_step(*args, **kwargs)

    def unwrap() -> None:
        if vars(strategy).get("training_step") is in_region:
            del strategy.training_step
            if before is not None:
                strategy.training_step = before

    strategy.training_step = in_region
    return unwrap


def _summary(fitted: Fit) -> str:
    """What really ran, in a line."""
    overhead = [plan.predicted_overhead for plan in fitted.plans]
    predicted = f" Predicted overhead: up to {100 * max(overhead):.1f} %." if overhead else ""
    return fitted.status().headline + predicted
