"""A KV cache that a checkpointed call writes: recomputing writes it again."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT008",
    severity="wrong",
    title="a KV cache is written again when a checkpointed call is recomputed",
    symptom="the sequence seems twice as long in backward: a crash, or silently other attention",
    source="pytorch#155171, transformers#28056, MemoryVLA#18",
    mend="Pass no cache in training.",
    fix="model(..., use_cache=False)  # and past_key_values=None",
)


def find(setup: StepUnderTest) -> Finding | None:
    if setup.failure is None and not setup.gradients_differ:
        return None
    for call in setup.calls:
        if len(call.cache_lengths) > 1 and call.cache_lengths[0] != call.cache_lengths[-1]:
            first, last = call.cache_lengths[0][0], call.cache_lengths[-1][0]
            what = f"the step fails ({str(setup.failure).splitlines()[0]})"
            if setup.failure is None:
                what = f"gradients are up to {100 * setup.distance:.3g} % off"
            return CHECK.found(
                f"the cache holds {first} positions after forward and {last} after recomputing; {what}",
                module=call.path,
            )
    return None
