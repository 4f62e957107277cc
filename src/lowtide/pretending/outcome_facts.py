"""What one run of a script has shown, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lowtide.pretending.step_time import StepTime

KINDS = ("weights", "gradients", "optimizer", "activations", "workspaces", "other")


@dataclass(frozen=True)
class StepPeak:
    """One optimizer step, from the end of the one before.

    Attributes:
        allocated_bytes: The allocator's own peak; ``reserved_bytes`` is what it held of the device.
        host_ms: What the host took, with the stand-in's own work; no kernel ran.
        launches: Kernels; ``waits`` is how often the host waited for the device.
    """

    allocated_bytes: int
    reserved_bytes: int
    host_ms: float
    launches: int
    waits: int


@dataclass(frozen=True)
class OutOfMemory:
    """The first allocation that did not fit.

    Attributes:
        line: The innermost line of the script's own files, ``train.py:12``; of a package where there is none.
        inner_line: The innermost line outside PyTorch, which may be of a package that the script calls.
        message: PyTorch's own; empty where the script caught it.
        was_caught: The script went on.
    """

    step: int
    line: str
    inner_line: str
    asked_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    message: str
    was_caught: bool


@dataclass(frozen=True)
class RankPeak:
    """What one of several ranks took; ``step_ms``: None where time was not asked for."""

    rank: int
    verdict: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    step_ms: float | None

    @classmethod
    def of(cls, report: PretendFacts) -> RankPeak:
        return cls(
            report.rank, report.verdict, report.peak_allocated_bytes, report.peak_reserved_bytes,
            report.time.step_ms if report.time is not None else None,
        )  # fmt: skip


@dataclass(frozen=True)
class MeasuredChange:
    """One change of the run, and what came of it.

    Attributes:
        change: In words; ``how`` is what to write.
        fits: On the device that was asked for.
        peak_reserved_bytes: The highest of all steps; None: the run ended before its first step.
        launches: Of the last step: what the change costs in kernels.
        step_ms: What a step takes then; None: time was not asked for, or the run ended before.
    """

    change: str
    how: str
    fits: bool
    peak_reserved_bytes: int | None
    launches: int | None
    step_ms: float | None = None


@dataclass(frozen=True)
class PretendFacts:
    """What ``lowtide pretend`` found; ``to_json()`` is the JSON of ``--json``.

    Attributes:
        fits: The script came to the end of the steps asked for (or its own) on that device.
        verdict: ``fits``, ``fits tightly``, ``does not fit``, ``failed`` (another error), ``trained nothing`` or ``did
            not end``.
        exit_code: The script's; 0 where it was ended after its steps.
        peak_allocated_bytes: The highest of all steps, of the device that had most.
        by_kind: What the peak consists of, in bytes asked for; ``by_part`` is finer, ``by_module`` and ``by_line`` say
            who allocated what is neither weight nor state. ``curve`` has ``by_kind`` over the run.
        peak_at: Where the script was then: ``line`` of its own files, ``inner_line`` outside PyTorch; where
            ``is_backward``, the line that called backward. None: no history was recorded.
        stops: The lines where the host waited for the device in the last step, the most frequent first.
        stages: How far the script came, with seconds.
        time: What a step takes; None: it was not asked for, or the script ended before.
        by_rank: Where several ranks ran; the rest of the report is of the largest of them.
        pinned_peak_bytes: Host memory that is page-locked, as the script asked for it, in all.
        lowtide: What lowtide did in it, with ``--budget``; else None.
        changes: What would change the peak, with ``--advise``.
        assumptions: What the numbers take for granted.
        notes: What was noticed.
    """

    command: tuple[str, ...]
    device: str
    torch: str
    capacity_bytes: int
    context_bytes: int
    ranks: int
    rank: int
    fits: bool
    verdict: str
    exit_code: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    steps: tuple[StepPeak, ...]
    by_kind: dict[str, int]
    by_part: tuple[dict[str, Any], ...]
    by_module: tuple[dict[str, Any], ...]
    by_line: tuple[dict[str, Any], ...]
    curve: dict[str, Any]
    peak_at: dict[str, Any] | None
    out_of_memory: OutOfMemory | None
    stops: tuple[dict[str, Any], ...]
    stages: tuple[dict[str, Any], ...]
    snapshot: str | None
    time: StepTime | None
    lowtide: dict[str, Any] | None
    changes: tuple[MeasuredChange, ...]
    host_peak_bytes: int
    pinned_peak_bytes: int
    compile_s: float
    seconds: float
    last_words: str
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    by_rank: tuple[RankPeak, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """What the allocator can have of the device."""
        return self.capacity_bytes - self.context_bytes

    @property
    def unused_bytes(self) -> int:
        """What the allocator holds beyond its peak: fragments, and blocks that it keeps for later."""
        return max(0, self.peak_reserved_bytes - self.peak_allocated_bytes)

    @property
    def pins_much(self) -> bool:
        """More than the numbers that PyTorch itself copies in passing."""
        return self.pinned_peak_bytes >= 1 << 20

    @property
    def nvidia_smi_bytes(self) -> int:
        """About what ``nvidia-smi`` would show: reserved memory and the context."""
        return self.peak_reserved_bytes + self.context_bytes

    @property
    def host_ms_per_step(self) -> float | None:
        """Of the last step: the first ones import, compile and fill caches."""
        return self.steps[-1].host_ms if self.steps else None

    def to_json(self) -> dict[str, Any]:
        """One object, plain values only."""
        body = asdict(self)
        body["peak_by_step"] = [
            {"allocated_bytes": step.allocated_bytes, "reserved_bytes": step.reserved_bytes} for step in self.steps
        ]
        last = self.steps[-1] if self.steps else None
        body["host_ms_per_step"] = self.host_ms_per_step
        body["launches_per_step"] = last.launches if last else None
        body["waits_per_step"] = last.waits if last else None
        if self.time is not None:
            body["time"]["tokens_per_second"] = self.time.tokens_per_second
        body["unused_bytes"] = self.unused_bytes
        body["nvidia_smi_bytes"] = self.nvidia_smi_bytes
        return body
