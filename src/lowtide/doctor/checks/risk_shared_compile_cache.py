"""Compiler passes without an identity: a cache gives one plan's code to another plan."""

import sys

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT305",
    severity="risk",
    title="a partitioner without a uuid: compiled code of another plan may come out of the cache",
    symptom="a changed plan has no effect in the next process",
    source="torch 2.13 _inductor/codecache.py:1557 (uuid() None is one key for all)",
    mend="Return a hash of everything that decides from uuid().",
)


def find(setup: StepUnderTest) -> Finding | None:
    config = sys.modules.get("torch._inductor.config")
    functorch = sys.modules.get("torch._functorch.config")
    partitioner = getattr(config, "custom_partitioner_fn", None)
    if partitioner is not None and setup.is_compiled and partitioner.uuid() is None:
        return CHECK.found(f"torch._inductor.config.custom_partitioner_fn is {type(partitioner).__name__}, whose "
                           "uuid() is None")  # fmt: skip
    if getattr(functorch, "joint_custom_pass", None) is not None and setup.is_compiled:
        return CHECK.found("torch._functorch.config.joint_custom_pass is set, and stands in no key of the caches")
    return None
