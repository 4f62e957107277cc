"""Trainers that call a ``LowtideCallback`` of their own accord where a budget is wanted for the process.

A library of a version that nobody has tried is left alone: then lowtide is attached to the module that it trains.
"""

import functools
from types import ModuleType
from typing import Any

from lowtide.attaching import attachment
from lowtide.errors import IntegrationError


def watch_transformers(module: ModuleType) -> None:
    """Once a Trainer is made, have its ``train`` add the callback."""
    make = module.Trainer.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        _prepare_transformers()
        make(self, *args, **kwargs)

    module.Trainer.__init__ = made


def _prepare_transformers() -> None:
    """Where lowtide's part for transformers is imported, ``Trainer.train`` is wrapped."""
    found = attachment.current
    if found is None or not found.tries("transformers"):
        return
    try:
        from lowtide.integrations import transformers as integration
        from lowtide.integrations.versions import check_version

        for package in ("transformers", "accelerate"):
            check_version(package)
    except (IntegrationError, ImportError) as error:
        found.say(f"{_first_line(error)}: it is attached to the module that the Trainer calls instead")
        return
    integration.make_callback = functools.partial(_transformers_callback, integration.LowtideCallback)


def _transformers_callback(make: type, trainer: Any, callbacks: list[Any]) -> Any:
    """As ``_callback_for``; None also where the trainer is of a TRL that nobody has tried."""
    from lowtide.integrations import trl

    try:
        trl.check_version_of(trainer.args)
    except IntegrationError as error:
        found = attachment.current
        if found is not None and found.tries("trl"):
            found.say(f"{_first_line(error)}: it is attached to the module that the Trainer calls instead")
        return None
    return _callback_for(make, "transformers' Trainer", trainer, callbacks)


def watch_lightning(module: ModuleType) -> None:
    """Have ``Trainer.fit`` add the callback."""
    fit = module.Trainer.fit

    @functools.wraps(fit)
    def with_callback(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (callback := _lightning_callback(self)) is not None:
            self.callbacks.insert(0, callback)
        return fit(self, *args, **kwargs)

    module.Trainer.fit = with_callback


def _lightning_callback(trainer: Any) -> Any:
    found = attachment.current
    if found is None or not found.tries("lightning"):
        return None
    library = type(trainer).__module__.partition(".")[0]
    try:
        from lowtide.integrations import lightning as integration
        from lowtide.integrations.versions import check_version

        check_version("lightning" if library == "lightning" else "pytorch-lightning")
    except (IntegrationError, ImportError) as error:
        found.say(f"{_first_line(error)}: it is attached to the module that the Trainer calls instead")
        return None
    return _callback_for(integration.LowtideCallback, "Lightning's Trainer", trainer, trainer.callbacks)


def _callback_for(make: type, name: str, trainer: Any, callbacks: list[Any]) -> Any:
    """A callback for ``trainer``, which has ``callbacks``; None: it is not to have one."""
    found = attachment.current
    if found is None or (found.is_over and not found.is_to_trainer):
        return None
    if any(isinstance(callback, make) for callback in callbacks):
        if not found.is_over:
            found.leave_to("the script's LowtideCallback")
        return None
    try:
        callback = make(found.wanted.fit_budget, **found.options)
    except (IntegrationError, ValueError, TypeError) as error:
        found.refuse(error)
        return None
    model = getattr(trainer, "model", None)
    of = f" of {type(model).__name__}" if model is not None else ""
    found.find_fit = lambda: callback.fit
    found.is_to_trainer = True
    found.attach(f"{name}{of}")
    return callback


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
