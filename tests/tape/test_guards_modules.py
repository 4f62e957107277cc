"""Guards around modules that the user names: each call is one op, run again as a whole or kept by name."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.online_steps import online
from support.training_steps import differing, drop_everything, outcome, plain, planned
from torch import nn

import lowtide
from lowtide.graph.function_ops import function_groups
from lowtide.plan import RECOMPUTE
from lowtide.step import whole_modules
from lowtide.step.whole_modules import CallOfModule, matching
from lowtide.tape.online.online_calls import CallRecipe

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS = ["*.experts"]


class Experts(nn.Module):
    """Draws, counts in a buffer and reads it, moves running statistics, and tells how often its Python has run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(width)
        self.register_buffer("count", torch.ones(1))
        self.runs = 0

    def forward(self, x: torch.Tensor, *, scale: Any) -> Any:
        self.runs += 1
        self.count.mul_(1.25)
        hidden = torch.relu(self.up(x)) * torch.sigmoid(self.up(x))
        return {"y": self.norm(self.dropout(self.down(hidden)) * self.count.clone() * scale[0]), "z": [x * 2]}


class Layer(nn.Module):
    def __init__(self, width: int, experts: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(width), experts(width)

    def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
        made = self.experts(self.norm(x), scale=scale)
        return x + made["y"] + made["z"][0].sin()


class Mixture(nn.Module):
    def __init__(
        self, width: int = 16, layers: int = 2, experts: type[nn.Module] = Experts, scale: Any = (1.5,)
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, experts) for _ in range(layers))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.scale)
        return x


def batch() -> torch.Tensor:
    return torch.randn(128, 16)


def runs(model: nn.Module) -> int:
    return sum(layer.experts.runs for layer in model.layers)


def why_kept(model: nn.Module, x: torch.Tensor) -> str:
    (group,) = function_groups(lowtide.trace(model, x, opaque=EXPERTS))
    return group.why_kept


# -- which modules -----------------------------------------------------------------------------------------------------


def test_names_match_the_outermost_modules():
    model = Mixture()

    assert matching(model, EXPERTS) == ["layers.0.experts", "layers.1.experts"]
    assert matching(model, ["layers.1*", "*"]) == ["layers"]


def test_a_name_that_matches_nothing_is_an_error_with_the_nearest():
    with pytest.raises(ValueError) as error:
        lowtide.fit(Mixture(), batch(), budget="50%", opaque=["*.expert_layer"])
    assert str(error.value) == (
        "opaque='*.expert_layer' matches no module of this Mixture.\n"
        "  nearest  layers, layers.1.experts, layers.0.experts\n"
        "Name modules as model.named_modules() does; * stands for any text."
    )


def test_one_string_is_no_list_of_names():
    with pytest.raises(TypeError, match=r"opaque='\*.experts' is not a list of names"):
        lowtide.trace(Mixture(), batch(), opaque="*.experts")


def test_tensors_without_memory_prove_nothing():
    with pytest.raises(ValueError, match="opaque= needs real tensors"):
        lowtide.trace(Mixture(), batch(), opaque=EXPERTS, device="cpu")


# -- what works --------------------------------------------------------------------------------------------------------


def test_a_named_module_is_one_op_and_runs_again_bit_for_bit():
    model, x = Mixture(), batch()
    graph = lowtide.trace(model, x, opaque=EXPERTS)
    plan = drop_everything(graph)
    calls = [op for op in graph.forward_ops if ".module:" in op.name]

    assert [graph.frames[op.frame].path for op in calls] == ["layers.0.experts", "layers.1.experts"]
    assert function_groups(graph)[0].kept_bytes == 0
    assert differing(plain(model, x), planned(model, x, plan)) == []


def test_an_explanation_calls_it_no_kernel():
    plan = drop_everything(lowtide.trace(Mixture(), batch(), opaque=EXPERTS))
    text = str(plan.explain())

    assert "made in modules that are one op each: " in text and "dispatcher" not in text
    assert text.endswith("2 x Experts, 2.0 ms")
    assert plan.opaque_calls().endswith(" % of what is stored; run again: Experts")


def test_its_python_runs_again_and_hooks_with_it():
    model, x = Mixture(), batch()
    plan = drop_everything(lowtide.trace(model, x, opaque=EXPERTS))
    fired: list[int] = []
    for layer in model.layers:
        layer.experts.register_forward_hook(lambda *_: fired.append(1))
        layer.experts.runs = 0
    for _ in range(2):  # the first proves
        fired.clear()
        before = runs(model)
        with lowtide.apply(model, plan):
            loss = model(x).square().mean()
            in_forward = runs(model) - before
            loss.backward()

    assert runs(model) - before == len(fired) > in_forward >= len(model.layers)


def test_the_judge_knows_its_peak():
    model, x = Mixture(width=32, layers=3), torch.randn(256, 32)
    graph = lowtide.trace(model, x, opaque=EXPERTS)
    plan = lowtide.solve(graph, lowtide.measure(graph), "60%")

    proof = lowtide.verify(model, x, plan)

    assert proof.gradients_bitwise_equal
    assert proof.measured_peak_bytes <= proof.predicted_peak_bytes < 1.1 * proof.measured_peak_bytes


@pytest.mark.parametrize("with_batch", [True, False])
def test_a_fit_runs_named_modules_again(with_batch):
    model, x = Mixture(), batch()
    bare = copy.deepcopy(model)
    fit = lowtide.fit(model, x if with_batch else None, budget="85%", opaque=EXPERTS)
    for _ in range(4):
        found = []
        for net in (bare, model):
            net.zero_grad()
            torch.manual_seed(5)
            loss = net(x).square().mean()
            loss.backward()
            found.append(outcome(net, loss))
        assert differing(*found) == []
        fit.wait()

    assert fit.status().in_force
    assert [op.name for op in fit.plan.ops if ".module:" in op.name]
    assert fit.plan.counts[RECOMPUTE]
    assert any("run again as a whole" in reason for reason in fit.status().reasons)
    fit.remove()
    assert not any(map(whole_modules.is_called_whole, model.modules()))


def test_a_plan_from_a_file_knows_the_named_modules(tmp_path):
    model, x = Mixture(), batch()
    drop_everything(lowtide.trace(model, x, opaque=EXPERTS)).save(tmp_path / "plan.json")

    assert differing(plain(model, x), planned(model, x, lowtide.Plan.load(tmp_path / "plan.json"))) == []


def test_a_step_without_a_plan_lets_named_modules_go(monkeypatch):
    again: list[str] = []
    run = CallRecipe.run
    monkeypatch.setattr(CallRecipe, "run", lambda self, transient: again.append(self.name) or run(self, transient))
    model, x = Mixture(), batch()
    copied = copy.deepcopy(model)
    with whole_modules.called_whole(copied, matching(copied, EXPERTS)):
        found, tape = online(copied, x, 0, copies=False)

    assert differing(plain(model, x), found) == []
    assert len(again) >= 2 and not tape.problem


# -- what is kept, by name ---------------------------------------------------------------------------------------------


class OwnGenerator(Experts):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor, *, scale: Any) -> Any:
        return {"y": self.down(self.up(x)), "z": [x * torch.rand(x.shape, generator=self.generator)]}


class Counts(Experts):
    def forward(self, x: torch.Tensor, *, scale: Any) -> Any:
        self.runs += 1
        return {"y": self.down(self.up(x).sin()) * self.runs, "z": [x]}


class WritesInput(Experts):
    def forward(self, x: torch.Tensor, *, scale: Any) -> Any:
        hidden = self.up(x.detach().mul_(0.5)).sin()
        return {"y": self.down(hidden), "z": [x]}


class Branches(Experts):
    """Stores less when it runs again."""

    def forward(self, x: torch.Tensor, *, scale: Any) -> Any:
        self.runs += 1
        hidden = self.up(x).sin() if self.runs == 1 else self.up(x).detach().sin()
        return {"y": self.down(hidden), "z": [x * 1]}


KEPT = {
    "draws from a generator of its own (OwnGenerator.generator)": (OwnGenerator, (1.0,)),
    "gives other bits when it runs again": (Counts, (1.0,)),
    "writes its inputs in place": (WritesInput, (1.0,)),
    "is given a SimpleNamespace, which may change before backward": (Experts, [1.0, SimpleNamespace()]),
}


@pytest.mark.parametrize("reason", KEPT)
def test_what_must_not_run_again_is_kept_and_named(reason):
    experts, scale = KEPT[reason]
    model, x = Mixture(experts=experts, scale=scale), batch()

    assert why_kept(model, x) == reason


def test_a_call_that_stores_other_tensors_the_second_time_is_kept():
    assert why_kept(Mixture(experts=Branches), batch()) == "gives other bits when it runs again"


# -- the guards, taken out ---------------------------------------------------------------------------------------------


def test_buffers_count_twice_without_their_copies(monkeypatch):
    model, x = Mixture(), batch()
    plan = drop_everything(lowtide.trace(model, x, opaque=EXPERTS))
    monkeypatch.setattr(whole_modules, "_put", lambda buffers: None)
    monkeypatch.setattr("lowtide.tape.calls_under_plan.why_not_same", lambda *_: "")

    assert differing(plain(model, x), planned(model, x, plan))


@pytest.mark.parametrize("guarded", [True, False])
def test_train_mode_is_that_of_the_forward_pass(guarded, monkeypatch):
    model, x = Mixture(), batch()
    plan = drop_everything(lowtide.trace(model, x, opaque=EXPERTS))
    if not guarded:
        monkeypatch.setattr(whole_modules, "_put_modes", lambda modes: None)
    found = []
    for net in (copy.deepcopy(model), copy.deepcopy(model)):
        torch.manual_seed(5)
        net.train()
        with lowtide.apply(net, plan) if found else torch.enable_grad():
            loss = net(x).square().mean()
        net.eval()
        try:
            loss.backward()
        except (lowtide.ReplayError, IndexError, RuntimeError):  # it stores other tensors
            assert not guarded
            return
        found.append(outcome(net, loss))

    assert (differing(*found) == []) is guarded


def test_a_buffer_that_changes_before_backward_is_an_error():
    class Reads(Experts):
        def forward(self, x: torch.Tensor, *, scale: Any) -> Any:
            return {"y": self.down(self.up(x).sin() * self.count), "z": [x]}

    model, x = Mixture(experts=Reads), batch()
    plan = drop_everything(lowtide.trace(model, x, opaque=EXPERTS))
    with lowtide.apply(model, plan):
        loss = model(x).square().mean()
    model.layers[0].experts.count.mul_(2)

    with pytest.raises((lowtide.ReplayError, RuntimeError), match=r"changed in place|modified by an inplace"):
        loss.backward()


def test_a_saved_tensor_that_the_module_overwrites_is_the_plain_steps_error():
    class Overwrites(Experts):
        def forward(self, x: torch.Tensor, *, scale: Any) -> Any:
            hidden = self.up(x)
            read = hidden.sin()
            hidden.mul_(2)
            return {"y": self.down(read), "z": [x]}

    model, x = Mixture(experts=Overwrites), batch()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(model, x)
    fit = lowtide.fit(model, budget="90%", opaque=EXPERTS)
    loss = model(x).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    fit.remove()


def test_numbers_given_to_a_call_are_kept_for_its_second_run():
    how = CallOfModule(Experts(4), ((torch.ones(2, 4),), {"scale": [2.0, (3, None)]}, []))

    assert how.why_not_again() == ""
