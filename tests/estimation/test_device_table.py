"""The table of devices: sourced, complete, found by any usual spelling."""

import json

import pytest

from lowtide.estimation.device_table import (
    _FOLDER,
    UnknownDeviceError,
    calibration_path,
    device_named,
    device_names,
)
from lowtide.estimation.op_classes import _WORDS

ASKED = ["v100", "t4", "a10", "l4", "a100-40gb", "a100-80gb", "rtx3090", "rtx4090", "rtx5090", "l40s", "h100", "h200",
         "b200", "mi300x", "gaudi3", "m1-max", "cpu"]  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_a_device_people_ask_for_is_there_with_sensible_facts(name):
    device = device_named(name)

    assert 8 * 2**30 <= device.usable_bytes <= device.memory_bytes
    assert device.flops_per_s("bfloat16") >= device.flops_per_s("float32") >= device.flops_per_s("float64")


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_every_number_has_a_source_beside_it(path):
    def facts(value):
        if isinstance(value, dict):
            if "value" in value:
                yield value
            else:
                for inner in value.values():
                    yield from facts(inner)

    body = json.loads(path.read_text())
    found = [*facts(body)]

    assert body["name"] == path.stem
    assert len(found) >= 8
    for fact in found:
        assert fact["source"].startswith("https://") or len(fact["source"]) > len("assumed: because")


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_shares_that_were_measured_are_shares_of_known_classes_at_sizes_that_grow(path):
    device = device_named(path.stem)
    kinds = {name for name, _ in _WORDS}

    for key, points in device.shares.items():
        assert key.split(".")[0].split("_")[0] in kinds
        assert [us for us, _ in points] == sorted({us for us, _ in points})
        assert all(0 < share <= 1 for _, share in points)
    assert set(device.elements_per_s) in (set(), {"strided", "cast"})
    assert bool(device.shares) == ("shares" in device.sources)


def test_an_h200_is_what_one_said_of_itself():
    """PyTorch's total, and what was in use once the context and a kernel were there."""
    device, free_before, free_after, block = device_named("h200"), 149_557_477_376, 149_458_911_232, 2 << 20

    assert device.usable_bytes == 150_109_880_320
    assert device.context_bytes == device.usable_bytes - free_before + (free_before - free_after - block)


def test_known_published_numbers():
    assert device_named("h100").flops_per_s("bfloat16") == 989.4e12
    assert device_named("a100").bandwidth_bytes_per_s == 2039e9
    assert device_named("rtx4090").flops_per_s("float16") == 165.2e12


@pytest.mark.parametrize("spelling", ["NVIDIA A100-80GB", "a100_80gb", "A100 80GB", "a100"])
def test_spellings_find_the_same_device(spelling):
    assert device_named(spelling).name == "a100-80gb"


def test_an_unknown_device_is_refused_with_the_nearest_names():
    with pytest.raises(UnknownDeviceError, match=r"device='h10' is not in the table. Nearest: h100"):
        device_named("h10")
    with pytest.raises(UnknownDeviceError, match="Known are a10, "):
        device_named("zzzz")


def test_a_dtype_without_a_unit_runs_at_the_next_wider_rate():
    assert device_named("v100").flops_per_s("bfloat16") == 15.7e12


def test_this_machine_is_a_device_only_after_calibration(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    assert "here" not in device_names()
    with pytest.raises(UnknownDeviceError, match="Run: lowtide calibrate"):
        device_named("here")

    calibration_path().write_text('{"version": 1}')
    calibration_path().chmod(0o600)
    with pytest.raises(UnknownDeviceError, match="cannot be used"):
        device_named("here")
