"""Guards against writes: schemas that lie, versions, what no counter sees, the rehearsal that finds it.

Each guard fires, and with each taken out the harm it prevents comes back. Plans here drop every storage that may be
dropped, the setting with the most ways to go wrong.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from support.guards import IN_PLACE, FalseSchema, wrong
from support.training_steps import (
    Net,
    differing,
    drop_everything,
    harshest,
    mlp,
    outcome,
    plain,
    planned,
)
from support.unseen_memory import memory_of
from torch import library as registry
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide import ReplayError, UnsupportedModelError
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.recording import recorder
from lowtide.recording.graph_builder import GraphBuilder
from lowtide.simulation import simulator
from lowtide.solvers import graph_queries
from lowtide.step import data_assignments, operators, storage_bits
from lowtide.tape import recipes, replay, tape, values
from lowtide.training import rehearsal

pytestmark = pytest.mark.usefixtures("one_thread")


# -- schemas lie ----------------------------------------------------------------------------------------------------


def statistics_are_handed_over(patch: pytest.MonkeyPatch) -> None:
    """Replays pass the running statistics on, as the forward call did."""
    patch.setattr(operators, "OMITTED_IN_REPLAYS", {})
    patch.setattr(recorder, "omitted_in_replay", lambda func, args: ())
    patch.setattr(recipes, "omitted_in_replay", lambda func, args: ())


def no_list(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operators, "HIDDEN_BUFFER_WRITERS", frozenset())


def no_first_sight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recorder, "fingerprint", lambda tensor: ())
    patch.setattr(recorder, "_undeclared_writes", {})  # what other tests have seen


BATCH_NORM_GUARDS = {
    "all": (),
    "list and sight": (statistics_are_handed_over,),
    "list": (statistics_are_handed_over, no_first_sight),
    "sight": (statistics_are_handed_over, no_list),
}


@pytest.mark.parametrize("removed", BATCH_NORM_GUARDS.values(), ids=list(BATCH_NORM_GUARDS))
def test_running_statistics_move_once(removed, monkeypatch):
    for remove in removed:
        remove(monkeypatch)

    assert wrong(batch_norm(), torch.randn(6, 8)) == []


def test_running_statistics_move_twice_without_any_of_the_guards(monkeypatch):
    for remove in (statistics_are_handed_over, no_list, no_first_sight):
        remove(monkeypatch)

    assert "buffer 1.running_mean" in wrong(batch_norm(), torch.randn(6, 8))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8))


def reads_then_moves_statistics(self: Net, x: torch.Tensor) -> torch.Tensor:
    self.norm.eval()
    a = self.norm(self.layers[0](x)).sin()
    self.norm.train()
    b = self.norm(self.layers[1](a)).sin()
    self.norm.eval()
    return (a * self.norm(self.layers[2](b))).sin()


@pytest.mark.parametrize("guarded", [True, False])
def test_statistics_read_before_they_move_are_not_read_again(guarded, monkeypatch):
    if not guarded:
        no_first_sight(monkeypatch)
    model = Net(reads_then_moves_statistics)
    model.norm = nn.BatchNorm1d(8)

    assert (wrong(model, torch.randn(4, 8)) == []) is guarded


def test_an_op_that_lies_about_writing_its_input_is_found_at_first_sight():
    assert wrong(FalseSchema(), torch.randn(4, 8)) == []


def test_an_op_that_lies_writes_twice_without_first_sight(monkeypatch):
    no_first_sight(monkeypatch)

    assert wrong(FalseSchema(), torch.randn(4, 8)) == ["buffer calls"]


_library = registry.Library("lowtide_tests", "FRAGMENT")
_library.define("noisy(Tensor x) -> Tensor")
_library.define("tally(Tensor x) -> Tensor")
_tally = torch.zeros(1)
_noise = iter(range(10**9))


def _noisy(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + next(_noise)


def _count_hidden(x: torch.Tensor) -> torch.Tensor:
    memory_of(_tally)[0] += 1
    return x.sin()


for _key in ("CPU", "CUDA"):
    _library.impl("noisy", _noisy, _key)
    _library.impl("tally", _count_hidden, _key)


# -- in-place writes and versions -----------------------------------------------------------------------------------


def written_after_saving(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x).sin().exp()  # exp stores its result
    h.add_(1.0)
    return self.layers[1](h)


def test_an_inplace_write_to_a_saved_tensor_raises_what_plain_pytorch_raises():
    model, x = Net(written_after_saving), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        plain(model, x)

    with pytest.raises(RuntimeError, match=IN_PLACE):
        planned(model, x, harshest(model, x))


def test_an_inplace_write_to_a_saved_tensor_gives_a_wrong_number_without_the_check(monkeypatch):
    model, x = Net(written_after_saving), torch.randn(4, 8)
    monkeypatch.setattr(tape.Tape, "unpack", unchecked_unpack)
    out_of_place = Net(lambda self, x: self.layers[1](self.layers[0](x).sin().exp() + 1.0))
    out_of_place.load_state_dict(model.state_dict())

    assert differing(plain(out_of_place, x), planned(model, x, harshest(model, x)))


def unchecked_unpack(self: tape.Tape, packed: Any) -> torch.Tensor:
    return packed.tensor if isinstance(packed, values.Kept) else replay.unpacked(packed)


def written_after_forward(model: Net, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Overwrite, between forward and backward, an activation that only a replay reads."""
    plan = harshest(model, x)
    keep = {i for i, op in enumerate(plan.ops) if op.name == "aten.addmm.default"}
    plan = replace(
        plan,
        decisions=tuple(replace(d, action=SAVE) if d.op in keep else d for d in plan.decisions),
        ops=tuple(replace(op, num_dropped_inputs=0) for op in plan.ops),
    )  # the replay of the addition starts at the kept linear
    assert plan.counts[RECOMPUTE]
    with lowtide.apply(model, plan):
        loss = model(x).square().mean()
    with torch.no_grad():
        model.hidden.zero_()
    loss.backward()
    return outcome(model, loss)


def keeps_hidden(self: Net, x: torch.Tensor) -> torch.Tensor:
    self.hidden = self.layers[0](x)
    return self.layers[1]((self.hidden + 1.0).sin())


def test_a_replay_refuses_an_input_that_was_changed_since():
    model = Net(keeps_hidden)

    with pytest.raises(ReplayError) as error:
        written_after_forward(model, torch.randn(4, 8))

    assert str(error.value) == (
        "aten.add.Tensor in the model cannot be replayed: a tensor of shape [4, 8] that it read was changed in place "
        "afterwards (version 1, was 0).\n"
        "Change it before the forward pass or after backward, or fit the step that really runs."
    )


def test_a_replay_reads_the_changed_input_if_detach_has_a_counter_of_its_own(monkeypatch):
    monkeypatch.setattr(values, "sharing_version", lambda tensor: tensor.detach())
    model, x = Net(keeps_hidden), torch.randn(4, 8)
    expected = plain(model, x)

    model.zero_grad()
    assert differing(expected, written_after_forward(model, x))


def test_a_version_taken_inside_dispatch_counts_writes_outside():
    class Take(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.sin.default:
                shared.append(values.sharing_version(args[0]))
                separate.append(args[0].detach())
            return func(*args, **(kwargs or {}))

    shared, separate = [], []
    x = torch.randn(3, requires_grad=True) * 1
    with Take():
        x.sin()
    with torch.no_grad():
        x.add_(1.0)

    assert (shared[0]._version, separate[0]._version) == (1, 0)


# -- writes no counter sees -----------------------------------------------------------------------------------------


def writes_a_parameter(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = (x * self.layers[1].weight.diagonal()).sin()  # read before ...
    self.layers[1].weight.data.mul_(0.5)
    return self.layers[2]((h * self.layers[1].weight.diagonal()).sin()).sin()  # ... and after the write


def test_what_read_a_parameter_before_its_data_was_written_is_saved():
    assert wrong(Net(writes_a_parameter), torch.randn(4, 8)) == []


def test_what_read_a_parameter_before_its_data_was_written_is_wrong_without_the_guard(monkeypatch):
    monkeypatch.setattr(GraphBuilder, "mark_written", lambda self, storage: None)
    for module in (graph_queries, simulator):
        monkeypatch.setattr(module, "ops_written_under", lambda graph: frozenset())

    assert "gradient of layers.1.weight" in wrong(Net(writes_a_parameter), torch.randn(4, 8))


def test_a_step_that_writes_a_parameter_is_rehearsed_without_moving_it():
    model = Net(writes_a_parameter)
    before = copy.deepcopy(model.state_dict())

    plan = drop_everything(lowtide.trace(model, torch.randn(4, 8)))
    proof = lowtide.verify(model, torch.randn(4, 8), plan, rounds=0)

    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert proof.equal, proof.differing


def replaces_a_parameter(self: Net, x: torch.Tensor) -> torch.Tensor:
    self.layers[1].weight.data = self.layers[1].weight.data * 0.5
    return self.layers[1](self.layers[0](x).sin()).sin()


def test_a_step_that_gives_a_parameter_other_memory_is_rehearsed_without_moving_it():
    model, x = Net(replaces_a_parameter), torch.randn(4, 8)
    before = copy.deepcopy(model.state_dict())

    assert wrong(model, x) == []
    assert lowtide.verify(model, x, harshest(model, x), rounds=0).equal
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def with_fused_optimizer(fitted: bool) -> dict[str, torch.Tensor]:
    """Three steps of AdamW that runs inside backward."""
    model, data = mlp(), torch.randn(3, 4, 16, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    before = copy.deepcopy(model.state_dict())
    if fitted:
        fit = lowtide.fit(model, data[0], budget="100%")
        assert fit.plan.counts[RECOMPUTE]
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())  # no step in a rehearsal
        assert not any(o.state for o in optimizers.values())
    for x in data:
        model(x).square().mean().backward()
    return model.state_dict()


def test_an_optimizer_fused_into_backward_steps_as_plainly_and_not_in_rehearsals(monkeypatch):
    monkeypatch.setattr(rehearsal, "solve", lambda graph, costs, budget, **options: drop_everything(graph))

    plainly, fitted = with_fused_optimizer(False), with_fused_optimizer(True)

    assert all(torch.equal(plainly[k], fitted[k]) for k in plainly)


def writes_data_on_demand(self: Net, x: torch.Tensor, write: bool = False) -> torch.Tensor:
    h = self.layers[0](x)
    if write:
        h.data.mul_(2)  # no version counts it
    return self.layers[1](h.sin()).sin()


@pytest.mark.parametrize("guarded", [True, False])
def test_an_unplanned_write_through_data_is_seen(guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(tape, "unmark_written", lambda func, args, kwargs: None)
    model, x = Net(writes_data_on_demand), torch.randn(4, 8)
    plan = harshest(model, x)
    batch = {"x": x, "write": True}

    assert (differing(plain(model, batch), planned(model, batch, plan)) == []) is guarded


def turns_a_view_through_data(self: Net, x: torch.Tensor) -> torch.Tensor:
    return turned(self, self.layers[0](x).sin())


def turns_a_view_that_needs_no_gradient(self: Net, x: torch.Tensor) -> torch.Tensor:
    return turned(self, x.sin())


def turned(self: Net, h: torch.Tensor) -> torch.Tensor:
    view = h.view(8, 8)
    seen = view.cos()
    view.data = view.data.t()
    return self.layers[1](view.exp() * seen)


TURNS = [turns_a_view_through_data, turns_a_view_that_needs_no_gradient]


@pytest.mark.parametrize("forward", TURNS)
def test_a_view_that_is_assigned_to_through_data_is_refused(forward):
    with pytest.raises(UnsupportedModelError, match=r"assigned to \(x.data = ...\) after an op"):
        lowtide.trace(Net(forward), torch.randn(8, 8))


@pytest.mark.parametrize("forward", TURNS)
def test_a_view_that_is_assigned_to_through_data_is_wrong_without_the_refusal(forward, monkeypatch):
    model, x = Net(forward), torch.randn(8, 8)
    monkeypatch.setattr(data_assignments.DataAssignmentGuard, "add_view", lambda self, tensor, storage, written: None)

    assert differing(plain(model, x), planned(model, x, harshest(model, x)))


@pytest.mark.parametrize("guarded", [True, False])
def test_a_recipe_may_read_an_inference_tensor(guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(values.Kept, "__init__", _with_the_version)
    with torch.inference_mode():
        x = torch.randn(4, 8)
    model = Net(lambda self, x: self.layers[1]((x + self.layers[0].bias).sin()))

    if guarded:
        assert wrong(model, x) == []
    else:
        with pytest.raises(ValueError, match="Inference tensors do not track version counter"):
            wrong(model, x)


def _with_the_version(self: values.Kept, tensor: torch.Tensor) -> None:
    self.tensor, self.version = tensor, tensor._version


def scaled_and_shifted(self: Net, x: torch.Tensor) -> torch.Tensor:
    return self.layers[0]((x / 255 + self.layers[1].bias).sin())  # nothing here stores x


def refilled(model: nn.Module) -> list[str]:
    """NumPy refills the batch's memory between forward and backward."""
    memory = np.random.default_rng(0).standard_normal((4, 8)).astype("float32")
    batch = torch.from_numpy(memory)
    expected = plain(model, batch)
    plan = harshest(model, batch)
    with lowtide.apply(model, plan) as applied:
        loss = model(batch).square().mean()
    assert applied.counts.dropped
    memory[:] = 0
    loss.backward()
    return differing(expected, outcome(model, loss))


def test_a_batch_in_memory_that_numpy_owns_may_be_refilled_before_backward():
    assert refilled(Net(scaled_and_shifted)) == []


def test_a_refilled_batch_is_replayed_wrongly_without_the_guard(monkeypatch):
    monkeypatch.setattr(GraphBuilder, "fix", lambda self, number, reason: None)

    assert refilled(Net(scaled_and_shifted))


# -- writes the dispatcher cannot see, kernels that differ: the rehearsal ---------------------------------------------


def by_pointer(x: torch.Tensor) -> torch.Tensor:
    """Fills a factor through NumPy: the dispatcher only sees ``zeros_like``."""
    out = torch.zeros_like(x.detach())
    memory_of(out)[:] = np.sin(memory_of(x))
    return x * out


INVISIBLE = {
    "aten.zeros_like.default": Net(lambda self, x: self.layers[1](by_pointer(self.layers[0](x)))),
    "lowtide_tests.noisy.default": Net(
        lambda self, x: self.layers[1](self.layers[0](x) * torch.ops.lowtide_tests.noisy(x))
    ),
}


def trained_under_fit(model: nn.Module, x: torch.Tensor, patch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """(what differs from plain, warnings) of one step under a fit that drops everything."""
    global _noise
    patch.setattr(rehearsal, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
    expected_noise = 1000
    model, bare = copy.deepcopy(model), copy.deepcopy(model)
    fit = lowtide.fit(model, x, budget="100%")
    _noise = iter(range(expected_noise, 10**9))
    loss = model(x).square().mean()
    loss.backward()
    fit.remove()
    _noise = iter(range(expected_noise, 10**9))
    expected = bare(x).square().mean()
    expected.backward()
    return differing(outcome(bare, expected), outcome(model, loss)), fit.warnings


@pytest.mark.parametrize("name", INVISIBLE)
def test_a_rehearsal_finds_what_replays_differently_and_saves_it(name, monkeypatch):
    differs, warnings = trained_under_fit(INVISIBLE[name], torch.randn(4, 8), monkeypatch)

    assert differs == []
    assert warnings == [f"{name} in the model gives other bits when it runs again: saved from now on"]


@pytest.mark.parametrize("name", INVISIBLE)
def test_what_replays_differently_is_wrong_without_proof(name, monkeypatch):
    monkeypatch.setattr(rehearsal.Rehearsal, "_rehearse", lambda *_: set())
    monkeypatch.setattr(tape.Tape, "_is_to_be_proven", lambda *_: False)

    differs, _ = trained_under_fit(INVISIBLE[name], torch.randn(4, 8), monkeypatch)

    assert differs


class Tallies(nn.Module):
    """Its operator counts calls in a buffer that is not among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("tally", _tally)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).sin()
        return self.linear(h * torch.ops.lowtide_tests.tally(h.detach()))


def test_an_op_whose_kernel_differs_is_saved_even_where_nothing_was_rehearsed(monkeypatch):
    monkeypatch.setattr(rehearsal.Rehearsal, "_rehearse", lambda *_: set())

    assert trained_under_fit(INVISIBLE["lowtide_tests.noisy.default"], torch.randn(4, 8), monkeypatch)[0] == []


def shuffled(x: torch.Tensor) -> torch.Tensor:
    """Swaps rows of a factor through NumPy: the sum of its words stays."""
    out = x.detach().sin()
    memory_of(out)[:] = memory_of(out)[::-1].copy()
    return x * out


@pytest.mark.parametrize("by_place", [True, False])
def test_a_rehearsal_finds_words_that_change_places(by_place, monkeypatch):
    if not by_place:
        monkeypatch.setattr(tape, "fingerprint", storage_bits.sum_of_words)
    model = Net(lambda self, x: self.layers[1](shuffled(self.layers[0](x))))

    differs, _ = trained_under_fit(model, torch.randn(4, 8), monkeypatch)

    assert (differs == []) is by_place


@pytest.mark.parametrize("at_death", [True, False])
def test_a_rehearsal_seals_a_tensor_when_its_memory_goes(at_death, monkeypatch):
    if not at_death:  # all that is dropped is sealed before the next op
        seal = tape.Tape._seal_unheld
        monkeypatch.setattr(tape.Tape, "_seal_unheld", lambda self, **_: seal(self, all_of_them=True))

    differs, _ = trained_under_fit(INVISIBLE["aten.zeros_like.default"], torch.randn(4, 8), monkeypatch)

    assert (differs == []) is at_death


@pytest.mark.parametrize("told_apart", [True, False])
def test_ops_that_read_what_differed_are_not_blamed(told_apart, monkeypatch):
    if not told_apart:
        differs = recipes.Recipe._differs
        monkeypatch.setattr(recipes.Recipe, "_differs", lambda self, value, spoilt: differs(self, value, False))
    model = Net(lambda self, x: self.layers[1](by_pointer(self.layers[0](x)).exp().sin()))

    _, warnings = trained_under_fit(model, torch.randn(4, 8), monkeypatch)

    assert (len(warnings) == 1) is told_apart


@pytest.mark.parametrize("rehearsed", [True, False])
def test_a_rehearsal_finds_a_buffer_that_moves_in_replay(rehearsed, monkeypatch):
    monkeypatch.setattr(rehearsal, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
    model, x = Tallies(), torch.randn(4, 8)
    if not rehearsed:
        monkeypatch.setattr(rehearsal.Rehearsal, "_rehearse", lambda *_: set())
        monkeypatch.setattr(tape.Tape, "_is_to_be_proven", lambda *_: False)
    fit = lowtide.fit(model, x, budget="100%")
    before = model.tally.item()

    model(x).square().mean().backward()
    fit.remove()

    assert model.tally.item() - before == (1 if rehearsed else 2)
