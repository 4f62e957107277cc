"""Logits of a large vocabulary that set the peak, which no checkpointing of layers lowers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from lowtide import long_sequences
from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT204",
    severity="waste",
    title="logits set the peak: checkpointing layers cannot lower it",
    symptom="out of memory at the loss; checkpointing seems useless",
    source="trl#1980, ms-swift#6966, Automodel#3907",
    mend="Compute the loss in chunks: lowtide.fit(model, budget=..., chunk_loss=True).",
    fix="lowtide.fit(model, budget=..., chunk_loss=True)",
)
_SHARE = 0.5


def find(setup: StepUnderTest) -> Finding | None:
    head = _head(setup.model)
    if head is None or not setup.calls or setup.failure is not None:
        return None
    seen = setup.seen
    logits = seen.peak_by_width.get(head.out_features, 0) - head.weight.nbytes * (head.in_features == head.out_features)
    if head.out_features < 4 * head.in_features or logits < _SHARE * seen.peak_bytes:
        return None
    now = setup.measured.peak_bytes
    lowers = "checkpointing makes the step fit"
    if setup.plain_fits:
        share = 100 * (1 - now / setup.measured_plain.peak_bytes)
        lowers = f"checkpointing {len(setup.calls)} calls lowers the peak by {share:.0f} %"
    gain = setup.gain(lambda: _chunked(setup.model))
    return CHECK.found(
        f"at the peak of {format_bytes(now)} tensors of {head.out_features} columns take {format_bytes(logits)}; "
        f"{lowers}",
        gain=replace(gain, note=f"at most {format_bytes(logits)} of the peak") if gain.why_not else gain,
    )


@contextmanager
def _chunked(model: nn.Module) -> Iterator[None]:
    undo = long_sequences.chunk_the_loss(model, None)
    try:
        yield
    finally:
        undo()


def _head(model: nn.Module) -> nn.Linear | None:
    """What makes the logits."""
    find = getattr(model, "get_output_embeddings", None)
    found = find() if callable(find) else None
    if isinstance(found, nn.Linear):
        return found
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return linear[-1] if linear and find is None else None
