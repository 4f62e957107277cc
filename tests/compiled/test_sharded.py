"""Compiled layers that FSDP2 shards: plans inside them, no gather more, the bits of PyTorch's own."""

from types import SimpleNamespace

import pytest
import torch
from support import compiled_sharded
from support.ranks import on_every_rank
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import lowtide
from lowtide.compiled.captured_layer import _check_sends_nothing


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shard first", "compile first"])
def test_layers_of_two_ranks_are_planned_inside_and_gather_no_more(order):
    for told in on_every_rank(compiled_sharded.training, order):
        assert told["found"] == told["expected"], "losses, gradients and collectives"
        assert set(told["plan"].values()) != {"plain"} and told["reason"] == ""
        assert told["measured"] <= told["predicted"] <= told["budget"]


def test_a_layer_that_sends_between_ranks_is_refused():
    mesh = SimpleNamespace(ndim=1)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size([2]), (1,), torch.float32))
    part = DTensor(torch.ones(2), spec, requires_grad=False)
    with pytest.raises(lowtide.UnsupportedModelError, match="takes DTensors, as under tensor parallelism"):
        _check_sends_nothing([torch.ones(2), part])
    _check_sends_nothing([torch.ones(2)])
