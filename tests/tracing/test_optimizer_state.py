"""What optimizers keep, foreseen before their first step and counted after it."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training_steps import mlp
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import lowtide
from lowtide.device.block_size import in_blocks
from lowtide.measurement.allocator import measuring
from lowtide.step.optimizer_group import OptimizerGroup
from lowtide.step.optimizer_state import UnknownStateError, existing_state_bytes, optimizer_bytes


class Halves(torch.Tensor):
    """A wrapper that is not PyTorch's: a float32 tensor as float16, beside a scale for each row."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            return args[0].codes.float() * args[0].scale
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1])
            return args[0]
        raise NotImplementedError(func)


class HalvedMomentum(torch.optim.Optimizer):
    """Its state is of wrappers, whose kind is an attribute and no setting of a group."""

    def __init__(self, parameters, kind=Halves):
        super().__init__(parameters, {})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                rows = torch.ones(len(p), *[1] * (p.dim() - 1), device=p.device)
                state["momentum"] = self.kind(torch.zeros_like(p, dtype=torch.float16), rows)
            momentum = torch.ops.aten._to_copy.default(state["momentum"]) + p.grad
            state["momentum"].copy_(momentum)
            p.sub_(momentum, alpha=0.1)


class Projector:
    def __init__(self, gradient, rank):
        whole, _ = torch.linalg.qr(gradient.T)
        self.basis = whole[:, :rank]  # a view: all of it stays


class LowRank(torch.optim.Optimizer):
    """As GaLore: the rank is a setting of one group alone, and the state has an object that holds tensors."""

    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad
                if "rank" in group:
                    projector = self.state[p].setdefault("projector", Projector(gradient, group["rank"]))
                    gradient = gradient @ projector.basis
                self.state[p].setdefault("momentum", torch.zeros_like(gradient)).add_(gradient)


def low_rank(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return LowRank([
        {"params": [p for p in parameters if p.dim() == 1]},
        {"params": [p for p in parameters if p.dim() == 2], "rank": 4},
    ])  # fmt: skip


class OnRealTensors(torch.optim.Optimizer):
    def step(self, closure=None):
        raise RuntimeError("only real gradients")


def named(module: str, name: str, **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: getattr(importlib.import_module(module), name)(model.parameters(), **settings)


def grouped(module: str, name: str, **of_group: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        split = {True: [], False: []}
        for p in model.parameters():
            split[p.dim() == 2].append(p)
        groups = [{"params": split[False]}, {"params": split[True], **of_group}]
        return getattr(importlib.import_module(module), name)(groups)

    return make


APOLLO = {"rank": 4, "proj": "random", "scale_type": "channel", "scale": 1, "update_proj_gap": 9, "proj_type": "std"}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "a wrapper subclass": lambda model: HalvedMomentum(model.parameters()),
    "settings of one group": low_rank,
    "AdamW": named("torch.optim", "AdamW"),
    "AdamW, fused": named("torch.optim", "AdamW", fused=True),
    "AdamW, tensor lr": named("torch.optim", "AdamW", lr=torch.tensor(1e-3)),
    "Adagrad": named("torch.optim", "Adagrad"),
    "Adafactor": named("torch.optim", "Adafactor"),
    "Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]),
    "Adafactor of transformers": named("transformers", "Adafactor"),
    "bitsandbytes AdamW8bit": named("bitsandbytes.optim", "AdamW8bit"),
    "torchao AdamW8bit": named("torchao.optim", "AdamW8bit"),
    "torchao AdamW4bit": named("torchao.optim", "AdamW4bit"),
    "GaLore": grouped("galore_torch", "GaLoreAdamW", rank=4, update_proj_gap=9, scale=1.0, proj_type="std"),
    "APOLLO": grouped("apollo_torch", "APOLLOAdamW", **APOLLO),
}


def model_and_gradients() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 96))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_state_is_foreseen_as_it_is_after_one_step_and_as_the_allocator_counts(name):
    model = model_and_gradients()
    try:
        optimizer = OPTIMIZERS[name](model)
    except ImportError as error:
        pytest.skip(f"{error}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = torch.get_default_device()
    held = sum(
        in_blocks(t.nbytes, device.type)
        for s in optimizer.state.values()
        for t in s.values()
        if isinstance(t, torch.Tensor) and t.device == parameters[0].device and (t.dim() or device.type != "cpu")
    )
    before = [p.clone() for p in parameters]

    foreseen, _ = optimizer_bytes(optimizer, parameters)
    assert all(map(torch.equal, parameters, before))  # nothing of the rehearsal is left
    with measuring(device) as counted:
        optimizer.step()
    kept, _ = optimizer_bytes(optimizer, parameters)

    assert foreseen == pytest.approx(kept, rel=0.05)
    assert kept == existing_state_bytes(optimizer)
    if name.startswith(("torchao", "bitsandbytes")):  # these keep tables of their own, once for all parameters
        assert held + counted.left == pytest.approx(kept, rel=0.05)
    else:
        assert foreseen == kept
        assert 0 <= held + counted.left - kept <= 3 * 4 * len(parameters)  # numbers, four bytes each


def test_a_rehearsal_calls_no_hook_of_the_users_and_no_step_that_a_scheduler_has_put_there():
    model = model_and_gradients()
    optimizer, called = torch.optim.AdamW(model.parameters()), []
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces ``step`` of the optimizer
    optimizer.register_step_pre_hook(lambda *_: called.append("own"))
    everywhere = register_optimizer_step_post_hook(lambda *_: called.append("global"))

    state, _ = optimizer_bytes(optimizer, list(model.parameters()))
    everywhere.remove()

    assert state == 2 * sum(p.nbytes for p in model.parameters())
    assert called == [] and not optimizer.state
    optimizer.step()
    assert called == ["own"]


def test_parameters_that_thaw_later_are_foreseen_beside_the_state_of_the_others():
    model = model_and_gradients()
    optimizer, parameters = torch.optim.AdamW(model.parameters()), list(model.parameters())
    for p in model[0].parameters():
        p.grad = None
    trained = [p for p in parameters if p.grad is not None]
    first = optimizer_bytes(optimizer, trained)[0]
    optimizer.step()

    assert first == optimizer_bytes(optimizer, trained)[0] == 2 * sum(p.nbytes for p in trained)
    assert optimizer_bytes(optimizer, parameters)[0] == 2 * sum(p.nbytes for p in parameters)


def test_an_optimizer_that_cannot_be_rehearsed_is_named_and_training_goes_on():
    model, batch = mlp(4, 32), torch.randn(16, 32)
    optimizer = OnRealTensors(model.parameters(), {})
    named = (
        "what OnRealTensors keeps is not known before its first step, which could not be rehearsed (RuntimeError: only "
        "real gradients): nothing is counted for it until it is there."
    )

    with pytest.raises(UnknownStateError) as error:
        optimizer_bytes(optimizer, list(model.parameters()))
    assert str(error.value) == named
    with lowtide.fit(model, batch, budget="50%", optimizer=optimizer) as fit:
        model(batch).square().mean().backward()
        assert named in fit.status().reasons and fit.status().in_force
        assert fit.graph.resident["optimizer"] == 0


def test_the_history_of_lbfgs_is_counted_whole_before_it_is_there():
    model = model_and_gradients()
    optimizer, size = torch.optim.LBFGS(model.parameters(), history_size=3), sum(p.nbytes for p in model.parameters())
    foreseen, _ = optimizer_bytes(optimizer, list(model.parameters()))
    data = torch.randn(32, 64)

    def closure():
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)

    assert foreseen == (2 * 3 + 2) * size == pytest.approx(existing_state_bytes(optimizer), rel=0.01)


@pytest.mark.parametrize("surprise", ["more", "less"])
def test_a_plan_is_corrected_once_the_state_is_there(surprise):
    """An optimizer whose first real step makes other state than its rehearsal."""

    class Surprising(torch.optim.Optimizer):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                is_rehearsed = p.untyped_storage().data_ptr() not in real
                copies = 2 if is_rehearsed == (surprise == "less") else 1
                self.state[p].setdefault("kept", torch.zeros(copies, *p.shape))

    model, batch = mlp(8, 64), torch.randn(256, 64)
    real = {p.untyped_storage().data_ptr() for p in model.parameters()}
    optimizer, size = Surprising(model.parameters(), {}), sum(p.nbytes for p in model.parameters())
    foreseen = (2 if surprise == "less" else 1) * size
    budget = lowtide.trace(model, batch).resident_bytes + foreseen + 8 * batch.nbytes

    with lowtide.fit(model, budget=budget, optimizer=optimizer) as fit:
        for _ in range(4):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            fit.wait()
            if not optimizer.state:
                assert fit.graph.resident["optimizer"] == foreseen
                overhead = fit.plan.predicted_overhead
            optimizer.step()

        assert fit.graph.resident["optimizer"] == existing_state_bytes(optimizer) == 3 * size - foreseen
        assert fit.plan.predicted_peak_bytes <= budget and fit.status().in_force
        assert fit.plan.predicted_overhead > overhead if surprise == "more" else fit.plan.predicted_overhead <= overhead


class OwnLists(torch.optim.Optimizer):
    """Momentum that lies beside ``state``, as hand-written optimizers keep it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.own = [p for group in self.param_groups for p in group["params"]]
        self.momenta = []

    @torch.no_grad()
    def step(self):
        self.momenta = self.momenta or [torch.zeros_like(p) for p in self.own]
        for p, momentum in zip(self.own, self.momenta, strict=True):
            p -= 0.1 * momentum.mul_(0.9).add_(p.grad)


def test_state_beside_state_counts_and_no_parameter_does():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = OwnLists(model.parameters())
    assert existing_state_bytes(optimizer) == 0
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    assert existing_state_bytes(optimizer) == existing_state_bytes(OptimizerGroup([optimizer]))
    assert existing_state_bytes(optimizer) == sum(in_blocks(p.nbytes, p.device.type) for p in model.parameters())


def test_state_is_counted_beside_gradients_that_are_sparse():
    table = nn.EmbeddingBag(200, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.arange(6), torch.tensor([0, 3])).sum().backward()
    optimizer.step()

    assert table.weight.grad.is_sparse
    block = in_blocks(table.weight.nbytes, table.weight.device.type)
    assert existing_state_bytes(optimizer) == 2 * block
