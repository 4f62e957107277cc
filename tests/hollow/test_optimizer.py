"""An optimizer's bytes, counted by running it on parameters that have no memory."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.hollow.mode import HollowMode
from lowtide.hollow.optimizer import hollow_optimizer_bytes
from lowtide.step.optimizer_state import optimizer_bytes

SIDE, COUNT = 1024, 4
SIZE = 2 * SIDE * SIDE  # of one parameter


def counted(kind, kernels="cpu", **settings):
    with HollowMode():
        parameters = [nn.Parameter(torch.empty(SIDE, SIDE, dtype=torch.bfloat16)) for _ in range(COUNT)]
        return hollow_optimizer_bytes(kind, settings, parameters, kernels=kernels)


@pytest.mark.parametrize(
    ("kind", "settings", "state", "temporaries"),
    [
        (torch.optim.AdamW, {"foreach": False}, 2 * COUNT, 3),
        (torch.optim.AdamW, {"foreach": True}, 2 * COUNT, COUNT),
        (torch.optim.AdamW, {"fused": True}, 2 * COUNT, 0),
        (torch.optim.SGD, {"momentum": 0.9}, COUNT, 0),
    ],
)
def test_state_and_temporaries_are_those_of_the_implementation(kind, settings, state, temporaries):
    state_bytes, step_bytes = counted(kind, **settings)

    assert round(state_bytes / SIZE, 2) == state
    assert round(step_bytes / SIZE, 2) == temporaries


def test_on_cuda_the_default_holds_temporaries_of_all_parameters():
    assert counted(torch.optim.AdamW, "cuda") == counted(torch.optim.AdamW, foreach=True)
    assert counted(torch.optim.AdamW, "cuda", fused=True)[1] < SIZE


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop"])
def test_on_the_cpu_the_state_is_that_of_the_probe(name):
    model, batch = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), torch.randn(4, 256)

    graph = lowtide.trace(model, batch, optimizer=name, device="cpu")

    probed, _ = optimizer_bytes(name, list(model.parameters()))
    assert probed <= graph.resident["optimizer"] <= probed + 64 * 4


def test_adafactor_keeps_rows_and_columns_not_bytes_for_each_element():
    state_bytes, _ = counted(torch.optim.Adafactor)

    assert state_bytes < 0.01 * COUNT * SIZE
