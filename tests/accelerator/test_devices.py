"""Two devices, and a thread of its own for the backward of each."""

import threading
import weakref

import pytest
import torch

from accelerator.schedules import LATE


def test_memory_streams_and_numbers_of_two_devices_are_apart(device):
    there = torch.ones(1000, device="standin:1")
    assert (torch.accelerator.memory_allocated(0), torch.accelerator.memory_allocated(1)) == (0, 4096)
    with torch.accelerator.device_index(1):
        assert torch.ones(1, device="standin").device == there.device
        torch.rand(4, device="standin")
    assert [g.get_offset() for g in device.module.default_generators] == [0, 4]


def test_a_copy_between_devices(device):
    with device.schedule(LATE, LATE):
        there = torch.ones(3, device="standin:1") + 1
        assert (there.to("standin:0") + 1).cpu().equal(torch.full((3,), 3.0))


def test_tensors_of_two_devices_do_not_mix(device):
    for other in ("standin:1", "cpu"):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.ones(3, device="standin:0") + torch.ones(3, device=other)
    assert (torch.ones(3, device="standin:0") + torch.tensor(1)).sum() == 6


def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(RuntimeError, match="no device 2"):
        torch.empty(1, device="standin:2")


def test_backward_runs_in_a_thread_of_the_device(device):
    threads = {}

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            threads[gradient.device.index] = threading.get_ident()
            return gradient

    for index in range(2):
        Seen.apply(torch.ones(3, device=f"standin:{index}", requires_grad=True)).sum().backward()

    assert len({threading.get_ident(), *threads.values()}) == 3


def test_backward_runs_on_the_stream_of_its_forward(device):
    side = torch.Stream("standin")
    streams = []
    x = torch.ones(3, device="standin", requires_grad=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 2
    y.register_hook(lambda gradient: streams.append(torch.accelerator.current_stream()))
    with side:
        total = y.sum()
    total.backward()
    assert streams == [side]


def test_the_threads_of_backward_can_be_waited_for(device):
    """Without it they hold Python objects for a moment more, and a process that ends then is aborted."""

    class Unchanged:
        def __call__(self, tensor):
            return tensor

    x = torch.ones(3, device="standin", requires_grad=True)
    left = 0
    for _ in range(100):
        total = (x * 2).sum()
        pack, unpack = Unchanged(), Unchanged()
        alive = weakref.WeakSet([pack, unpack])
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            total.backward()
        del pack, unpack
        device.finish_backward_threads()
        left += len(alive)
    assert left == 0
