"""Two real processes, each with a device of its own on the stand-in: values travel, and who fails is named."""

import subprocess
import sys

import pytest

START = """
import sys
import torch
import torch.distributed as dist
import cuda_standin
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
def on(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device="cuda")
"""
END = """
dist.destroy_process_group()
"""


@pytest.fixture
def both(tmp_path):
    """Runs the source in two processes; what each printed, or the errors of those that are to fail."""

    def run(source, fails=(), end=END):
        started = [
            subprocess.Popen(
                [sys.executable, "-c", START + source + end, str(rank), str(tmp_path)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        told = [process.communicate(timeout=120) for process in started]
        for rank, process in enumerate(started):
            assert (process.returncode != 0) == (rank in fails), "\n".join(told[rank])
        return [told[rank][rank in fails] for rank in range(2)]

    return run


def test_values_travel(both):
    first, second = both(
        """
values = on(1, 2) * (rank + 1)
dist.all_reduce(values)
average = on(1, 2) * (rank + 1)
dist.all_reduce(average, op=dist.ReduceOp.AVG)
gathered = torch.zeros(2, 2, device="cuda")
dist.all_gather_into_tensor(gathered, on(rank, 10 + rank))
share = torch.zeros(2, device="cuda")
dist.reduce_scatter_tensor(share, on(1, 2, 3, 4) + rank)
sent = on(rank)
dist.broadcast(sent, src=1)
exchanged = torch.zeros(3, device="cuda")
sizes = [[1, 2], [2, 1]][rank]
dist.all_to_all_single(exchanged[: [3, 3][rank]], on(1, 2, 3) * (rank + 1), sizes, sizes)
if rank == 0:
    dist.send(on(7), dst=1)
else:
    dist.recv(sent, src=0)
highest = on(rank, -rank, dtype=torch.bfloat16)
dist.all_reduce(highest, op=dist.ReduceOp.MAX)
part = dist.new_group([1])
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
dist.barrier()
tensors = [values, average, gathered, share, exchanged, sent, highest]
print(*[tensor.tolist() for tensor in tensors], objects)
"""
    )
    common = "[3.0, 6.0] [1.5, 3.0] [[0.0, 10.0], [1.0, 11.0]]"
    end = "[1.0, 0.0] [{'rank': 0}, {'rank': 1}]"
    assert first == f"{common} [3.0, 5.0] [1.0, 2.0, 4.0] [1.0] {end}\n"
    assert second == f"{common} [7.0, 9.0] [2.0, 3.0, 6.0] [7.0] {end}\n"


def test_a_result_is_there_after_wait_and_not_before(both):
    told = both(
        """
values = on(rank + 1)
dist.all_reduce(on(0))
with cuda_standin.run_late("side"):
    work = dist.all_reduce(values, async_op=True)
    before = values.item()
    work.wait()
    print(before, values.item())
"""
    )
    assert told == ["1.0 3.0\n", "2.0 3.0\n"]


def test_a_group_that_is_split_joins_those_of_one_color(both):
    told = both(
        """
mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2, 1), mesh_dim_names=("outer", "inner"))
values, own = on(rank + 1), on(rank + 1)
dist.all_reduce(values, group=mesh["outer"].get_group())
dist.all_reduce(own, group=mesh["inner"].get_group())
print(values.item(), own.item())
"""
    )
    assert told == ["3.0 1.0\n", "3.0 2.0\n"]


def test_ranks_that_do_not_do_the_same_are_told(both):
    errors = both(
        """
dist.all_reduce(on(0))
dist.all_reduce(on(1, 2)) if rank == 0 else dist.all_reduce(on(1, 2, 3))
""",
        fails=(0, 1),
    )
    assert "rank 1 did all_reduce of 12 bytes while rank 0 waited for its part of all_reduce of 8 bytes" in errors[0]
    assert "rank 0 did all_reduce of 8 bytes while rank 1 waited for its part of all_reduce of 12 bytes" in errors[1]


def test_a_rank_that_ended_is_named(both):
    errors = both(
        """
import os
dist.all_reduce(on(0))
if rank == 1:
    os._exit(0)
dist.all_reduce(on(1))
""",
        fails=(0,),
    )
    assert "rank 1 ended" in errors[0]


def test_a_rank_that_never_comes_is_named(both):
    errors = both(
        """
import ctypes
ctypes.CDLL("libnccl.so.2").standin_nccl_patience(ctypes.c_double(1))
if rank == 0:
    dist.all_reduce(on(0))
""",
        fails=(0,),
        end="",
    )
    assert "rank 1 did not come within 1 s" in errors[0]
