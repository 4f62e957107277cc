"""Data parallel and sharded training over the accelerator, in two processes."""

import pytest
import torch
from support.ranks import on_every_rank

from accelerator import ranks


@pytest.fixture(scope="module")
def told(accelerator):
    """By each of two processes, which load the accelerator once."""
    return on_every_rank(ranks.everything)


def test_gradients_of_two_processes_are_those_of_one(told):
    for found in told:
        expected = list(map(torch.tensor, found["gradients"]["one process"]))
        for way in ("data parallel", "sharded"):
            torch.testing.assert_close(list(map(torch.tensor, found["gradients"][way])), expected)


def test_a_result_is_there_after_wait_and_not_before(told):
    assert [found["sum"] for found in told] == [[3.0, 3.0]] * 2
    assert [found["sum without waiting"] for found in told] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_plan_knows_what_fsdp_gathers_in_the_devices_thread(told):
    for found in (found["planned gradients"] for found in told):
        assert found["planned"] == found["plain"] and found["unchanged"] and found["recomputed"]
        assert found["gathered in backward"] == 3  # each layer; the root holds no parameter
