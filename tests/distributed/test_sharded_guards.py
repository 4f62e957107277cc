"""What would go wrong with sharded models: each guard, and what happens without it. One rank, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import sharded_training
from support.ranks import start_group
from support.training_steps import drop_everything
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

import lowtide
from lowtide.errors import ReplayError, StepError, UnsupportedModelError
from lowtide.plan import RECOMPUTE, SAVE, Plan
from lowtide.recording import recorder
from lowtide.recording import sharding as recording
from lowtide.recording.compiled_regions import MADE_HERE
from lowtide.step import operators, subclasses, whole_modules
from lowtide.step.sharding import observer, units
from lowtide.tape import tape
from lowtide.training import rehearsal

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.randint(
    0, sharded_training.VOCABULARY, (4, 16), generator=torch.Generator(torch.get_default_device()).manual_seed(1)
)


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    start_group(0, 1, dist.HashStore())
    yield
    dist.destroy_process_group()


def net(shard: Callable[..., None] = sharded_training.each_layer, **options: Any) -> sharded_training.Net:
    torch.manual_seed(0)
    model = sharded_training.Net(depth=2)
    shard(model, **options)
    return model


def harshest(model: nn.Module, batch: Any = IDS) -> Plan:
    plan = drop_everything(lowtide.trace(model, batch))
    assert plan.counts[RECOMPUTE]
    return plan


def step(model: nn.Module, plan: Plan | None = None, between: Callable[[], Any] = lambda: None) -> str:
    """One step from the same random state; the bits of its loss and gradients."""
    torch.manual_seed(3)
    with lowtide.apply(model, plan) if plan is not None else contextlib.nullcontext():
        loss = model(IDS)
    between()
    loss.backward()
    found = sharded_training.digest([loss, *(p.grad for p in model.parameters())])
    model.zero_grad()
    return found


def compiled_layers(model: nn.Module) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    sharded_training.each_layer(model)


# -- compiled layers --------------------------------------------------------------------------------------------------


def test_what_compiled_layers_of_a_sharded_model_store_is_saved_whole(monkeypatch):
    model, plain = net(compiled_layers), step(net(compiled_layers))
    plan = harshest(model)  # of what runs between the layers
    made = [s for s in lowtide.trace(model, IDS).storages if s.fixed == MADE_HERE]

    assert step(model, plan) == plain
    assert made and not any(plan.action_of().get(s.id, SAVE) == RECOMPUTE for s in made)

    monkeypatch.setattr(whole_modules, "wrapped_parameters", lambda module: False)
    other = net(compiled_layers)
    with pytest.raises(RuntimeError, match="data is not allocated yet"):  # parameters that FSDP2 has given back
        step(other, harshest(other))


def test_a_fit_says_that_no_budget_reaches_what_compiled_layers_of_a_sharded_model_store(monkeypatch):
    """The first step compiles: what the compiler differentiates is no backward of the step."""
    torch._dynamo.reset()
    model, plain = net(compiled_layers), step(net(compiled_layers))
    torch._dynamo.reset()
    with lowtide.fit(model, budget="300KiB") as fit:
        assert [step(model) for _ in range(3)] == [plain] * 3
        status = fit.status()

    assert status.steps == 3 and not any("did not see" in reason for reason in status.reasons)
    assert any("layers.0 is compiled and sharded, so it cannot run again" in reason for reason in status.reasons)
    assert status.over_budget_steps == 3
    assert any("what compiled code stores (layers." in reason for reason in status.reasons)


# -- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", sharded_training.WHOLE)
def test_everything_that_may_be_dropped_is_and_the_step_is_the_same(shard):
    model = net(shard)

    assert step(model, harshest(model)) == step(model)


def test_what_crosses_a_unit_is_saved_and_what_stays_inside_is_not():
    graph = lowtide.trace(net(), IDS)
    why = {s.fixed for s in graph.storages if s.kind == "activation"}
    outputs = [s for s in graph.storages if s.fixed == recording.CROSSES]

    assert recording.CROSSES in why and len(outputs) >= 2
    assert not any(s.fixed == recording.CROSSES for s in lowtide.trace(net(reshard_after_forward=False), IDS).storages)


def test_a_recipe_that_reaches_into_a_sharded_unit_is_an_error_by_name(monkeypatch):
    monkeypatch.setattr(recording.ShardingRecording, "check_reads", lambda self, storages: None)
    model = net()
    plan = harshest(model)

    with pytest.raises(ReplayError, match="FSDP has freed"):
        step(model, plan)


def scaled(model: nn.Module) -> Callable[[], None]:
    def scale() -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)

    return scale


def test_weights_changed_between_forward_and_backward_are_an_error():
    model = net()

    with pytest.raises((ReplayError, RuntimeError), match="in ?place"):
        step(model, harshest(model), between=scaled(model.layers))


def test_without_their_stamp_changed_weights_give_other_gradients_in_silence(monkeypatch):
    monkeypatch.setattr(observer, "_stamp", lambda param: ())
    before, model = net(), net()
    plan = harshest(model)

    assert step(model, plan, between=scaled(model.layers)) != step(before, between=scaled(before.layers))


def test_the_tape_looks_away_while_the_model_is_gathered(monkeypatch):
    model = net()
    plan = harshest(model)
    torch.manual_seed(3)
    with lowtide.apply(model, plan) as right:
        model(IDS).backward()
    monkeypatch.setattr(observer.PauseDuringSharding, "hook", lambda self: contextlib.nullcontext())
    with lowtide.apply(model, plan) as lost:
        model(IDS).backward()

    assert right.counts.mismatched == 0 and right.counts.dropped > 0
    assert lost.counts.mismatched > 0


def test_gathered_bytes_come_and_go_in_the_plan():
    model = net()
    graph = lowtide.trace(model, IDS)
    gathers = [op for op in graph.ops if op.name == recording.NAME]
    whole = sum(p.numel() * p.element_size() for p in model.layers[0].parameters())

    assert sorted(op.backward for op in gathers) == [False] * 3 + [True] * 2  # the root stays whole
    assert whole in [sum(graph.storages[s].bytes for s in op.makes) for op in gathers]


def test_a_unit_that_is_not_gathered_in_backward_is_not_replayed():
    model = net(lambda model: (fully_shard(model.embed), sharded_training.each_layer(model)))
    model.embed.set_unshard_in_backward(False)
    plan = harshest(model)

    assert "aten.embedding.default" not in {plan.ops[d.op].name for d in plan.decisions if d.action == RECOMPUTE}
    assert step(model, plan) == step(model)


def test_watching_ends_with_the_plan():
    model = net()
    types = [type(unit) for unit in units.units_of(model)]
    with lowtide.apply(model, harshest(model)):
        assert all(type(unit) is not kind for unit, kind in zip(units.units_of(model), types, strict=True))

    assert [type(unit) for unit in units.units_of(model)] == types
    assert not any(name.startswith("_lowtide") for unit in units.units_of(model) for name in vars(unit))


def test_a_step_that_fails_while_it_is_planned_leaves_fsdp_ready():
    model = net()

    def fails(*args: Any) -> torch.Tensor:
        raise ValueError("half-way")

    model.layers[1].down.forward = fails
    with pytest.raises(StepError, match="half-way"):
        lowtide.fit(model, IDS)
    del model.layers[1].down.forward

    assert all(state._training_state.name == "IDLE" for _, state in units.states_of(model))
    assert step(model) == step(net())


def test_gradients_that_fsdp_has_not_reduced_yet_outlive_a_rehearsal():
    def accumulated(*, plan_between: bool) -> str:
        model = net()
        model.set_requires_gradient_sync(False)
        torch.manual_seed(3)
        model(IDS).backward()
        model.set_requires_gradient_sync(True)
        if plan_between:
            lowtide.trace(model, IDS)
        torch.manual_seed(4)
        model(IDS).backward()
        return sharded_training.digest(p.grad for p in model.parameters())

    assert accumulated(plan_between=True) == accumulated(plan_between=False)


def test_a_shape_that_was_not_fitted_runs_online_unless_it_is_added(monkeypatch):
    monkeypatch.setattr(rehearsal, "measure", sharded_training.an_ms_an_op)
    model = net()
    longer = IDS.view(2, 32)  # no less memory, and not covered by the other shape
    with lowtide.fit(model, (IDS,), budget="95%") as fit:
        torch.manual_seed(3)
        model(longer).backward()
        ours = sharded_training.digest(p.grad for p in model.parameters())
        assert len(fit.plans) == 1 and "hand to one another" in fit.warnings[0]
        added = fit.add((longer,))
        model.zero_grad(set_to_none=False)  # as in the rehearsal
        torch.manual_seed(3)
        model(longer).backward()
        assert fit._lifecycle.plans_by_shape.plans[-1].tape.counts.dropped > 0 and added.counts[RECOMPUTE]
        assert ours == sharded_training.digest(p.grad for p in model.parameters())
    model.zero_grad()
    torch.manual_seed(3)
    model(longer).backward()

    assert ours == sharded_training.digest(p.grad for p in model.parameters())


class Saves(torch.autograd.Function):
    """Saves a tensor that no op here reads."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].detach().isfinite().all(), None


def crossing(graph):
    return sum(s.fixed == recording.CROSSES for s in graph.storages)


def test_a_watched_step_counts_what_is_gathered_and_saves_what_crosses_a_unit():
    model = net()
    up, kept = model.layers[0].up, []
    up.register_forward_hook(lambda _, inputs, output: kept.append(output))
    model.norm.register_forward_pre_hook(lambda _, inputs: (Saves.apply(inputs[0], kept.pop()),))
    with lowtide.fit(model, budget="90%") as fit:
        for _ in range(2):
            model(IDS).backward()
        fit.wait(60)
        model(IDS).backward()
        graph = fit.graph
    gathers = [op.backward for op in graph.ops if op.name == recording.NAME]
    assert gathers.count(True) >= len(model.layers) <= gathers.count(False)
    assert crossing(graph) == crossing(lowtide.trace(model, IDS)) > 0


REFUSED = {
    "ReplicateModule": lambda: net(lambda model: replicate(model)),
    "CPUOffloadPolicy": lambda: net(offloaded),
}


def offloaded(model: nn.Module) -> None:
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for unit in units.units_of(model):
        for param in unit.fsdp_params:
            param.device = torch.device("cuda")  # as where it computes elsewhere than it keeps


@pytest.mark.parametrize("what", REFUSED)
def test_other_ways_to_shard_are_refused_by_name(what):
    with pytest.raises(UnsupportedModelError, match=what):
        lowtide.trace(REFUSED[what](), IDS)


# -- tensors in parts -------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Two replicated matrices and something between them."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        mesh = init_device_mesh(torch.get_default_device().type, (1,))
        torch.manual_seed(0)
        self.first, self.second = (
            nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Replicate()])) for _ in range(2)
        )
        self.shift = nn.Parameter(distribute_tensor(torch.randn(8), mesh, [Replicate()]))
        self.between, self.mesh, self.extra = between, mesh, False
        self.given = DTensor.from_local(torch.ones(4, 8), mesh, [Replicate()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (DTensor.from_local(x, self.mesh, [Replicate()]) @ self.first).sin()
        return (self.between(self, h) @ self.second).sin().to_local()


def sines(self: Parts, h: torch.Tensor) -> torch.Tensor:
    return h.cos().sin()


X = torch.randn(4, 8, generator=torch.Generator(torch.get_default_device()).manual_seed(5))


def parts_step(model: Parts, plan: Plan | None = None, between: Callable[[], Any] = lambda: None) -> str:
    with lowtide.apply(model, plan) if plan is not None else contextlib.nullcontext():
        out = model(X)
    between()
    out.square().mean().backward()
    found = sharded_training.digest([out, *(p.grad for p in model.parameters())])
    model.zero_grad()
    return found


def test_wrappers_are_taken_apart_and_replayed_bitwise():
    model = Parts(sines)

    assert parts_step(model, harshest(model, X)) == parts_step(model)


def test_a_weight_in_parts_that_changed_before_backward_is_an_error():
    model = Parts(sines)

    with pytest.raises((ReplayError, RuntimeError), match="in ?place"):
        parts_step(model, harshest(model, X), between=scaled(model))


def shifted(self: Parts, h: torch.Tensor) -> torch.Tensor:
    return (h + self.shift).sin()  # autograd stores the sum, and only a replay reads the shift


@pytest.mark.parametrize("guarded", [True, False])
def test_a_weight_in_parts_that_only_replays_read_must_not_change_either(guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(subclasses.WrapperVersions, "catch_up", lambda self: None)
    plain, model = Parts(shifted), Parts(shifted)
    plan = harshest(model, X)
    right = parts_step(plain, between=lambda: plain.shift.data.mul_(2))
    with contextlib.nullcontext() if not guarded else pytest.raises(ReplayError, match="changed in place"):
        assert parts_step(model, plan, between=lambda: optimizer_like(model.shift)) != right


def optimizer_like(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(2)


def drifting(self: Parts, h: torch.Tensor) -> torch.Tensor:
    """In steps that are not traced, what was given is written after a replayable op has read it."""
    doubled = (self.given * 2).cos().sin()
    if self.extra:
        self.given.mul_(3)
    return h * doubled


@pytest.mark.parametrize("guarded", [True, False])
def test_an_in_place_write_that_only_the_wrapper_counts_is_seen(guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(tape, "bump_versions_of_parts", lambda *call: [])
    plain, model = Parts(drifting), Parts(drifting)
    plan = harshest(model, X)
    plain.extra = model.extra = True
    right = parts_step(plain)

    with contextlib.nullcontext() if not guarded else pytest.raises(ReplayError, match="changed in place"):
        assert parts_step(model, plan) != right


def summed(self: Parts, h: torch.Tensor) -> torch.Tensor:
    total = all_reduce(h.detach().to_local().sin(), "sum", self.mesh)
    return h * DTensor.from_local(total, self.mesh, [Replicate()])


@pytest.mark.parametrize("guarded", [True, False])
def test_collectives_are_never_replayed(guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(operators, "COLLECTIVES", ())
    model = Parts(summed)
    plan = harshest(model, X)
    with sharded_training.Collectives() as plain:
        parts_step(model)
    with sharded_training.Collectives() as ours:
        parts_step(model, plan)

    assert (ours.seen == plain.seen) is guarded


def summed_in_place(self: Parts, h: torch.Tensor) -> torch.Tensor:
    total = h.detach().to_local().clone()
    dist.all_reduce(total)
    return h + DTensor.from_local(total, self.mesh, [Replicate()])


@pytest.mark.parametrize("guarded", [True, False])
def test_what_a_collective_is_given_counts_as_written(guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(recorder, "may_write_undeclared", lambda func: False)
    graph = lowtide.trace(Parts(summed_in_place), X)
    given = {s for op in graph.ops if op.name.startswith("c10d.allreduce_") for s in op.reads}

    assert given and all((graph.storages[s].fixed == "written during the step") is guarded for s in given)
