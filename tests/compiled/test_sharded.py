"""Compiled layers that FSDP2 shards: plans inside them, no gather more, the bits of PyTorch's own."""

import pytest
import torch
from support import compiled_sharded
from support.ranks import on_every_rank
from torch import nn

import lowtide
from lowtide.compiled.captured_layer import _check_no_wrappers


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shard first", "compile first"])
def test_layers_of_two_ranks_are_planned_inside_and_gather_no_more(order):
    for told in on_every_rank(compiled_sharded.training, order):
        assert told["found"] == told["expected"], "losses, gradients and collectives"
        assert set(told["plan"].values()) != {"plain"} and told["reason"] == ""
        assert told["measured"] <= told["predicted"] <= told["budget"]


def test_a_layer_that_sends_between_ranks_is_refused():
    class Wrapper(torch.Tensor):
        def __tensor_flatten__(self):
            return [], None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise NotImplementedError

    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (2,))
    with pytest.raises(lowtide.UnsupportedModelError, match="takes Wrapper, as under tensor parallelism"):
        _check_no_wrappers([nn.Parameter(torch.ones(2)), wrapper])
