"""What a check says of itself, and what it finds."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["wrong", "waste", "risk", "info"]
SEVERITIES: tuple[Severity, ...] = ("wrong", "waste", "risk", "info")
FAILING: tuple[Severity, ...] = ("wrong", "waste")  # the command line exits with 1


@dataclass(frozen=True)
class Finding:
    """One thing that is not as the user thinks, as it was seen in their step.

    Attributes:
        code: Of the check, such as ``LT012``.
        severity: ``wrong``: numbers are not what the user thinks. ``waste``: memory or time is lost. ``risk``: it works
            now, and is known to break. ``info``: good to know.
        evidence: What was seen and measured, with values.
        mend: What to change.
        gain: What the mend brings, measured; "" where nothing was measured.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        where = f" ({self.module})" if self.module else ""
        lines = [f"{self.severity.upper()} {self.code} {self.title}{where}", f"  seen  {self.evidence}"]
        lines += [f"  gain  {self.gain}"] if self.gain else []
        return "\n".join([*lines, f"  mend  {self.mend}", f"  known {self.source}"])


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
        self, evidence: str, *, module: str = "", gain: str = "", mend: str = "", fix: str = "",
        severity: Severity | None = None,
    ) -> Finding:  # fmt: skip
        """A finding of this check."""
        return Finding(
            self.code, severity or self.severity, self.title, evidence, mend or self.mend, gain, module,
            fix or self.fix, self.source,
        )  # fmt: skip
