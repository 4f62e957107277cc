"""Compiled layers that FSDP2 shards: plans inside them, no gather more, the bits of PyTorch's own."""

import pytest
from support import compiled_sharded
from support.ranks import on_every_rank


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shard first", "compile first"])
def test_layers_of_two_ranks_are_planned_inside_and_gather_no_more(order):
    for told in on_every_rank(compiled_sharded.training, order):
        assert told["found"] == told["expected"], "losses, gradients and collectives"
        assert set(told["plan"].values()) != {"plain"} and told["reason"] == ""
        assert told["measured"] <= told["predicted"] <= told["budget"]
