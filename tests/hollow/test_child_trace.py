"""Tracing without memory in a process of its own: what kills it does not kill the caller."""

import ctypes

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import LowtideError
from lowtide.tracing.child_trace import trace_in_child


def test_the_graph_is_that_of_a_trace_in_this_process():
    model, batch = nn.Linear(64, 64), torch.randn(4, 64)

    assert trace_in_child(model, batch, device="cpu") == lowtide.trace(model, batch, device="cpu")


def test_an_error_of_the_step_comes_back():
    with pytest.raises(lowtide.StepError, match="the step failed on this batch"):
        trace_in_child(nn.Linear(64, 64), torch.randn(4, 63), device="cpu")


def test_a_write_past_hollow_memory_is_an_error_here_and_nothing_worse():
    def step(model, batch):
        loss = model(batch).square().mean()
        ctypes.memset(8, 1, 1)
        return loss

    with pytest.raises(LowtideError, match="ended with signal 11: a kernel of another library"):
        trace_in_child(nn.Linear(64, 64), torch.randn(4, 64), device="cpu", step=step)
