"""Host buffers are in host memory whatever the default device is ("meta" stands for an accelerator)."""

import pytest
import torch
from support.offloads import movable, moving
from support.training_steps import mlp

import lowtide
from lowtide.device import pinning
from lowtide.estimation import calibration
from lowtide.graph.costs import DISK
from lowtide.measurement import op_times
from lowtide.measurement.links import measured_link
from lowtide.measurement.op_times import measure
from lowtide.tape.offload.disk_tier import DiskTier
from lowtide.tape.offload.host_tier import HostTier
from lowtide.tracing.tracer import run_step


@pytest.fixture(autouse=True)
def another_default_device():
    with torch.device("meta"):
        yield


def numbers(count: int = 1000) -> torch.Tensor:
    return torch.arange(count, dtype=torch.uint8, device="cpu")


def test_the_disk_tier_gives_back_what_it_was_given(tmp_path):
    copy = DiskTier(tmp_path).store(numbers().untyped_storage())

    assert torch.equal(copy.fetch(), numbers())


def test_memory_that_is_pinned_is_the_hosts(monkeypatch):
    registered = {}

    class Runtime:
        def cudaHostRegister(self, address, size, flags):
            registered[address] = size
            return 0

        cudaHostUnregister = registered.pop

    monkeypatch.setattr(pinning, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(pinning, "cudart", Runtime)
    tier = HostTier()
    tier.reserve([1000])

    assert [size for address, size in registered.items() if address] == [2**16]


def test_other_accelerators_pin_host_memory_too(monkeypatch):
    asked = []
    monkeypatch.setattr(pinning.torch, "empty", lambda size, **how: asked.append(how))

    pinning.pinned_buffer(8)

    assert asked == [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}]


def test_links_and_ops_are_measured(tmp_path):
    assert measured_link(DISK, "cpu", tmp_path, refresh=True).store_bytes_per_s > 0

    with torch.device("cpu"):
        graph = lowtide.trace(mlp(2, 64), torch.randn(2048, 64))
    assert min(op_ms for op_ms, op in zip(measure(graph).op_ms, graph.ops) if op.makes) > 0


def test_a_step_whose_tensors_move_to_disk_is_the_plain_step(tmp_path):
    with torch.device("cpu"):
        model, batch = mlp(4, 16), torch.randn(8, 16)
    run_step(model, batch, None)[0].backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    graph = lowtide.trace(model, batch)

    with lowtide.apply(model, moving(graph, movable(graph)), offload=lowtide.Offload(scratch_dir=tmp_path)):
        run_step(model, batch, None)[0].backward()

    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), plain))


def test_a_step_is_traced_without_memory_on_tensors_of_the_host():
    class Positions(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.arange(8.0))

    with torch.device("cpu"):
        model, batch = Positions(8, 8), torch.randn(4, 8)
        there = lowtide.trace(model, batch, device="cpu")

    assert lowtide.trace(model, batch, device="cpu").fingerprint == there.fingerprint


def test_a_machine_is_calibrated_on_tensors_of_the_host(monkeypatch):
    made = []
    monkeypatch.setattr(calibration, "_calibrated", lambda *_: made.append(torch.ones(1).device.type))

    calibration.calibrate(seconds=1)

    assert made == ["cpu"]


def test_the_buffer_that_sweeps_the_caches_of_a_cpu_is_in_host_memory():
    clock = op_times._Clock("cpu")
    clock.sweep()

    assert clock._swept.device.type == "cpu" and clock._swept.numel()
