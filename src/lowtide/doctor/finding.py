"""What a check says of itself, and what it finds."""

import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lowtide.units import format_bytes

Severity = Literal["wrong", "waste", "risk", "info"]
SEVERITIES: tuple[Severity, ...] = ("wrong", "waste", "risk", "info")
_COLUMNS = 100
FAILING: tuple[Severity, ...] = ("wrong", "waste")  # the command line exits with 1


@dataclass(frozen=True)
class Gain:
    """What a mend brings to the user's step: how much less of the peak, how much less time; negative where it costs.

    Attributes:
        peak_bytes: None where it was not measured.
        ms: None where it was not measured, or is within what steps differ from turn to turn.
        step_ms: The step without the mend.
        why_not: Why nothing was measured; "" where it was, or where there is nothing to measure.
        note: What the numbers leave out, "" if nothing.
    """

    peak_bytes: int | None = None
    ms: float | None = None
    step_ms: float = 0.0
    why_not: str = ""
    note: str = ""

    def __str__(self) -> str:
        if self.why_not:
            text = f"not measured: {self.why_not}"
        elif self.peak_bytes is None and self.ms is None:
            text = ""
        else:
            text = self._numbers()
        return "; ".join(filter(None, [text, self.note]))

    def _numbers(self) -> str:
        gained: list[str] = []
        paid: list[str] = []
        if self.peak_bytes:
            size = format_bytes(abs(self.peak_bytes))
            gained += [f"{size} of the peak"] if self.peak_bytes > 0 else []
            paid += [f"{size} more of the peak"] if self.peak_bytes < 0 else []
        if self.ms:
            took = f"{abs(self.ms):.3g} ms"
            gained += [f"{took} of {self.step_ms:.3g} ms a step"] if self.ms > 0 else []
            paid += [f"{took} on top of {self.step_ms:.3g} ms a step"] if self.ms < 0 else []
        if not gained and not paid:
            return "none on this step: its peak stays, and its time differs as much from turn to turn"
        return (", ".join(gained) or "none on this step") + (f", for {' and '.join(paid)}" if paid else "")


@dataclass(frozen=True)
class Finding:
    """One thing that is not as the user thinks, as it was seen in their step.

    Attributes:
        code: Of the check, such as ``LT012``.
        severity: ``wrong``: numbers are not what the user thinks. ``waste``: memory or time is lost. ``risk``: it works
            now, and is known to break. ``info``: good to know.
        evidence: What was seen and measured, with values.
        mend: What to change.
        gain: What the mend brings, measured, or why it was not; "" where a mend brings the right numbers alone.
        gain_bytes, gain_ms: The same as numbers, of the peak and a step; None where not measured.
        module: Path of the module it is about, "" for the whole model.
        fix: The changed settings, as lines of code; "" where there is no single change.
        source: The thread, or the file and line, where it is known from.
    """

    code: str
    severity: Severity
    title: str
    evidence: str
    mend: str
    gain: str = ""
    module: str = ""
    fix: str = ""
    source: str = ""
    gain_bytes: int | None = None
    gain_ms: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        where = f" ({self.module})" if self.module else ""
        told = {"seen": self.evidence, "gain": self.gain, "mend": self.mend, "known": self.source}
        lines = [wrapped(f"{self.severity.upper()} {self.code} {self.title}{where}")]
        return "\n".join(lines + [wrapped(f"  {name:<5} {text}") for name, text in told.items() if text])


def wrapped(text: str) -> str:
    """``text`` in lines that fit a terminal; a path or an operator's name stays whole."""
    return textwrap.fill(text, _COLUMNS, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class Check:
    """What one check looks for.

    Attributes:
        symptom: What a user notices, if anything.
        source: The thread, or the file and line, where it is known from.
        mend, fix: As of ``Finding``; a finding may say it more precisely.
    """

    code: str
    severity: Severity
    title: str
    symptom: str
    source: str
    mend: str
    fix: str = ""

    def found(
        self, evidence: str, *, module: str = "", gain: Gain | str = "", mend: str = "", fix: str = "",
        severity: Severity | None = None,
    ) -> Finding:  # fmt: skip
        """A finding of this check."""
        measured = gain if isinstance(gain, Gain) else Gain()
        return Finding(
            self.code, severity or self.severity, self.title, evidence, mend or self.mend, str(gain), module,
            fix or self.fix, self.source, measured.peak_bytes, measured.ms,
        )  # fmt: skip
