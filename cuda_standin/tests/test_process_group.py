"""Rank 3 of 8, alone: PyTorch's own NCCL group on the stand-in's NCCL library, and gloo's place beside it."""

import os

import pytest
import torch
import torch.distributed as dist
from cuda_standin.lone_objects import LoneObjects
from cuda_standin.lone_store import LoneStore
from torch.distributed.device_mesh import init_device_mesh

import cuda_standin
from cuda_standin import process_group

WORLD, RANK = 8, 3
pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch renames collectives; both names are called here


@pytest.fixture(params=["nccl", "cpu:gloo,cuda:nccl", "bound to a device"])
def group(request):
    bound = request.param.startswith("bound")
    with process_group.lone_rank(WORLD, RANK):
        device = {"device_id": torch.device("cuda", 0)} if bound else {}
        dist.init_process_group("nccl" if bound else request.param, **device)
        yield


@pytest.fixture
def lone():
    with process_group.lone_rank(WORLD, RANK):
        dist.init_process_group("cpu:gloo,cuda:nccl")
        yield


def on(*values, dtype=torch.float32, device="cuda"):
    return torch.tensor(values, dtype=dtype, device=device)


def test_it_is_the_rank_that_it_was_made(group):
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, WORLD)
    assert type(dist.group.WORLD._get_backend(torch.device("cuda"))).__name__ == "ProcessGroupNCCL"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_other_rank_holds_what_this_one_holds(device, lone):
    own = on(1, 2, device=device)
    gathered = torch.zeros(WORLD * 2, device=device)
    dist.all_gather_into_tensor(gathered, own)
    assert gathered.tolist() == [1, 2] * WORLD
    parts = [torch.zeros(2, device=device) for _ in range(WORLD)]
    dist.all_gather(parts, own)
    assert [part.tolist() for part in parts] == [[1, 2]] * WORLD
    share = torch.zeros(2, device=device)
    dist.reduce_scatter_tensor(share, torch.arange(16.0, device=device))
    assert share.tolist() == [6 * WORLD, 7 * WORLD]
    for op, expected in (("SUM", [8, 16]), ("MAX", [1, 2]), ("MIN", [1, 2]), ("PRODUCT", [1, 256])):
        reduced = own.clone()
        dist.all_reduce(reduced, op=getattr(dist.ReduceOp, op))
        assert reduced.tolist() == expected
    exchanged = torch.zeros(WORLD, device=device)
    dist.all_to_all_single(exchanged, torch.arange(8.0, device=device))
    assert exchanged.tolist() == [RANK] * WORLD
    objects = [None] * WORLD
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": RANK}] * WORLD
    kept = own.clone()
    dist.broadcast(kept, src=0)
    assert kept.tolist() == [1, 2]
    dist.barrier()


def test_an_average_is_ones_own(group):
    values = on(1, 2)
    dist.all_reduce(values, op=dist.ReduceOp.AVG)
    assert values.tolist() == [1, 2]


def test_a_factor_before_the_sum_is_applied(group):
    values = on(1, 2)
    dist.all_reduce(values, op=dist._make_nccl_premul_sum(0.25))
    assert values.tolist() == [2, 4]


DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=DTYPES)
def test_a_sum_of_any_type_is_what_torch_says(dtype, lone):
    own = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 9
    own = own.clamp(-15, 15).abs().to(dtype) if dtype in (torch.uint8, torch.int8) else own.to(dtype)
    values = own.cuda()
    dist.all_reduce(values)
    assert torch.equal(values.cpu(), own * WORLD)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_is_to_even_and_what_is_too_large_is_infinite(dtype, lone):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    values = every.cuda()
    dist.all_reduce(values, op=dist._make_nccl_premul_sum(0.3125))
    expected = (every.float() * 2.5).to(dtype)  # 0.3125 times 8 ranks; exact in float32, so that one rounding is left
    assert (values.cpu().isnan() == every.isnan()).all()
    assert torch.equal(values.cpu().nan_to_num(0), expected.nan_to_num(0))


def test_counts_that_were_exchanged_fit_what_is_exchanged_by_them(lone):
    sent = torch.tensor([1, 0, 2, 3, 1, 1, 0, 2], device="cuda")  # tokens for each rank's experts
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    assert received.tolist() == [3] * WORLD
    tokens = torch.arange(10.0, device="cuda")
    arrived = torch.full((int(received.sum()),), -1.0, device="cuda")
    dist.all_to_all_single(arrived, tokens, received.tolist(), sent.tolist())
    assert arrived.tolist() == [3, 4, 5] * WORLD


def test_in_a_ring_comes_what_was_sent_and_else_zeros(group):
    sent, arrived = on(1, 2), on(9, 9)
    following, previous = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, arrived, previous)]
    ):
        work.wait()
    assert arrived.tolist() == [1, 2]
    dist.recv(arrived, src=previous)
    assert arrived.tolist() == [0, 0]


def test_whole_numbers_that_come_from_nobody_are_ones(group):
    vote = torch.zeros(2, dtype=torch.int32, device="cuda")
    dist.recv(vote, src=0)
    assert vote.tolist() == [1, 1]


def test_a_whole_number_comes_back_as_it_was_sent(group):
    vote, answer = on(0, dtype=torch.int32), on(7, dtype=torch.int32)
    dist.send(vote, dst=5)
    dist.recv(answer, src=5)
    assert answer.tolist() == [0]


def test_objects_are_found_that_another_ranks_run_has_sent(tmp_path):
    missing: list = []
    for rank in (2, 3):
        objects = LoneObjects(rank, tmp_path, missing=lambda source, count: missing.append((source, count)))
        installed = process_group.install(WORLD, rank, objects)
        dist.init_process_group("nccl")
        if rank == 2:
            dist.send_object_list([{"shape": (4, 8)}], dst=3)
        else:
            arrived = [None]
            dist.recv_object_list(arrived, src=2)
            assert arrived == [{"shape": (4, 8)}]
            with pytest.raises(RuntimeError, match="recv_object_list from rank 2"):
                dist.recv_object_list(arrived, src=2)
        installed.remove()
    assert missing == [(2, 2)]


def test_objects_of_a_rank_that_does_not_exist(lone):
    objects = ["kept", 1]
    dist.broadcast_object_list(objects, src=0, device=torch.device("cuda"))
    assert objects == ["kept", 1]
    dist.broadcast_object_list(objects, src=RANK, device=torch.device("cuda"))
    assert objects == ["kept", 1]
    with pytest.raises(RuntimeError, match="recv_object_list from rank 0: that rank does not exist"):
        dist.recv_object_list(objects, src=0)


def test_a_future_holds_the_tensors(group):
    values = on(1, 2)
    work = dist.all_reduce(values, async_op=True)
    assert [t.data_ptr() for t in work.get_future().value()] == [values.data_ptr()]
    work.wait()
    assert work.is_completed() and values.tolist() == [8, 16]


def test_a_result_is_there_after_wait_and_not_before(lone):
    values = on(1, 2)
    with cuda_standin.run_late("side"):
        work = dist.all_reduce(values, async_op=True)
        assert values.tolist() == [1, 2]
        work.wait()
        assert values.tolist() == [8, 16]


def test_a_tensor_that_is_let_go_lives_until_its_collective_was_waited_for(lone):
    """PyTorch's own group keeps it; the caching allocator must not hand its memory to somebody else."""
    dist.all_reduce(on(1.0))  # makes the communicator
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    work = dist.all_reduce(torch.ones(1 << 20, device="cuda"), async_op=True)
    assert torch.cuda.memory_allocated() - before == 4 << 20
    work.wait()
    del work
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_groups_meshes_and_splits_have_their_own_size(group):
    part = dist.new_group([1, RANK, 6])
    values = on(1)
    dist.all_reduce(values, group=part)
    assert values.tolist() == [3] and dist.get_rank(part) == 1
    assert dist.new_group([0, 1]) == dist.GroupMember.NON_GROUP_MEMBER
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("outer", "inner"))
    for name, size in (("outer", 2), ("inner", 4)):
        values = on(1)
        dist.all_reduce(values, group=mesh[name].get_group())
        assert values.tolist() == [size]
    assert (mesh.get_local_rank("outer"), mesh.get_local_rank("inner")) == divmod(RANK, 4)


def test_collectives_are_counted(lone):
    before = process_group.collectives()
    dist.all_reduce(torch.ones(10, device="cuda"))
    dist.all_gather_into_tensor(torch.ones(80, device="cuda"), torch.ones(10, device="cuda"))
    after = process_group.collectives()
    counted = {name: (after[name].calls - before[name].calls, after[name].part_bytes - before[name].part_bytes)
               for name in after if after[name] != before[name]}  # fmt: skip
    assert counted == {"all_reduce": (1, 40), "all_gather": (1, 40)}


def test_a_captured_collective_runs_as_often_as_its_graph(lone):
    values = on(1.0)
    dist.all_reduce(values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(values)
    assert values.item() == 8
    graph.replay()
    graph.replay()
    assert values.item() == 8**3


def test_a_key_that_another_rank_would_write_is_refused_by_name():
    store = LoneStore(WORLD)
    store.set("mine", "1")
    assert store.get("mine") == b"1" and store.add("count", 2) == 2
    with pytest.raises(RuntimeError, match="'theirs'.*another of the 8 ranks would have written it"):
        store.get("theirs")
    with pytest.raises(RuntimeError, match="'theirs'"):
        store.wait(["theirs"])


def test_a_rank_beyond_the_last_is_refused():
    with pytest.raises(ValueError, match="rank=8 of world_size=8: ranks go from 0"):
        process_group.install(8, 8)


def test_a_second_group_is_refused(lone):
    with pytest.raises(RuntimeError, match="a process group exists already"):
        process_group.install(8, 0)


def test_removing_it_puts_back_what_was_there():
    changed = {"TCPStore": dist, "ProcessGroupGloo": dist.distributed_c10d, "split_group": dist.ProcessGroup}
    kept = {name: getattr(owner, name) for name, owner in changed.items()}
    environment = dict(os.environ)
    process_group.install(WORLD, RANK).remove()
    assert {name: getattr(owner, name) for name, owner in changed.items()} == kept
    assert dict(os.environ) == environment


def test_no_thread_of_nccl_outlives_the_interpreter(python):
    source = """
import atexit, glob, torch
atexit.register(lambda: print([open(thread).read().strip() for thread in glob.glob("/proc/self/task/*/comm")]))
from cuda_standin import process_group
process_group.install(world_size=2)
torch.distributed.init_process_group("nccl")
torch.distributed.all_reduce(torch.ones(4, device="cuda"))
"""
    assert "watchd" not in python(source)
