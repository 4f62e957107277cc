"""What ``fit`` is asked for: the budget and method, and where tensors may be stored outside device memory."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from lowtide.units import parse_budget

# What follows a step that took more than the budget.
WARN, RAISE, LOWER = "warn", "raise", "lower"
ON_EXCESS = (WARN, RAISE, LOWER)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Offload:
    """Where a plan may store tensors outside device memory, and how many bytes of them.

    A model on CPU may use a file on disk; a model on an accelerator may use pinned host memory.

    Attributes:
        scratch_dir: Directory of the disk file. Default: the system's directory for temporary files where
            ``disk_budget`` is given; without both no tensor goes to disk.
        disk_budget: Most bytes on disk, an int or ``"20GiB"``. Default: nine tenths of what is free in ``scratch_dir``.
        host_budget: Most bytes of pinned host memory, an int or ``"20GiB"``; None: none. ``"auto"``: half of the
            available memory, shared among the ranks of this machine; none where pinned memory cannot be used (a
            warning then says why), where several ranks train the model together, or with another method than exact.
        checksums: Compare every tensor that is read back from disk with what was written.

    Raises:
        ValueError, TypeError: a budget is not an amount of memory.
    """

    scratch_dir: str | Path | None = None
    disk_budget: int | str | None = None
    host_budget: int | str | None = "auto"
    checksums: bool = False

    def __post_init__(self) -> None:
        for name in ("disk_budget", "host_budget"):
            amount = getattr(self, name)
            if amount is None or (name == "host_budget" and amount == "auto"):
                continue
            if not isinstance(parse_budget(amount, name), int):
                raise ValueError(f'{name}={amount!r} is not an amount of memory. Pass bytes as an int, or "20GiB".')

    @property
    def is_automatic(self) -> bool:
        """No tier is named: a plan without any is as good as asked for."""
        return self.host_budget == "auto" and self.scratch_dir is None and self.disk_budget is None


def offload_policy(offload: Offload | None) -> Offload:
    """``offload``, or what holds by default. Raises: TypeError: it is something else."""
    if offload is not None and not isinstance(offload, Offload):
        raise TypeError(f"offload={offload!r} is a {type(offload).__name__}. Pass lowtide.Offload(...).")
    return offload or Offload()


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """A sentence with the nearest of ``known``, after a space; "" where none is near."""
    near = difflib.get_close_matches(word, list(known), n=most, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def names_checked(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which raises a TypeError with the nearest name for an argument that it does not have."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                near = did_you_mean(name, known) or f" Use one of {', '.join(known)}."
                raise TypeError(f"{function.__name__}() has no argument {name!r}.{near}")
        return function(*args, **kwargs)

    return checked


@dataclass(frozen=True)
class FitOptions:
    """What ``fit`` was asked for; never changes.

    Attributes:
        budget: As given: an int in bytes, ``"6GiB"``, ``"40%"`` or ``"auto"``.
        step: ``(model, batch) -> loss``; None: the loss is the model's own output.
        solver: Keyword arguments of ``solve`` beyond budget, method and tiers.
        offload: Where tensors may be stored outside device memory.
        checkpointing: What becomes of checkpointing that the model has switched on: ``replace`` or ``keep``.
        max_plans: Plans at hand at most; the one that was used least recently goes.
        chunk_loss, tile_mlp: Changes to the model for long sequences.
        opaque: Paths of modules whose calls are one op each.
        on_excess: What follows a step that took more than the budget: one of ``ON_EXCESS``.
        on_status: Called with the status after each step.
    """

    budget: int | str
    optimizer: Any
    step: Callable[..., Any] | None
    method: str
    solver: Mapping[str, Any]
    offload: Offload
    max_plans: int = 8
    checkpointing: str = "replace"
    chunk_loss: bool = False
    tile_mlp: int | str | None = None
    opaque: tuple[str, ...] = ()
    on_excess: str = WARN
    on_status: Callable[[Any], None] | None = None

    @property
    def budget_kind(self) -> str:
        """What the budget is stated in, for whoever does not hand ``solver`` on."""
        return self.solver.get("budget_kind", "allocated")
