"""A reentrant checkpoint whose inputs need no gradient: its parameters get none."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT005",
    severity="wrong",
    title="parameters in a reentrant checkpoint get no gradient, because its inputs need none",
    symptom="finite loss, adapters stay zero (lora_B); or 'element 0 of tensors does not require grad'",
    source="open-unlearning#178, cloneofsimo/lora#26, peft#137, transformers#23170",
    mend="Use use_reentrant=False; or model.enable_input_require_grads().",
    fix='gradient_checkpointing_kwargs={"use_reentrant": False}',
)


def find(setup: StepUnderTest) -> Finding | None:
    guilty = [c for c in setup.calls if c.reentrant and c.parameters and not c.inputs_with_grad]
    if setup.failure is not None:
        return _where_it_fails(setup) if "require grad" in str(setup.failure) else None
    gradients, plain = setup.as_it_is.gradients, setup.plain.gradients
    lost = [n for c in guilty for n in sorted(c.parameters) if gradients[n] is None and plain[n] is not None]
    if not lost:
        return None
    return CHECK.found(
        f"{len(set(lost))} parameters in {len(guilty)} reentrant checkpoints get no gradient, and one without "
        f"checkpointing; the first is {lost[0]}",
        module=guilty[0].path,
    )


def _where_it_fails(setup: StepUnderTest) -> Finding | None:
    setup.plain  # noqa: B018 -- without checkpointing it runs
    return CHECK.found(f"with reentrant checkpoints the step fails: {str(setup.failure).splitlines()[0]}")
