"""Parts of a model that trains are in eval mode."""

from torch import nn

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT306",
    severity="risk",
    title="trainable modules with dropout are in eval mode while the model is in train mode",
    symptom="less regularisation than the configuration says, after a generation or an evaluation",
    source="Lightning 2.6.6 fit_loop.py:428; trl (generation inside a step)",
    mend="Call model.train() at the start of a step.",
    fix="model.train()",
)


def find(setup: StepUnderTest) -> Finding | None:
    if not setup.model.training:
        return None
    quiet = [
        n for n, m in setup.model.named_modules()
        if isinstance(m, nn.Dropout) and not m.training and m.p > 0 and setup.seen.called[n]
        and any(p.requires_grad for p in setup.model.get_submodule(n.rpartition(".")[0]).parameters())
    ]  # fmt: skip
    if not quiet:
        return None
    return CHECK.found(
        f"{len(quiet)} dropouts run and do nothing: their module is in eval mode; the first is {quiet[0]}",
        module=quiet[0],
    )
