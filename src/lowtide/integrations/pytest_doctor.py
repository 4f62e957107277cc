"""The doctor in a test: fails where numbers are wrong, or memory or time is wasted."""

from collections.abc import Collection
from typing import Any

from torch import nn

from lowtide.doctor.diagnosis import Diagnosis, diagnose
from lowtide.tracing.tracer import Step


def assert_healthy(
    model: nn.Module, batch: Any, step: Step | None = None, *, skip: Collection[str] = (), **options: Any
) -> Diagnosis:
    """What ``lowtide.diagnose`` finds, where nothing of it is ``wrong`` or ``waste``.

    Args:
        skip: Codes of checks to leave out. **options: Of ``lowtide.diagnose``.

    Raises:
        AssertionError: something is; the message is the diagnosis.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    found = diagnose(model, batch, step, skip=skip, **options)
    if found.fails:
        raise AssertionError(str(found))
    return found
