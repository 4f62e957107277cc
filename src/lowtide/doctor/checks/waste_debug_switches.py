"""Switches for finding errors that were left on."""

from contextlib import nullcontext

import torch
from torch.utils import checkpoint

from lowtide.doctor.finding import Check, Finding, Gain
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT212",
    severity="waste",
    title="a switch for debugging is on",
    symptom="every step is slower",
    source="torch.autograd.set_detect_anomaly, torch.utils.checkpoint.set_checkpoint_debug_enabled",
    mend="Switch it off where you do not look for an error.",
    fix="torch.autograd.set_detect_anomaly(False)",
)


def find(setup: StepUnderTest) -> Finding | None:
    on, gain = [], Gain()
    if torch.is_anomaly_enabled():
        # Rehearsals switch it off by themselves: so the step inside this block is the one with it.
        gain = setup.gain(nullcontext, lambda: torch.autograd.set_detect_anomaly(True))
        on.append("anomaly detection is on: every node keeps the traceback of its forward")
    if checkpoint._checkpoint_debug_enabled:
        on.append("checkpoint's debug mode is on: every operator is logged twice")
    return CHECK.found("; ".join(on), gain=gain) if on else None
