"""A KV cache that is filled in a training step."""

from functools import partial
from unittest.mock import patch

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT205",
    severity="waste",
    title="the KV cache is on in training",
    symptom="copies of all keys and values that nobody reads",
    source="transformers#28056; transformers 5.23: use_cache is True in most configurations",
    mend="Switch it off for training.",
    fix="model.config.use_cache = False",
)
_NOTICED = 0.01  # of the peak, or of the step's time: keys and values are copied even where logits set the peak


def find(setup: StepUnderTest) -> Finding | None:
    size = setup.seen.cache_bytes
    config = getattr(setup.model, "config", None)
    if not size or not getattr(config, "use_cache", False):
        return None
    off = partial(patch.object, config, "use_cache", False)
    without, now = setup.measured_under(off), setup.measured
    gain = setup.gain(off)
    faster = gain.ms is not None and gain.ms > _NOTICED * gain.step_ms
    if without.peak_bytes > (1 - _NOTICED) * now.peak_bytes and not faster:
        return None
    return CHECK.found(
        f"the step returns a cache of {format_bytes(size)}; its peak is {format_bytes(now.peak_bytes)}, without the "
        f"cache {format_bytes(without.peak_bytes)}",
        gain=gain,
    )
