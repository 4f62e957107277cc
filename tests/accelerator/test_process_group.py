"""Data parallel and sharded training over the accelerator, in two processes."""

import torch
from support.ranks import on_every_rank

from accelerator import ranks


def test_gradients_of_two_processes_are_those_of_one(device):
    for told in on_every_rank(ranks.gradients):
        expected = list(map(torch.tensor, told["one process"]))
        for way in ("data parallel", "sharded"):
            torch.testing.assert_close(list(map(torch.tensor, told[way])), expected)


def test_a_result_is_there_after_wait_and_not_before(device):
    assert on_every_rank(ranks.a_sum, True) == [[3.0, 3.0]] * 2
    assert on_every_rank(ranks.a_sum, False) == [[1.0, 1.0], [2.0, 2.0]]


def test_a_plan_knows_what_fsdp_gathers_in_the_devices_thread(device):
    for told in on_every_rank(ranks.planned_gradients):
        assert told["planned"] == told["plain"] and told["unchanged"] and told["recomputed"]
        assert told["gathered in backward"] == 3  # each layer; the root holds no parameter
