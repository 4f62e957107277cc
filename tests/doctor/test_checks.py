"""Each check speaks on a real reproduction, and is silent on the same set-up mended."""

from contextlib import nullcontext

import pytest
import torch
from support.sick_setups import SICK, Case

import lowtide
from lowtide.doctor.registry import all_checks


@pytest.fixture(autouse=True)
def _one_group():
    torch.manual_seed(0)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def diagnosed(case: Case, code: str) -> lowtide.Diagnosis:
    fit = case.options.pop("fit", None)
    with case.around(), fit or nullcontext():
        return lowtide.diagnose(case.model, case.batch, case.step, only=[code], **case.options)


@pytest.mark.parametrize("name", SICK)
def test_a_check_speaks_on_what_is_wrong_and_is_silent_on_what_is_mended(name):
    code = name.split()[0]
    sick, mended = SICK[name]

    found = diagnosed(sick(), code)
    assert found.codes == (code,) and not found.notes, found
    assert found[0].evidence and found[0].mend

    healthy = diagnosed(mended(), code)
    assert not healthy and not healthy.notes, healthy


def test_every_check_is_shown():
    assert all_checks().keys() == {name.split()[0] for name in SICK} | {"LT109"}  # tests/integrations/test_deepspeed.py
