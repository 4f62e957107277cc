"""Which devices are here, and what is said of one that is not."""

import pytest
import torch

from lowtide.device import names
from lowtide.errors import DeviceError, TierError
from lowtide.measurement.links import measured_link
from lowtide.step.module_calls import call_signature

ELSEWHERE = "xpu"  # of the kinds that a torch for CPU knows by name


@pytest.fixture
def two_accelerators(monkeypatch):
    """A machine with two of ``ELSEWHERE``."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(ELSEWHERE))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


def test_the_error_for_a_device_that_is_not_here_names_those_that_are(two_accelerators):
    for present in ("cpu", ELSEWHERE, f"{ELSEWHERE}:1", torch.device("cpu")):
        names.check_is_here(present)

    with pytest.raises(DeviceError, match=r"^there is no device xpu:2 here. Here are: cpu, xpu:0, xpu:1.$"):
        names.check_is_here("xpu:2")
    with pytest.raises(DeviceError, match=r"^there is no device cuda here. Here are: cpu, xpu:0, xpu:1.$"):
        names.check_is_here("cuda")
    with pytest.raises(DeviceError, match=r"^device 'gpu' is not known to torch .*. Here are: cpu, xpu:0, xpu:1.$"):
        names.check_is_here("gpu")


def test_autocast_of_whatever_accelerator_is_here_is_seen_in_a_call(two_accelerators, monkeypatch):
    model = torch.nn.Linear(2, 2)
    plain = call_signature(model, (), {})

    with torch.autocast("cpu", torch.bfloat16):
        assert call_signature(model, (), {}) == f"{plain} autocast(cpu,bfloat16)"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == ELSEWHERE)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)
    assert call_signature(model, (), {}) == f"{plain} autocast(xpu,float16)"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_host_tier_needs_a_device_with_streams_and_says_so():
    with pytest.raises(TierError, match=r"xpu cannot copy beside the computation: there is no device xpu here"):
        measured_link("host", ELSEWHERE)
