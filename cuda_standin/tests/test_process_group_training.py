"""Rank 0 of 8 and of 64, alone: DDP, FSDP and parallel layers run their CUDA code, and what they take is counted."""

import contextlib
import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from cuda_standin import process_group

WIDTH, DEPTH = 256, 4
ROWS = 16
LAYER = 8 * WIDTH * WIDTH + 5 * WIDTH + 2 * WIDTH  # parameters of one layer
pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth=DEPTH):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(params=[8, 64], ids="rank 0 of {}".format)
def world(request):
    with process_group.lone_rank(request.param):
        dist.init_process_group("nccl")
        yield request.param


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().cuda()


@pytest.fixture
def batch():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()


@contextlib.contextmanager
def counted():
    """Collectives inside, by name: how many, and the bytes of this rank's part of all."""
    found = {}
    before = process_group.collectives()
    yield found
    after = process_group.collectives()
    for name, (calls, part_bytes) in after.items():
        if calls > before[name].calls:
            found[name] = (calls - before[name].calls, part_bytes - before[name].part_bytes)


def step(model, batch):
    loss = model(batch).square().mean()
    loss.backward()
    assert loss.isfinite()
    return loss


def gradients(model):
    return [p.grad for p in model.parameters()]


def plain_gradients(model, batch):
    model = copy.deepcopy(model)
    step(model, batch)
    return gradients(model)


WAYS = {"plain": {}, "views of buckets": {"gradient_as_bucket_view": True}, "static graph": {"static_graph": True},
        "unused parameters": {"find_unused_parameters": True}}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_data_parallel_gradients_are_the_plain_ones_when_all_ranks_are_alike(way, world, model, batch):
    expected = plain_gradients(model, batch)
    replica = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=2, **WAYS[way])
    for _ in range(3):
        replica.zero_grad()
        with counted() as found:
            step(replica, batch)
        assert all(map(torch.equal, gradients(model), expected))
    # The first step orders the buckets anew. Beside them, which parameters a step used.
    assert found["all_reduce"][1] - DEPTH * LAYER * 4 in (0, 4 * len(expected))
    assert found["all_reduce"][0] > 2


def test_no_sync_sends_nothing_until_the_last(world, model, batch):
    replica = DistributedDataParallel(model)
    for _ in range(2):  # between the first and the second the buckets are ordered anew
        step(replica, batch)
    with replica.no_sync(), counted() as found:
        step(replica, batch)
    assert not found
    with counted() as found:
        step(replica, batch)
    assert found["all_reduce"][1] == DEPTH * LAYER * 4


def shard(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def allocated():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def peak_of(run):
    allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_shards_take_a_share_of_the_memory(world):
    before = allocated()
    with torch.device("cuda"):
        model = shard(Net())
    whole = DEPTH * LAYER * 4
    assert whole / world <= allocated() - before < whole / world + 512 * 6 * DEPTH + 4096
    assert all(p.to_local().numel() == -(-p.shape[0] // world) * p[0].numel() for p in model.parameters())


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept after forward"])
def test_a_sharded_step_gathers_and_reduces_each_layer(reshard, world, model, batch):
    shard(model, reshard_after_forward=reshard)
    step(model, batch)
    with counted() as found:
        step(model, batch)
    gathered = 2 * DEPTH - 1 if reshard else DEPTH  # the last layer's stay until backward reads them
    assert found["reduce_scatter"] == (DEPTH, pytest.approx(DEPTH * LAYER * 4 / world, rel=0.01))
    assert found["all_gather"][0] in (gathered, 2 * DEPTH if reshard else DEPTH)
    assert set(found) == {"all_gather", "reduce_scatter"}


def test_a_step_holds_the_gathered_layers_and_not_the_model(world, model, batch):
    whole = DEPTH * LAYER * 4
    shard(model, reshard_after_forward=True)
    step(model, batch)
    model.zero_grad()
    resident = allocated()
    workspace = peak_of(lambda: batch @ batch.T) - resident  # PyTorch 2.15 takes it anew for each product
    peak = peak_of(lambda: step(model, batch)) - workspace
    # Two gathered layers and the buffer of one gather in forward; gradients of one and its reduction in backward.
    assert 2 * LAYER * 4 < peak - resident < 4.5 * LAYER * 4 + 60 * ROWS * WIDTH * DEPTH
    model.set_reshard_after_forward(False)
    model.zero_grad()
    assert peak_of(lambda: step(model, batch)) > resident + whole


def test_values_of_a_gather_are_this_ranks_shard_again_and_again(world, model):
    own = model.layers[0].up.weight.detach()[: 4 * WIDTH // world].clone()
    shard(model)
    model.layers[0].unshard()
    found = model.layers[0].up.weight
    assert found.shape == (4 * WIDTH, WIDTH) and torch.equal(found, own.repeat(world, 1))


def test_gradients_of_shards_are_averages(world, model, batch):
    shard(model)
    step(model, batch)
    whole = copy.deepcopy(Net().cuda())
    with torch.no_grad():
        for to, p in zip(whole.parameters(), model.parameters(), strict=True):
            to.copy_(p.to_local().repeat(world, *[1] * (p.dim() - 1)))
    step(whole, batch)
    for p, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), expected.grad.chunk(world)[0])


def test_mixed_precision_gathers_half_the_bytes(world, model, batch):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        with counted() as found:
            step(model, batch)
        optimizer.step()
    assert all(p.dtype == torch.float32 and p.to_local().isfinite().all() for p in model.parameters())
    assert found["all_gather"][1] / found["all_gather"][0] == pytest.approx(LAYER * 2 / world, rel=0.01)
    assert found["reduce_scatter"][1] / DEPTH == pytest.approx(LAYER * 4 / world, rel=0.01)


def test_replicas_of_shards_reduce_twice(world, model, batch):
    mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    shard(model, mesh=mesh)
    with counted() as found:
        step(model, batch)
    assert found["reduce_scatter"][0] == found["all_reduce"][0] == DEPTH
    assert (
        found["all_reduce"][1]
        == found["reduce_scatter"][1]
        == pytest.approx(DEPTH * LAYER * 4 / (world // 2), rel=0.01)
    )


def test_the_older_sharding_runs(world, model, batch):
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=0, use_orig_params=True
    )
    with counted() as found:
        step(sharded, batch)
    assert found["all_gather"][0] >= DEPTH and found["reduce_scatter"][0] == DEPTH
    assert found["reduce_scatter"][1] == pytest.approx(DEPTH * LAYER * 4 / world, rel=0.01)


def test_tensor_parallel_layers_hold_their_columns_and_rows(world, batch):
    mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = Net().cuda()
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert model.layers[0].up.weight.to_local().shape == (4 * WIDTH // (world // 2), WIDTH)
    with counted() as found:
        step(model, batch)
    assert found["all_reduce"] == (2 * DEPTH - 0, 2 * DEPTH * ROWS * WIDTH * 4)


def test_sequence_parallel_layers_hold_their_positions(world):
    size = 8
    mesh = init_device_mesh("cuda", (world // size, size), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = Net().cuda()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    shapes = []
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], plan)
        layer.norm.register_forward_hook(lambda module, inputs, output: shapes.append(output.to_local().shape))
    with counted() as found:
        loss = model(torch.randn(2, 64 // size, WIDTH, device="cuda")).square().mean()
        loss.backward()
    assert loss.isfinite() and shapes == [(2, 64 // size, WIDTH)] * DEPTH
    assert found["all_gather"][0] >= DEPTH and found["reduce_scatter"][0] >= DEPTH


@pytest.mark.parametrize("number", [0, 1, 7], ids=["first", "middle", "last"])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B], ids=["GPipe", "1F1B"])
def test_a_stage_of_a_pipeline_runs_its_schedule(schedule, number):
    with process_group.lone_rank(8, number):
        dist.init_process_group("nccl")
        torch.manual_seed(0)
        layer = Layer().cuda()
        given = torch.empty(2, WIDTH, device="cuda", requires_grad=number > 0)
        made = torch.empty(2, WIDTH, device="cuda", requires_grad=True)
        stage = PipelineStage(layer, number, 8, torch.device("cuda"), input_args=(given,), output_args=(made,))
        run = schedule(stage, n_microbatches=8, loss_fn=lambda out, target: (out - target).square().mean())
        batch, losses = torch.randn(16, WIDTH, device="cuda"), []
        with counted() as found:
            if number == 0:
                run.step(batch)
            elif number == 7:
                run.step(target=batch, losses=losses)
            else:
                run.step()
        sides = 1 if number in (0, 7) else 2
        for way in ("send", "recv"):
            calls, sent_bytes = found[way]
            # Whether shapes are known: stages of PyTorch 2.14 ask both neighbours, those of 2.15 pass it on one way.
            votes = calls - 8 * sides
            assert 0 <= votes <= sides
            assert sent_bytes == 8 * sides * made.nbytes + 4 * votes
        assert all(p.grad.isfinite().all() for p in layer.parameters())
        assert len(losses) == (8 if number == 7 else 0)
