"""Attaches lowtide to what trains in this process: a Trainer, else the first module that is called in training.

That is the outermost module called with gradients while an optimizer holds some of its parameters; it is fitted before
that call. One training has one budget, so the first is the only one. One line says what it is.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.attaching import outcome
from lowtide.attaching.variables import BUDGET, Wanted
from lowtide.errors import LowtideError
from lowtide.integrations.made_optimizers import MadeOptimizers
from lowtide.units import format_bytes

_MANY_STEPS = 10  # of optimizers, and nothing was attached to

current: "Attachment | None" = None  # of this process


def start(wanted: Wanted) -> "Attachment":
    """Begin to look, or go on. Nothing more is imported before something trains."""
    global current
    if current is None:
        current = Attachment(wanted)
    return current


class Attachment:
    """Looks for what is trained.

    Attributes:
        wanted: What was asked for.
        options: More of ``lowtide.fit``.
        raises: Whether what lowtide refuses ends the program; else ``why_not`` has it.
        attached_to: In words; "" as long as there is nothing.
        why_not: Why nothing is attached; "" where something is.
        is_over: Nobody looks any more.
        is_to_trainer: It is attached to a library's Trainer, whose callback goes when that has trained.
        find_fit: Gives the ``Fit``; None before training has begun.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.raises = wanted, True
        self.options: dict[str, Any] = {"on_excess": wanted.on_excess}
        self.attached_to, self.why_not = "", "no module was called in training whose parameters an optimizer holds"
        self.find_fit: Callable[[], Any] = lambda: None
        self._optimizers = MadeOptimizers()
        self._stop_counting = register_optimizer_step_post_hook(self._note_optimizer_step).remove
        self._num_steps, self.is_over, self.is_to_trainer = 0, False, False
        self._tried: set[str] = set()
        self._call = nn.Module.__call__
        self._watch_calls()
        # Also in a process that ``multiprocessing`` has started; a fork of this one has nothing to say.
        Finalize(None, self._tell, args=(os.getpid(),), exitpriority=100)

    # -- looking ----------------------------------------------------------------------------------------------

    def _watch_calls(self) -> None:
        call = self._call

        @functools.wraps(call)
        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_over and self._is_trained(module):
                self._attach_to_module(module)
                return module(*args, **kwargs)
            return call(module, *args, **kwargs)

        nn.Module.__call__ = called

    def stop_looking(self) -> None:
        """What has been found is all there is; calls of modules are PyTorch's own again."""
        self.is_over = True
        self._stop_counting()
        self._optimizers.stop()
        if getattr(nn.Module.__call__, "__wrapped__", None) is self._call:
            nn.Module.__call__ = self._call

    def tries(self, library: str) -> bool:
        """Whether a trainer of ``library`` is still to be attached to; asked once for each."""
        is_new = library not in self._tried and not self.is_over
        self._tried.add(library)
        return is_new

    def _is_trained(self, module: nn.Module) -> bool:
        if not self._optimizers or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        return bool(_engine_of(module)) or bool(self._optimizers.of(module))

    def _note_optimizer_step(self, *_: Any) -> None:
        self._num_steps += 1
        if self._num_steps == _MANY_STEPS and not self.is_over:
            self.say(f"{_MANY_STEPS} steps of an optimizer, and nothing is attached: {self.why_not}")

    # -- attaching --------------------------------------------------------------------------------------------

    def _attach_to_module(self, module: nn.Module) -> None:
        self.stop_looking()
        import lowtide
        from lowtide.step.module_calls import is_lowtide_call

        parts = list(module.modules())
        if any(is_lowtide_call(part._compiled_call_impl) or _is_ours(part) for part in parts):
            self.leave_to("lowtide in the script's own code")
            return
        optimizer, engine = next(iter(self._optimizers.of(module)), None), _engine_of(module)
        try:
            if engine:
                from lowtide.integrations import deepspeed

                fit = deepspeed.fit(module, budget=self.wanted.fit_budget, **self.options)
            else:
                fit = lowtide.fit(module, budget=self.wanted.fit_budget, optimizer=optimizer, **self.options)
        except (LowtideError, ValueError, TypeError) as error:
            self.refuse(error)
            return
        self.find_fit = lambda: fit
        own = sum(parameter.nbytes for parameter in module.parameters())
        what = engine or f"{type(module).__name__}, the first module called in training"
        trained = "" if optimizer is None else f", stepped by {type(optimizer).__name__}"
        self.attach(f"{what} ({format_bytes(own)} of parameters{trained}){_left_out(module, optimizer)}")

    def attach(self, what: str) -> None:
        """It is."""
        self.stop_looking()
        self.attached_to, self.why_not = what, ""
        self.say(f"{BUDGET}={self.wanted.budget} is attached to {what}")
        if rank() > 0:
            logging.getLogger("lowtide").setLevel(logging.ERROR)  # every rank would say the same

    def leave_to(self, whom: str) -> None:
        """The script has lowtide itself: one training has one budget."""
        self.stop_looking()
        self.why_not = f"{whom} has a budget of its own, which holds"
        self.say(f"{BUDGET}={self.wanted.budget} is not used: {self.why_not}")

    def refuse(self, error: Exception) -> None:
        """Nothing can be attached: the program was started to keep a budget, so it ends here, on every rank."""
        self.stop_looking()
        self.why_not = str(error)
        if self.raises:
            error.add_note(f"(lowtide was asked for by {BUDGET}={self.wanted.budget}; without it the program runs.)")
            raise error

    def _tell(self, pid: int) -> None:
        """The process ends: what came of it."""
        fit = self.find_fit()
        if os.getpid() != pid or rank() > 0 or (fit is None and not self.is_over):
            return
        if fit is not None and not self.is_to_trainer:  # whose callback has said it
            self.say(fit.status().headline.rstrip("."))
        if told := outcome.write(self.wanted, fit, self.attached_to, self.why_not):
            self.say(told)

    def say(self, text: str) -> None:
        """On one rank of a training, whatever its logging is set to."""
        if rank() == 0:
            print(f"lowtide: {text}.", file=sys.stderr, flush=True)


def rank() -> int:
    """Of this process in its training."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    value = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return int(value) if value.isdecimal() else 0


def _engine_of(module: nn.Module) -> str:
    """Its name, if it is an engine of DeepSpeed's: its optimizer holds other tensors than its parameters."""
    names = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("deepspeed.")]
    return f"DeepSpeed's {names[0]}" if names and names[-1] == "DeepSpeedEngine" else ""


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "lowtide"


def _left_out(module: nn.Module, optimizer: Any) -> str:
    """What the optimizer trains beside this module; "" if that is nothing."""
    if optimizer is None:
        return ""
    own = {id(parameter) for parameter in module.parameters()}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if not others:
        return ""
    size = format_bytes(sum(parameter.nbytes for parameter in others))
    return f"; {size} of parameters that the optimizer trains are not in it, and their steps are not planned"
