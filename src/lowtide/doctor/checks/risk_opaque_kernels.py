"""Stored bytes that come from kernels that no dispatcher sees."""

from collections import Counter

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_listener import EMPTY
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT302",
    severity="info",
    title="kernels that no selective policy can see make much of what is stored",
    symptom="selective checkpointing cannot recompute it; whole-layer checkpointing and lowtide run the calls again",
    source="Triton kernels in autograd Functions: Liger, Unsloth, FLA, TransformerEngine",
    mend="Checkpoint the layers they are in as a whole, or register the kernels as operators (torch.library).",
)
_SHARE = 0.1


def find(setup: StepUnderTest) -> Finding | None:
    stored = list(setup.seen.stored.values())
    opaque = [s for s in stored if s.producer in EMPTY]
    size, whole = sum(s.size_bytes for s in opaque), sum(s.size_bytes for s in stored)
    if not whole or size < _SHARE * whole:
        return None
    by_line = Counter[str]()
    for s in opaque:
        by_line[s.line] += s.size_bytes
    return CHECK.found(
        f"{format_bytes(size)} of {format_bytes(whole)} stored ({100 * size / whole:.0f} %) were filled by kernels of "
        f"autograd Functions; most at {by_line.most_common(1)[0][0]}",
        module=opaque[0].path,
    )
