"""Checks of what ``fit`` is given, made before anything runs: one sentence each, with the value and the way out."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.errors import StepError
from lowtide.options import ON_EXCESS, did_you_mean
from lowtide.step.optimizer_state import checked_optimizer
from lowtide.units import format_bytes, parse_budget

_SMALL_BUDGET_BYTES = 2**20  # an int below is more likely meant in GiB


def check_arguments(model: Any, batch: Any, budget: int | str, step: Any, optimizer: Any) -> None:
    """Refuse what cannot be planned whatever the model computes.

    Raises:
        TypeError, ValueError: an argument is of a wrong type or value. StepError: there is nothing to train.
    """
    kind, given = type(model).__name__, type(batch).__name__
    if not isinstance(model, nn.Module):
        if isinstance(batch, nn.Module):
            swapped = f"model is a {kind} and batch is a {given}: they are swapped."
            raise TypeError(f"{swapped} Call fit(model, batch).")
        raise TypeError(f"model is a {kind}, not an nn.Module. Pass the module, and step= for the rest.")
    if next(model.parameters(), None) is None:
        raise StepError(f"the {kind} has no parameter: there is nothing to train.\nPass the module that is trained.")
    kinds = {base.__name__ for base in type(batch).__mro__}
    if isinstance(batch, Iterator) or "DataLoader" in kinds or ("Dataset" in kinds and step is None):
        raise TypeError(f"batch is a {given}, not one batch. Pass one: next(iter(...)).")
    if step is not None and not callable(step):
        raise TypeError(f"step={step!r} is a {type(step).__name__}. Pass a function (model, batch) -> loss.")
    check_budget(budget)
    checked_optimizer(optimizer)


def check_on_excess(on_excess: Any, on_status: Any) -> None:
    """Raises: ValueError, TypeError: what should follow a step cannot."""
    if on_excess not in ON_EXCESS:
        near = did_you_mean(on_excess, ON_EXCESS) if isinstance(on_excess, str) else ""
        raise ValueError(f"on_excess={on_excess!r} is not known.{near} Use one of {', '.join(map(repr, ON_EXCESS))}.")
    if on_status is not None and not callable(on_status):
        raise TypeError(f"on_status={on_status!r} is a {type(on_status).__name__}. Pass a function of the status.")


def check_budget(budget: int | str) -> None:
    """Raises: TypeError, ValueError: ``budget`` is no amount of memory, or more than the plain step's."""
    parsed = parse_budget(budget)
    if isinstance(parsed, float) and parsed > 1:
        raise ValueError(
            f'budget={budget!r} is more activation memory than the plain step\'s. Pass 100% or less; "100%" changes '
            "nothing."
        )


def budget_hint(budget: int | str) -> str:
    """What to say of an int that looks like GiB; "" of any other budget."""
    if not isinstance(budget, int) or budget >= _SMALL_BUDGET_BYTES:
        return ""
    return f"budget={budget} means {format_bytes(budget)}. Did you mean '{budget}GiB'?"
