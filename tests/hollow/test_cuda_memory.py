"""What takes memory on a CUDA device, and what does not, in a step that is traced without one."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.hollow import kept_workspaces
from lowtide.hollow.devices import target_of
from lowtide.hollow.mode import HollowMode
from lowtide.hollow.optimizer import hollow_optimizer_bytes

MIB = 1 << 20


def step(model, batch):
    return model(batch).float().square().mean()


def traced(model, batch, device="h100", **options):
    return lowtide.trace(model, batch, step=step, device=device, **options)


def test_each_thread_that_multiplies_keeps_a_workspace():
    batch = torch.randn(8, 64)
    threads = 0 if kept_workspaces.are_given_back() else 2  # from PyTorch 2.15 on nobody keeps one

    assert traced(nn.Linear(64, 64), batch).resident["workspaces"] == threads * 32 * MIB
    assert traced(nn.Linear(64, 64), batch, "a100-80gb").resident["workspaces"] == threads * 8519680
    assert traced(nn.LayerNorm(64), batch).resident["workspaces"] == 0
    assert traced(nn.Linear(64, 64), batch, "cpu").resident.get("workspaces") is None


def test_a_forward_pass_alone_that_multiplies_keeps_one(monkeypatch):
    monkeypatch.setattr(kept_workspaces, "are_given_back", lambda: False)
    graph = traced(nn.Linear(64, 64), torch.randn(8, 64), "cpu")
    target = target_of("h100")

    assert kept_workspaces.kept_workspace_bytes(graph, target) == 64 * MIB
    monkeypatch.setattr(kept_workspaces, "is_product", lambda name: "addmm" in name)  # backward has mm alone
    assert kept_workspaces.kept_workspace_bytes(graph, target) == 32 * MIB


class Scaled(nn.Module):
    """Divides by a number that it makes on the host, or on the device."""

    def __init__(self, where):
        super().__init__()
        self.weight, self.where = nn.Parameter(torch.ones(64)), where

    def forward(self, x):
        number = torch.tensor(4.0, device="cuda") if self.where == "device" else torch.tensor(4.0)
        number = number.to(x.device) if self.where == "moved" else number
        return x * self.weight / torch.sqrt(number * 2)


def bytes_of(graph, name):
    return [graph.storages[s].bytes for op in graph.ops if op.name == name and not op.backward for s in op.makes]


@pytest.mark.parametrize(("where", "size"), [("host", 0), ("device", 512), ("moved", 512)])
def test_a_number_on_the_host_takes_nothing_of_the_device(where, size):
    graph = traced(Scaled(where), torch.randn(8, 64))

    assert bytes_of(graph, "aten.sqrt.default") == [size]


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = x * self.weight
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True)


def test_the_seed_of_efficient_attention_lies_on_the_host():
    graph = traced(Dropping(), torch.randn(2, 4, 64, 32))

    assert bytes_of(graph, "aten._scaled_dot_product_efficient_attention.default")[2:] == [0, 0]


@pytest.mark.parametrize(
    ("kind", "settings", "blocks"),
    [
        (torch.optim.AdamW, {}, 0),
        (torch.optim.AdamW, {"fused": True}, 1),
        (torch.optim.AdamW, {"capturable": True}, 1),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}, 0),
        (torch.optim.RMSprop, {"momentum": 0.9}, 0),
        (torch.optim.ASGD, {"momentum": 0.9}, None),
    ],
)
def test_an_optimizers_numbers_take_a_block_each_where_they_are_on_the_device(kind, settings, blocks):
    with torch.device("cpu"), HollowMode("cuda"):
        own = [nn.Parameter(torch.empty(64, 64)) for _ in range(3)]
        state, _ = hollow_optimizer_bytes(kind, settings, own, kernels="cuda", block_bytes=512)

    states = 1 if kind is torch.optim.ASGD else 2
    numbers = state - 3 * states * 64 * 64 * 4
    assert numbers == 3 * 512 * (3 if blocks is None else blocks)


def test_state_that_exists_on_the_cpu_is_counted_as_the_device_would_hold_it():
    model = nn.Linear(64, 63)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, torch.randn(8, 64)).backward()
    new = traced(model, torch.randn(8, 64), optimizer=optimizer).resident["optimizer"]
    optimizer.step()

    assert traced(model, torch.randn(8, 64), optimizer=optimizer).resident["optimizer"] == new
    assert new == 2 * (16_384 + 512) + 2 * 512  # two states of weight and bias, in blocks, and two numbers of steps


def test_what_cudnn_takes_is_named():
    graph = traced(nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16))

    expected = "workspaces of cuDNN are not known and count as 0: convolution"
    assert (expected in graph.provenance["assumed"]) == torch.backends.cudnn.enabled
    assert "cuDNN" not in traced(nn.Linear(8, 8), torch.randn(2, 8)).provenance["assumed"]


class Cast(nn.Module):
    """Uses one weight twice, so that autocast keeps its cast."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(256, 256, bias=False)

    def forward(self, x):
        return self.inner(self.inner(x))


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_casts_of_an_outer_autocast_region_are_let_go_before_backward(device, monkeypatch):
    def peak():
        with torch.autocast("cpu", torch.bfloat16):
            graph = traced(Cast(), torch.randn(4, 256), device)
        assert any(op.name == "aten._to_copy.default" for op in graph.ops if not op.backward)
        return lowtide.simulate(graph, lowtide.Costs((0.0,) * len(graph.ops)), {}).peak_bytes

    as_loops_do = peak()
    assert not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    monkeypatch.setattr("lowtide.tracing.tracer.outside_autocast", nullcontext)
    assert as_loops_do < peak()


def test_a_region_of_cudas_autocast_around_the_trace_is_followed(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)

    graph = traced(nn.Linear(64, 64), torch.randn(8, 64))

    (product,) = (op for op in graph.ops if op.name == "aten.addmm.default")
    assert graph.storages[product.makes[0]].bytes == 8 * 64 * 2


def test_the_gradient_of_a_layer_norm_lies_row_after_row():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(64)
            self.weight = nn.Parameter(torch.ones(2, 64, 32))

        def forward(self, x):
            return self.norm((x * self.weight).transpose(1, 2))

    graph = traced(Transposed(), torch.randn(2, 64, 32))

    last = [op for op in graph.ops if op.backward and op.name == "aten.mul.Tensor"][-1]
    assert graph.signatures[last.signature]["args"][0]["stride"] == [2048, 1, 64]
