"""The whole suite with another default device: what ``pytest --device standin`` does, and what is left out there.

Two devices are known: ``standin``, the tests' own accelerator, and ``cuda``, PyTorch's CUDA build on its stand-in or on
a GPU. A
test that names no device then makes its tensors there, where streams run late. ``not_on_the_accelerator`` has the tests
that cannot run so, by the beginning of their id, each with its reason, and those that run on the CPU beside the device.
For those in ``MODEL_ALONE`` the allocator does not tell what else is allocated, steps are counted from their start, and
segments grow, so that every block is split.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerator.build import NoCompilerError
from accelerator.schedules import LATE
from support.gpu import is_gpus
from support.not_on_the_accelerator import (
    LEFT_OUT,
    LEFT_OUT_OF_CUDA,
    LEFT_OUT_OF_GPUS,
    LEFT_OUT_OF_STANDIN,
    MODEL_ALONE,
    ON_THE_CPU,
)

from lowtide import api
from lowtide.device import allocation_counter, memory
from lowtide.device.kept_workspaces import KeptWorkspaces
from lowtide.measurement import allocator
from lowtide.recording import finished_graph, step_recording
from lowtide.training import budget, step_peak

_NODES_BEFORE = 10_000
_STARTED_WORK = "started work on the accelerator"


class FromItsStart(allocation_counter.AllocationWindow):
    """What was there before, other tests' too, is in nobody's step, as on a CPU."""

    def __init__(self, device: str | torch.device, place: Any) -> None:
        super().__init__(device, place)
        if not self.is_of_host:
            self.is_of_host, self._start = True, memory.allocated_bytes(device) or 0


_usable = api.usable
_MEASURE = (allocator.peak_bytes, allocator.measuring)
_MODULES = {"standin": "accelerator.device", "cuda": "support.cuda_device"}


def switch_to(name: str) -> ModuleType:
    """Make ``name`` the default device, with streams that run late."""
    if name not in _MODULES:
        raise pytest.UsageError(f"--device {name}: tests may be switched to {' or '.join(_MODULES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: this PyTorch has no CUDA; make test-cuda makes an environment that has")
    try:
        device = importlib.import_module(_MODULES[name])
    except NoCompilerError as error:
        raise pytest.UsageError(f"--device {name}: {error}") from error
    # Fits that name no tier have none, as on a CPU: their tests count what is recomputed. tests/accelerator offloads.
    api.usable = lambda device, policy: {} if policy.is_automatic else _usable(device, policy)
    torch.set_default_device(name)
    # As after some steps of training. In a process's first ones the thread that runs backward on a device numbers its
    # nodes like the one that runs forward, which no plan follows.
    number = torch.ones((), device="cpu", requires_grad=True)
    for _ in range(_NODES_BEFORE):
        number * 1
    for measure in _MEASURE:  # tests that name no device mean the default
        measure.__defaults__ = tuple(name if default == "cpu" else default for default in measure.__defaults__ or ())
    return device


@contextmanager
def on_the_cpu(name: str) -> Iterator[None]:
    """Inside, all is as if nobody had switched."""
    torch.set_default_device(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "usable", _usable)
        for measure in _MEASURE:
            defaults = tuple("cpu" if default == name else default for default in measure.__defaults__ or ())
            patch.setattr(measure, "__defaults__", defaults)
        try:
            yield
        finally:
            torch.set_default_device(name)


def reason_to_leave_out(node_id: str, device: str) -> str:
    """Why this test cannot run with the default device switched to ``device``; "" if it can."""
    reasons = LEFT_OUT | (LEFT_OUT_OF_CUDA if device == "cuda" else LEFT_OUT_OF_STANDIN)
    if is_gpus(device):
        reasons |= LEFT_OUT_OF_GPUS
    return next((reason for start, reason in reasons.items() if node_id.startswith(start)), "")


class Switched:
    """A pytest plugin: runs each test on ``device`` and counts the tests that started work there.

    The counts are made of reports, which come to the process that prints from all that run tests (xdist's workers).
    """

    def __init__(self, device: ModuleType) -> None:
        self._device = device
        self.on_device = self.elsewhere = self.left_out = 0

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if reason := reason_to_leave_out(item.nodeid.removeprefix("tests/"), self._device.NAME):
            item.add_marker(pytest.mark.host_only(reason))
        if marker := item.get_closest_marker("host_only"):
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        node_id, name = item.nodeid.removeprefix("tests/"), self._device.NAME
        if node_id.startswith(tuple(ON_THE_CPU)):
            with on_the_cpu(name):
                return (yield)
        alone = node_id.startswith(MODEL_ALONE)
        with pytest.MonkeyPatch.context() as patch, self._device.expandable_segments(alone):
            # The peak statistic of tests before is not this one's, nor what could not be given back of it.
            memory._forgotten.clear()
            memory._low.clear()
            # Before fixtures, which may stand in for streams: no measurement of a test is the first to have them taken.
            KeptWorkspaces().take(torch.get_default_device())
            torch.accelerator.reset_peak_memory_stats()
            if alone:
                for module in (finished_graph, budget, step_recording):
                    patch.setattr(module, "counts_all", lambda device: False)
                patch.setattr(step_peak, "is_accelerator", lambda device: False)
                patch.setattr(allocation_counter, "AllocationWindow", FromItsStart)
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = self._device.launched()
        try:
            with self._device.schedule(LATE, LATE):
                return (yield)
        finally:
            item.user_properties.append((_STARTED_WORK, self._device.launched() > before))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup" and report.skipped and "host_only" in report.keywords:
            self.left_out += 1
        elif report.when == "call" and dict(report.user_properties).get(_STARTED_WORK):
            self.on_device += 1
        elif report.when == "call":
            self.elsewhere += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        asked = self.on_device + self.left_out
        terminalreporter.write_line(
            f"{self.on_device} tests ran on the accelerator, {self.elsewhere} touched no tensor of it, {self.left_out} "
            f"were left out: {self.on_device / max(asked, 1):.0%} of those that touch tensors, or more"
        )
