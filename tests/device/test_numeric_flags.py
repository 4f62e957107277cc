"""Flags that decide an op's bits, however a script sets them."""

import pytest
import torch
from support.gpu import is_gpus
from torch import nn

import lowtide
from lowtide.device.numeric_flags import numeric_flags, set_numeric_flags, with_numeric_flags


def older():
    torch.set_float32_matmul_precision("high")


def older_and_lower():
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = False


def newer():
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as transformers does for ``tf32=True``


def newer_of_convolutions():
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


SETTINGS = [older, older_and_lower, newer, newer_of_convolutions]


@pytest.fixture(autouse=True)
def flags_put_back():
    before = numeric_flags()
    yield
    set_numeric_flags(before)
    assert numeric_flags() == before
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("set_flags", SETTINGS)
def test_other_flags_are_seen_and_are_back_where_they_were_asked_for(set_flags):
    before = numeric_flags()
    set_flags()
    after = numeric_flags()
    assert after != before

    with with_numeric_flags(before):
        assert numeric_flags() == before
        torch.get_float32_matmul_precision()  # raises where older flags say otherwise than newer ones
    assert numeric_flags() == after


@pytest.mark.parametrize("set_flags", SETTINGS)
def test_a_step_is_planned_whichever_flags_a_script_has_set(set_flags):
    set_flags()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    x = torch.randn(256, 64)
    with lowtide.fit(model, budget="60%") as fit:
        for _ in range(3):
            model(x).square().mean().backward()
            fit.wait()

        # On a GPU a library's workspace may come with the flags, which the plan after the first step does not know.
        least = 1 if is_gpus(x.device) else 2
        assert fit.status().in_force and fit.status().planned_steps >= least
