"""The last checkpointed call: its recomputation comes first in backward, where nothing has been freed yet."""

from lowtide.doctor import checkpoint_seam
from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT203",
    severity="info",
    title="the last checkpointed call is recomputed for nothing",
    symptom="a little slower than it has to be",
    source="torch.utils.checkpoint.checkpoint_sequential leaves the last segment out for this reason",
    mend="Leave the last layer out of checkpointing.",
)

_THE_SAME = 1e-3  # of the peak: on an accelerator a number that is held takes a block


def find(setup: StepUnderTest) -> Finding | None:
    outer = [c for c in setup.calls if c.parent is None and not c.has_context]
    if len(outer) < 2 or len(outer) != len(setup.calls) or setup.failure is not None:
        return None
    last, path = {outer[-1].number}, outer[-1].path
    without, now = setup.measured_under(lambda: checkpoint_seam.plain_calls(last)), setup.measured
    if without.peak_bytes > (1 + _THE_SAME) * now.peak_bytes or without.flops >= now.flops:
        return None
    return CHECK.found(
        f"with a plain call of {path} the peak is {format_bytes(without.peak_bytes)}, with a checkpointed "
        f"one {format_bytes(now.peak_bytes)}",
        module=path,
        fix=f"model.get_submodule({path!r}).gradient_checkpointing = False" if path in setup.flagged else "",
        gain=setup.gain(lambda: checkpoint_seam.plain_calls(last)),
    )
