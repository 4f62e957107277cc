"""The counter of the allocator's events: what it counts, when it steps aside, and what is done without it."""

import logging
import os
import shutil
import subprocess
import sys
from threading import Thread

import pytest
import torch
from support.training_steps import mlp

import lowtide
from lowtide.device import allocation_counter, native_library
from lowtide.device.allocation_counter import NATIVE, count
from lowtide.measurement import allocator
from lowtide.measurement.allocator import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread", "counter_is_there")


@pytest.fixture
def unprepared(monkeypatch):
    """As in a process that has not looked for the counter yet."""
    for name, value in (("loaded", None), ("why_missing", ""), ("_building", None)):
        monkeypatch.setattr(NATIVE, name, value)
    start = allocation_counter.profiler._run_on_profiler_start
    monkeypatch.setattr(allocation_counter.profiler, "_run_on_profiler_start", start)
    return monkeypatch


def step(model, batch):
    model(batch).square().mean().backward()


def test_windows_may_overlap_in_any_way():
    first = count()
    a = torch.empty(1000, dtype=torch.uint8, device="cpu")
    second = count()
    del a
    b = torch.empty(300, dtype=torch.uint8, device="cpu")
    first.close()
    c = torch.empty(500, dtype=torch.uint8, device="cpu")
    second.close()
    del b, c

    assert (first.peak_bytes, first.left_bytes) == (1000, 300)
    assert (second.peak_bytes, second.left_bytes) == (0, -200)


def test_it_counts_what_the_profiler_counts(monkeypatch):
    model, batch = mlp(4, 32), torch.randn(64, 32)
    step(model, batch)
    counted = peak_bytes(lambda: step(model, batch))
    monkeypatch.setattr(allocator.allocation_counter, "count", lambda *_: None)

    assert peak_bytes(lambda: step(model, batch)) == counted > 0


# A profiler that failed to start, or many of them, spoil what comes later in a process: these have one of their own.
PROFILED = """
import torch
from torch.profiler import profile
from lowtide.device import allocation_counter, native_library
from lowtide.device.allocation_counter import NATIVE, count

allocation_counter.prepare(waits=True)
if {steps_aside}:
    forgotten = count()
    del forgotten
    window = count()
    with profile(profile_memory=True) as seen:
        torch.ones(300).sum()
        assert count() is None
    window.close()
    assert window.lost and any(event.name == "aten::sum" for event in seen.events())
    assert count() is not None
else:
    allocation_counter.step_aside = lambda: None
    window = count()
    try:
        with profile():
            pass
    except RuntimeError as error:
        assert "Profiler is already enabled" in str(error), error
    else:
        raise AssertionError("the profiler has started")
"""


@pytest.mark.parametrize("steps_aside", [True, False])
def test_a_profiler_that_starts_takes_its_place_and_would_fail_otherwise(steps_aside):
    code = PROFILED.format(steps_aside=steps_aside)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_a_window_that_another_thread_closes_counts_no_more_and_the_next_one_does():
    window = count()
    thread = Thread(target=window.close)
    thread.start()
    thread.join()
    torch.empty(1000, device="cpu")
    assert window.peak_bytes == 0
    again = count()
    held = torch.empty(1000, dtype=torch.uint8, device="cpu")
    again.close()
    assert again.peak_bytes == held.nbytes


@pytest.fixture(params=["a compiler", "a place", "an error", "wanted"])
def lack(request, unprepared, tmp_path):
    unprepared.setenv("LOWTIDE_ALLOCATION_COUNTER", str(tmp_path / "kept"))
    if request.param == "a compiler":
        unprepared.setenv("PATH", str(tmp_path))
        return "there is no C++ compiler (c++)"
    if request.param == "an error":
        (tmp_path / "broken.cpp").write_text("int main( {")
        unprepared.setattr(NATIVE, "source", tmp_path / "broken.cpp")
        return "cannot build the counter: "
    if request.param == "wanted":
        unprepared.setenv("LOWTIDE_ALLOCATION_COUNTER", "0")
        return "LOWTIDE_ALLOCATION_COUNTER=0"
    (tmp_path / "kept").write_text("a file where the folder would be")
    return "kept"


def test_what_it_cannot_be_built_without_is_told_once_and_training_goes_on(lack, caplog):
    model, batch = mlp(4, 32), torch.randn(64, 32)
    caplog.set_level(logging.WARNING, "lowtide")
    with lowtide.fit(model, budget="1GiB") as fit:
        allocation_counter.prepare(waits=True)
        for _ in range(3):
            step(model, batch)
            fit.wait()
        status = fit.status()

    assert not allocation_counter.is_there() and lack in allocation_counter.why_missing()
    assert status.in_force and status.last_peak_bytes is None and status.observed_peak_bytes
    assert status.highest_peak_bytes is None
    (told,) = [reason for reason in status.reasons if "steps under a plan are not counted: " in reason]
    assert lack in told and [told] == [m.removeprefix("lowtide: ") for m in caplog.messages if "not counted" in m]


def test_a_library_that_others_could_have_written_is_not_loaded(unprepared, tmp_path):
    unprepared.setenv("LOWTIDE_ALLOCATION_COUNTER", str(tmp_path))
    path = NATIVE.path()
    path.write_bytes(b"")
    path.chmod(0o666)
    allocation_counter.prepare(waits=True)

    assert "others may write to it" in allocation_counter.why_missing()


def test_another_pytorch_has_another_library(monkeypatch):
    before = NATIVE.path()
    monkeypatch.setattr(torch, "__version__", "2.99.0")

    assert NATIVE.path() != before


@pytest.fixture
def shipped(unprepared, tmp_path):
    """The library as a wheel ships it, on a machine without a compiler where nothing was built yet."""
    unprepared.setattr(native_library, "_SHIPPED", tmp_path / "built")
    library = tmp_path / "built" / "allocation_counter" / NATIVE.path().name
    library.parent.mkdir(parents=True)
    shutil.copy(NATIVE.path(), library)
    unprepared.setenv("PATH", str(tmp_path))
    unprepared.setenv("LOWTIDE_ALLOCATION_COUNTER", str(tmp_path / "kept"))
    return library


def test_one_that_the_wheel_has_needs_no_compiler(shipped, tmp_path):
    allocation_counter.prepare()  # nothing to wait for

    assert allocation_counter.is_there() and not (tmp_path / "kept").exists()


def test_one_that_the_wheel_has_for_another_pytorch_is_left_out_and_told(shipped):
    shipped.rename(shipped.with_name("torch-2.99.0-0123456789abcdef.so"))
    allocation_counter.prepare(waits=True)

    told = f"(this wheel has it built for PyTorch 2.99.0; this is {torch.__version__})"
    assert not allocation_counter.is_there() and told in allocation_counter.why_missing()


def test_one_that_the_wheel_has_for_a_newer_system_is_built_here(shipped, unprepared, tmp_path):
    shipped.write_bytes(b"no library of this system")
    unprepared.undo()
    unprepared.setattr(NATIVE, "loaded", None)
    unprepared.setattr(native_library, "_SHIPPED", tmp_path / "built")
    unprepared.setenv("LOWTIDE_ALLOCATION_COUNTER", str(tmp_path / "kept"))
    allocation_counter.prepare(waits=True)

    assert allocation_counter.is_there() and os.listdir(tmp_path / "kept") == [NATIVE.path().name]


@pytest.mark.skipif(sys.platform != "linux", reason="nice is Linux's")
def test_it_is_built_beside_training_and_kept(unprepared, tmp_path):
    unprepared.setenv("LOWTIDE_ALLOCATION_COUNTER", str(tmp_path))
    allocation_counter.prepare()
    assert not allocation_counter.is_there()  # nobody waited
    allocation_counter.prepare(waits=True)

    assert allocation_counter.is_there() and os.listdir(tmp_path) == [NATIVE.path().name]
