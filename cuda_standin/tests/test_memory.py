"""PyTorch's own caching allocator on memory with a capacity."""

import pytest

import cuda_standin

torch = pytest.importorskip("torch")


def test_blocks_segments_and_peaks_are_those_of_the_allocator(python):
    source = """
import torch, cuda_standin
small = torch.empty(1, device="cuda")
print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved() >> 20)
middle = torch.empty(3 << 18, device="cuda")  # 3 MiB: of a segment of 20
print(torch.cuda.memory_allocated() - 512 >> 20, torch.cuda.memory_reserved() >> 20)
del middle
free, total = torch.cuda.mem_get_info()
print(torch.cuda.max_memory_allocated() - 512 >> 20, cuda_standin.counters().used_bytes[0] >> 20, total - free >> 20)
"""
    assert python(source).splitlines() == ["512 2", "3 22", "3 22 22"]


def test_memory_that_is_not_there_is_pytorchs_own_error(python):
    source = """
import torch, cuda_standin
cuda_standin.set_capacity(100)
held = torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
try: torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error: print(error)
del held
print(torch.empty(90 << 20, dtype=torch.uint8, device="cuda").numel() >> 20)  # what is cached is given back first
"""
    message, after = python(source).splitlines()[0], python(source).splitlines()[-1]
    assert message.startswith(
        "CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 100.00 MiB of which 40.00 MiB "
        "is free. Including non-PyTorch memory, this process has 60.00 MiB memory in use. Of the allocated memory "
        "60.00 MiB is allocated by PyTorch"
    )
    assert after == "90"


def test_expandable_segments_take_pages_as_they_need_them(python):
    source = """
import torch
a = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
print(torch.cuda.memory_reserved() >> 20)
b = torch.empty(30 << 20, dtype=torch.uint8, device="cuda"); del a
c = torch.empty(31 << 20, dtype=torch.uint8, device="cuda")
c.fill_(7)
print(torch.cuda.memory_reserved() >> 20, c.sum().item() == 7 * (31 << 20))
"""
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert python(source, **variables).splitlines() == ["40", "100 True"]


def test_memory_takes_nothing_of_the_machine_until_it_is_written(python):
    source = """
import resource, torch
torch.cuda.init(); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x = [torch.empty(8 << 30, dtype=torch.uint8, device="cuda") for _ in range(9)]
print(torch.cuda.memory_allocated() >> 30, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 50_000)
"""
    assert python(source) == "72 True"


def test_the_host_may_only_copy_to_registered_memory_without_waiting():
    waits = cuda_standin.counters().waits
    x = torch.ones(1000, device="cuda")
    pinned = torch.empty(1000, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert cuda_standin.counters().waits == waits
    x.cpu()
    assert cuda_standin.counters().waits > waits
    assert pinned.is_pinned() and not torch.empty(3).is_pinned()
