"""What a script is to be run on, checked before anything runs."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lowtide.argument_checks import check_budget
from lowtide.errors import LowtideError
from lowtide.estimation.device_table import Device, device_named
from lowtide.pretending.standin_package import standin_gpus
from lowtide.units import parse_budget

Values = Literal["small", "all", "none"]
Routing = Literal["balanced", "worst"]
# The largest difference of a peak between two versions of PyTorch, in the runs of docs/pretend-published.md.
VERSIONS_DIFFER = 0.16
# Operators on more bytes get no values. Below it are masks, losses, norms and what small tests of programs read.
SKIPPED_ABOVE_BYTES = 1 << 20
OLDEST_TORCH = (2, 0, 1)
# NCCL's own buffers for a communicator of several GPUs; measured between 0.3 and 2 GiB, by topology and version.
NCCL_BYTES = 512 << 20


class PretendError(LowtideError, ValueError):
    """The run cannot be what it was asked to be; the message says why, and the way out."""


@dataclass(frozen=True)
class Measured:
    """What somebody measured of this script on that device: a rate of one device, a time, or a speed found before."""

    amount: float
    unit: str

    def step_ms(self, tokens: int | None) -> float:
        """Raises: PretendError: it is a rate, and nobody said of how many."""
        if self.unit == "ms":
            return self.amount
        if not tokens:
            raise PretendError(
                "--measured is a rate. Say how many tokens (or samples) a step of this rank has: --tokens N."
            )
        return tokens / self.amount * 1e3


def measured(text: str) -> Measured:
    """``"10643 tokens/s"``, ``"187 ms"``, ``"1.2 s"``, or ``"speed 0.83"`` as an earlier report says it.

    Raises:
        PretendError: It is none of them.
    """
    if found := re.fullmatch(r"speed\s+([\d.]+)", text.strip()):
        return Measured(float(found[1]), "speed")
    if found := re.fullmatch(r"([\d,.]+)\s*(ms|s|\w+\s*/\s*s)", text.strip()):
        amount = float(found[1].replace(",", ""))
        if amount > 0:
            return Measured(amount * 1e3, "ms") if found[2] == "s" else Measured(amount, found[2].replace(" ", ""))
    raise PretendError(f'--measured {text!r}: write "10643 tokens/s" (of one device), "187 ms", or "speed 0.83".')


@dataclass(frozen=True)
class PretendSettings:
    """The device, the ranks, and how far the script is to run.

    Attributes:
        device: A name of lowtide's table whose properties PyTorch can be told (``standin_gpus()``).
        memory_bytes: Of each device; None: what the device has.
        devices: GPUs of this machine; None: one, or as many as ranks of a node.
        ranks: Of the whole job, of which ``rank`` alone runs; None: as the command's launcher says, else 1.
        steps: Optimizer steps, then the script is ended; 0: it runs to its own end; None: 3, or 6 with a budget (three
            are watched, three planned).
        budget: lowtide is attached to the script, with this budget.
        host_budget: Most host memory that lowtide may move tensors to; ``"0"``: none; None: as ``lowtide.fit`` has it.
        values: ``small``: tensors up to a MiB, integers and flags have right values; ``all``; ``none``.
        routing: Where experts are tied for lack of values: ``balanced`` or ``worst`` (all tokens to the same ones).
        torch: A version of PyTorch; None: that of the environment that lowtide runs in.
        snapshot: A file for PyTorch's memory viewer.
        history: Record who allocated what; without it the report does not say what the peak consists of.
        no_weights: ``from_pretrained`` of a folder with a configuration alone gives zeros.
        time: After the steps three more run, and what a step takes is said.
        tokens: Of a step of this rank, for tokens per second; None: as its largest embedding is asked for.
        measured: What a step really takes there: ``"10643 tokens/s"``, ``"187 ms"``, ``"speed 0.83"``.
        network_gbit: Of each device to other machines, in Gbit/s; None: as clouds have it.
        clock: The script runs twice: the second time its own clocks say that steps take what was found.
        patience_s: The command is ended when it has made no progress for so long.
    """

    device: str = "h100"
    memory_bytes: int | None = None
    devices: int | None = None
    ranks: int | None = None
    rank: int = 0
    ranks_per_node: int = 8
    steps: int | None = None
    budget: str | None = None
    host_budget: str | None = None
    values: Values = "small"
    routing: Routing = "balanced"
    torch: str | None = None
    snapshot: Path | None = None
    history: bool = True
    no_weights: bool = False
    time: bool = True
    tokens: int | None = None
    measured: str | None = None
    network_gbit: float | None = None
    clock: bool = False
    patience_s: float = 900.0

    def __post_init__(self) -> None:
        facts = device_named(self.device)
        if facts.name not in standin_gpus():
            near = difflib.get_close_matches(facts.name, standin_gpus(), n=3, cutoff=0.3)
            hint = f" Nearest: {', '.join(near)}." if near else ""
            raise PretendError(
                f"device={self.device!r}: a script can only be run on NVIDIA GPUs whose properties are known.{hint} "
                f"There are {', '.join(standin_gpus())}."
            )
        for name in ("memory_bytes", "devices", "ranks", "ranks_per_node", "tokens", "network_gbit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PretendError(f"{name}={value} is not positive. Pass 1 or more.")
        if self.steps is not None and self.steps < 0:
            raise PretendError(f"steps={self.steps} is negative. Pass 1 or more, or 0 to run the script to its end.")
        if not 0 <= self.rank < (self.ranks or self.rank + 1):
            raise PretendError(f"rank={self.rank} of ranks={self.ranks}: ranks go from 0 to {(self.ranks or 1) - 1}.")
        if self.values not in ("small", "all", "none"):
            raise PretendError(f"values={self.values!r}: pass 'small', 'all' or 'none'.")
        if self.routing not in ("balanced", "worst"):
            raise PretendError(f"routing={self.routing!r}: pass 'balanced' or 'worst'.")
        if self.torch is not None:
            check_torch(self.torch)
        if self.measured is not None:
            if not self.time or not self.last_step:
                raise PretendError("measured: it says how fast the device is, and no time is asked for.")
            measured(self.measured)
        if self.clock and (not self.time or not self.last_step):
            raise PretendError("clock: the script's clocks say what a step takes, and no time is asked for.")
        if self.patience_s <= 0:
            raise PretendError(f"patience_s={self.patience_s} is not positive.")
        if self.budget is not None:
            try:
                check_budget(int(self.budget) if self.budget.isdecimal() else self.budget)
            except ValueError as error:
                raise PretendError(str(error)) from error
        if self.host_budget not in (None, "0"):
            amount(str(self.host_budget), "host_budget")

    @property
    def facts(self) -> Device:
        return device_named(self.device)

    @property
    def last_step(self) -> int:
        return self.steps if self.steps is not None else 3 if self.budget is None else 6

    def context_bytes(self, ranks: int) -> int:
        """What the driver's context takes of the device, and NCCL's buffers where there are ranks."""
        return self.facts.context_bytes + (NCCL_BYTES if ranks > 1 else 0)


def check_torch(version: str) -> None:
    """Raises: PretendError: it is no version, or one on which nothing runs."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise PretendError(f"torch={version!r} is not a version. Pass one such as '2.6.0'.")
    if tuple(map(int, version.split("."))) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise PretendError(f"torch={version!r}: scripts run on PyTorch from {oldest} on. Pass that or a later one.")


def amount(text: str, name: str) -> int:
    """``"40GiB"`` in bytes. Raises: PretendError: it is no amount of memory."""
    try:
        found = parse_budget(int(text) if text.isdecimal() else text, name)
    except (ValueError, TypeError):
        found = None  # its message names what only a budget can be
    if not isinstance(found, int):
        raise PretendError(f'{name}={text!r} is not an amount of memory. Write "40GiB", "40GB" or bytes.')
    return found
