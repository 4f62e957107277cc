"""``lowtide.diagnose``: every check on one training step."""

from collections.abc import Collection
from typing import Any

from torch import nn

from lowtide.doctor.finding import FAILING, SEVERITIES, Finding, wrapped
from lowtide.doctor.registry import Registered, all_checks
from lowtide.doctor.step_under_test import StepUnderTest, checked
from lowtide.pytorch_internals import DIAGNOSIS, is_unchecked, why_unchecked
from lowtide.tracing.tracer import Step


class Diagnosis(list[Finding]):
    """The findings, worst first; and what could not be looked at.

    Attributes:
        notes: What could not be looked at and why, a line each.
        checked: Codes of the checks that looked.
    """

    def __init__(self, findings: list[Finding], notes: list[str], checked: list[str]) -> None:
        super().__init__(sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.code)))
        self.notes, self.checked = tuple(notes), tuple(checked)

    @property
    def fails(self) -> bool:
        """Whether numbers are wrong, or memory or time is wasted."""
        return any(f.severity in FAILING for f in self)

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(f.code for f in self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "findings": [f.to_dict() for f in self], "notes": list(self.notes), "checked": list(self.checked),
            "fails": self.fails,
        }  # fmt: skip

    def __str__(self) -> str:
        head = f"{len(self)} findings" if len(self) != 1 else "1 finding"
        looked = f"{len(self.checked)} checks" if len(self.checked) != 1 else "1 check"
        lines = [f"{head}; {looked} looked at the step."]
        lines += [f"\n{finding}" for finding in self]
        lines += ["\n" + wrapped(f"not looked at: {note}") for note in self.notes]
        return "\n".join(lines)


def diagnose(
    model: nn.Module,
    batch: Any,
    step: Step | None = None,
    *,
    arguments: Any = None,
    optimizer: Any = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
) -> Diagnosis:
    """Run your training step a few times and say what is silently wrong with it.

    A check speaks only where this step proves it. Parameters, gradients, buffers, random generators and what modules
    keep of a step are afterwards as before.

    Args:
        model: As you train it: in its mode, wrapped or not, checkpointing on or off.
        batch, step: As for ``lowtide.fit``.
        arguments: The ``TrainingArguments`` or TRL config that a Trainer will read, if there is one.
        optimizer: The one that trains the model, if there is one.
        only: Codes of the checks to run, all by default. skip: Codes to leave out.

    Returns:
        The findings, as a sequence; ``.notes`` says what could not be looked at.

    Raises:
        StepError: there is no step: it fails without checkpointing too, or trains nothing.
        ValueError: ``only`` or ``skip`` names no check.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> len(lowtide.diagnose(model, torch.randn(2, 4)))
        0
    """
    looking = checks_named(only, skip)
    if is_unchecked(DIAGNOSIS):
        return Diagnosis([], [why_unchecked(DIAGNOSIS)], [])
    checked(model, batch, step)
    setup = StepUnderTest(model, batch, step, arguments=arguments, optimizer=optimizer)
    setup = setup.fitting()
    if setup.failure is not None:
        setup.plain  # noqa: B018 -- raises what the user's own step raises
    findings, done = [], []
    for code, (_, look) in looking.items():
        try:
            found = look(setup)
        except Exception as error:  # an error of a check says nothing of the set-up
            setup.notes.append(f"{code}: {type(error).__name__}: {error}")
            continue
        done.append(code)
        findings += [found] if found is not None else []
    return Diagnosis(findings, setup.notes, done)


def checks_named(only: Collection[str] = (), skip: Collection[str] = ()) -> dict[str, Registered]:
    """The checks to run. Raises: ValueError: a code names no check."""
    known = all_checks()
    if unknown := sorted({*only, *skip} - known.keys()):
        raise ValueError(f"there is no check {unknown[0]!r}. The checks are {', '.join(known)}.")
    return {code: r for code, r in known.items() if (not only or code in only) and code not in skip}
