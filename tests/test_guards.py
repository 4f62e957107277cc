"""The guards under which a recipe is trusted: each fires, and with each taken out the harm it prevents comes back.

Plans here drop every storage that may be dropped, the setting with the most ways to go wrong.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from steps import (
    Net,
    differing,
    drop_everything,
    harshest,
    is_clean,
    live_tensors,
    mlp,
    outcome,
    plain,
    planned,
    replays,
)
from torch import library as registry
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide import LowtideError, ReplayError, UnsupportedModelError, planning
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.tape import bursts, recipes, tape, values
from lowtide.tape.ambient import GeneratorState
from lowtide.tape.program import Slot
from lowtide.tracing import kinds, looks, operators, recorder
from lowtide.tracing.recorder import Recorder

IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation"


@pytest.fixture(autouse=True)
def _one_thread_and_nothing_left() -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    assert is_clean(nn.Identity())


def wrong(model: nn.Module, batch: Any, step: Any = None) -> list[str]:
    """What differs from the plain step when everything is dropped."""
    return differing(plain(model, batch, step), planned(model, batch, harshest(model, batch, step), step))


# -- schemas lie ----------------------------------------------------------------------------------------------------


def statistics_are_handed_over(patch: pytest.MonkeyPatch) -> None:
    """Replays pass the running statistics on, as the forward call did."""
    patch.setattr(operators, "LEFT_OUT_OF_REPLAYS", {})
    patch.setattr(recorder, "left_out", lambda func, args: ())
    patch.setattr(recipes, "left_out", lambda func, args: ())


def no_list(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operators, "HIDDEN_BUFFER_WRITERS", frozenset())


def no_first_sight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kinds, "fingerprint", lambda tensor: ())


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
    assert wrong(Liar(), torch.randn(4, 8)) == []


def test_an_op_that_lies_writes_twice_without_first_sight(monkeypatch):
    no_first_sight(monkeypatch)

    assert wrong(Liar(), torch.randn(4, 8)) == ["buffer calls"]


class Liar(nn.Module):
    """Counts its calls in a buffer that the operator's schema says is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).sin()
        return self.linear(h * torch.ops.lowtide_tests.counted(h.detach(), self.calls))


_library = registry.Library("lowtide_tests", "DEF")
_library.define("counted(Tensor x, Tensor calls) -> Tensor")
_library.define("noisy(Tensor x) -> Tensor")
_library.define("tally(Tensor x) -> Tensor")
_tally = torch.zeros(1)
_noise = iter(range(10**9))


def _counted(x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    calls.numpy()[0] += 1
    return x.sin()


def _noisy(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + next(_noise)


def _count_elsewhere(x: torch.Tensor) -> torch.Tensor:
    _tally.numpy()[0] += 1
    return x.sin()


_library.impl("counted", _counted, "CPU")
_library.impl("noisy", _noisy, "CPU")
_library.impl("tally", _count_elsewhere, "CPU")


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
    return packed.tensor if isinstance(packed, values.Kept) else bursts.unpacked(packed)


def written_after_forward(model: Net, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Overwrite, between forward and backward, an activation that only a replay reads."""
    plan = harshest(model, x)
    keep = {i for i, op in enumerate(plan.ops) if op.name == "aten.addmm.default"}
    plan = replace(
        plan,
        decisions=tuple(replace(d, action=SAVE) if d.op in keep else d for d in plan.decisions),
        ops=tuple(replace(op, needs=0) for op in plan.ops),
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
    monkeypatch.setattr(Recorder, "written", lambda self, storage: None)

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
    model, data = mlp(), torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1))
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
    monkeypatch.setattr(planning, "solve", lambda graph, costs, budget, **options: drop_everything(graph))

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
        monkeypatch.setattr(tape, "_forget_what_it_writes", lambda func, args, kwargs: None)
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


@pytest.mark.parametrize("forward", [turns_a_view_through_data, turns_a_view_that_needs_no_gradient])
@pytest.mark.parametrize("guarded", [True, False])
def test_a_view_that_is_assigned_to_through_data_is_refused(guarded, forward, monkeypatch):
    model, x = Net(forward), torch.randn(8, 8)
    if guarded:
        with pytest.raises(UnsupportedModelError, match=r"assigned to \(x.data = ...\) after an op"):
            lowtide.trace(model, x)
        return
    monkeypatch.setattr(looks.Looks, "returned", lambda self, tensor, storage, written: None)

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
    monkeypatch.setattr(Recorder, "fix", lambda self, number, reason: None)

    assert refilled(Net(scaled_and_shifted))


# -- writes the dispatcher cannot see, kernels that differ: the audit -------------------------------------------------


class ByPointer(torch.autograd.Function):
    """Fills its result through NumPy: the dispatcher only sees ``zeros_like``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        out.numpy()[:] = np.sin(x.numpy())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.saved_tensors[0]


INVISIBLE = {
    "aten.zeros_like.default": Net(lambda self, x: self.layers[1](ByPointer.apply(self.layers[0](x)))),
    "lowtide_tests.noisy.default": Net(
        lambda self, x: self.layers[1](self.layers[0](x) * torch.ops.lowtide_tests.noisy(x))
    ),
}


def trained_under_fit(model: nn.Module, x: torch.Tensor, patch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """(what differs from plain, warnings) of one step under a fit that drops everything."""
    global _noise
    patch.setattr(planning, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
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
def test_the_audit_finds_what_replays_differently_and_saves_it(name, monkeypatch):
    differs, warnings = trained_under_fit(INVISIBLE[name], torch.randn(4, 8), monkeypatch)

    assert differs == []
    assert warnings == [f"{name} in the model gives other bits when it runs again: saved from now on"]


@pytest.mark.parametrize("name", INVISIBLE)
def test_what_replays_differently_is_wrong_without_the_audit(name, monkeypatch):
    monkeypatch.setattr(planning.Planner, "_rehearse", lambda self, planned, batch, step: set())

    differs, _ = trained_under_fit(INVISIBLE[name], torch.randn(4, 8), monkeypatch)

    assert differs


class Tallies(nn.Module):
    """Its operator counts calls in a buffer that it is never handed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("tally", _tally)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).sin()
        return self.linear(h * torch.ops.lowtide_tests.tally(h.detach()))


@pytest.mark.parametrize("audited", [True, False])
def test_the_audit_finds_a_buffer_that_moves_in_replay(audited, monkeypatch):
    monkeypatch.setattr(planning, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
    if not audited:
        monkeypatch.setattr(planning.Planner, "_rehearse", lambda self, planned, batch, step: set())
    model, x = Tallies(), torch.randn(4, 8)
    fit = lowtide.fit(model, x, budget="100%")
    before = model.tally.item()

    model(x).square().mean().backward()
    fit.remove()

    assert model.tally.item() - before == (1 if audited else 2)


# -- a backward that overwrites what it unpacked ----------------------------------------------------------------------


class Overwrites(torch.autograd.Function):
    """sin, whose backward works in the memory of its saved input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.cos_().mul_(g)


def overwritten(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x)
    earlier = (h + 1.0).sin()  # its replay reads h after Overwrites has run backward
    return self.layers[1](x).exp() * 0.1 + earlier + Overwrites.apply(h)


def test_a_backward_may_overwrite_what_it_unpacked():
    assert wrong(Net(overwritten), torch.randn(4, 8)) == []


def test_a_backward_that_overwrites_what_it_unpacked_spoils_a_replay_without_the_guard(monkeypatch):
    monkeypatch.setattr(Recorder, "written", lambda self, storage: None)

    assert "gradient of layers.0.weight" in wrong(Net(overwritten), torch.randn(4, 8))


# -- autocast, flags --------------------------------------------------------------------------------------------------


def under_autocast_backward() -> list[str]:
    model, x = Net(lambda self, x: self.layers[1](self.layers[0](x).sin()).exp()), torch.randn(4, 8)
    plan = harshest(model, x)
    found = []
    for context in (contextlib.nullcontext(), lowtide.apply(ours := copy.deepcopy(model), plan)):
        used = model if isinstance(context, contextlib.nullcontext) else ours
        with context:
            loss = used(x).square().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        found.append(outcome(used, loss))
    return differing(*found)


def test_autocast_around_backward_does_not_reach_replays():
    assert under_autocast_backward() == []


def test_autocast_around_backward_reaches_replays_without_the_guard(monkeypatch):
    monkeypatch.setattr(bursts, "no_autocast", contextlib.nullcontext)

    assert under_autocast_backward()


def test_forward_under_autocast_is_replayed_with_its_casts():
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()

    assert wrong(mlp(), torch.randn(4, 16), step) == []


def test_replays_run_with_the_flags_of_forward_and_leave_those_of_backward():
    model, x = mlp(), torch.randn(4, 16)
    seen = []

    def replay(self: recipes.Recipe, **how: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        original(self, **how)

    original = recipes.Recipe.replay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes.Recipe, "replay", replay)
        with lowtide.apply(model, harshest(model, x)):
            loss = model(x).square().mean()
        try:
            torch.use_deterministic_algorithms(True)
            loss.backward()
            after = torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(False)

    assert seen
    assert not any(seen)
    assert after


# -- views and layouts ------------------------------------------------------------------------------------------------


def complex_conj(self: Net, x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(self.layers[0](x), self.layers[1](x))
    return torch.view_as_real(z * z.conj() * (z + 1).conj()).flatten(1)[:, :8]


def negative_bit(self: Net, x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(self.layers[0](x), self.layers[1](x))
    return self.layers[2](z.conj().imag.sin() * z.conj().imag)


def real_view(self: Net, x: torch.Tensor) -> torch.Tensor:
    z = torch.view_as_complex((self.layers[0](x) * 2).view(-1, 4, 2)) * (1 + 2j)
    return self.layers[1](torch.view_as_real(z * z).flatten(1).sin())


def dtype_view(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x)
    bits = (h.detach() * 1).view(torch.int32)  # another dtype over dropped memory
    return self.layers[1](h * (bits & 255).float())


def transposes(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x).t()[1:, ::2]
    return (h.sin() @ h.t().contiguous().narrow(1, 0, 4)).unfold(0, 2, 1).sin()


def pieces(self: Net, x: torch.Tensor) -> torch.Tensor:
    a, b = self.layers[0](x).sin().chunk(2, dim=-1)
    c, d = (a * b).unbind(0)[:2]
    return (c.expand(4, 4) * d * b.flip(0)).sin()


VIEWS = [complex_conj, negative_bit, real_view, dtype_view, transposes, pieces]


@pytest.mark.parametrize("forward", VIEWS, ids=lambda f: f.__name__)
def test_views_of_what_was_dropped_are_made_again(forward):
    assert wrong(Net(forward), torch.randn(4, 8)) == []


@pytest.mark.parametrize("forward", [complex_conj, negative_bit, transposes, pieces], ids=lambda f: f.__name__)
def test_views_are_wrong_without_their_strides_or_bits(forward, monkeypatch):
    def of(self: values.View, base: torch.Tensor) -> torch.Tensor:
        if base.is_complex() or forward in (complex_conj, negative_bit):
            return base.as_strided(self.size, self.stride, self.offset)
        size = self.size.numel()
        return base.contiguous().flatten().repeat(1 + size // base.numel())[:size].view(self.size)

    monkeypatch.setattr(values.View, "of", of)

    try:
        differs = wrong(Net(forward), torch.randn(4, 8))
    except RuntimeError as error:  # shapes or dtypes that no longer meet
        differs = [str(error)]
    assert differs


def sparse(self: Net, x: torch.Tensor) -> torch.Tensor:
    graph = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor([1.0, 2.0, 3.0]), (4, 4))
    h = torch.sparse.mm(graph, self.layers[0](x).sin())
    rows = torch.tensor([[0, 1, 3], [1, 2, 0]])
    learned = torch.sparse_coo_tensor(rows, self.layers[1].bias[:3].sin(), (4, 4))
    return self.layers[2](torch.sparse.mm(learned, h.sin()).sin())


def test_sparse_tensors_are_left_alone():
    model, x = Net(sparse), torch.randn(4, 8)
    plan = harshest(model, x)

    with lowtide.apply(copy.deepcopy(model), plan) as applied:
        model(x)

    assert applied.counts.mismatched == 0
    assert wrong(model, x) == []


def test_sparse_gradients_arrive_as_plainly():
    embed = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8), nn.GELU())

    assert wrong(embed, torch.randint(0, 16, (4, 5))) == []


def test_sparse_tensors_break_the_trace_without_the_guard(monkeypatch):
    monkeypatch.setattr(recorder, "storage_of", torch.Tensor.untyped_storage)

    with pytest.raises(LowtideError, match="Cannot access storage of SparseTensorImpl"):
        lowtide.trace(Net(sparse), torch.randn(4, 8))


# -- random ops -------------------------------------------------------------------------------------------------------


def dropout(self: Net, x: torch.Tensor) -> torch.Tensor:
    return self.layers[1](F.dropout(self.layers[0](x).sin(), 0.4))


def dropout_twice(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = F.dropout(self.layers[0](x), 0.3)
    return F.dropout(self.layers[1](F.dropout(h.sin(), 0.5)), 0.2)


def noise(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x)
    return self.layers[1](h * torch.rand_like(h) + torch.randn(4, 8) * h.sin()) * torch.bernoulli(h.sigmoid())


def attention(self: Net, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (layer(x).view(1, 1, 4, 8) for layer in self.layers)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)


def drawn(forward: Callable[..., Any]) -> tuple[list[str], bool]:
    """(what differs, the generator was left elsewhere than by the plain step)."""
    model, x = Net(forward), torch.randn(4, 8)
    plan = harshest(model, x)
    expected = plain(model, x)
    end = torch.get_rng_state()
    found = planned(model, x, plan)
    return differing(expected, found), not torch.equal(end, torch.get_rng_state())


@pytest.mark.parametrize("forward", [dropout, dropout_twice, noise, attention], ids=lambda f: f.__name__)
def test_random_ops_draw_the_same_again_and_leave_the_generator_where_plain_does(forward):
    assert drawn(forward) == ([], False)


@pytest.mark.parametrize("forward", [dropout, dropout_twice, noise, attention], ids=lambda f: f.__name__)
def test_random_ops_draw_anew_without_the_recorded_state(forward, monkeypatch):
    monkeypatch.setattr(GeneratorState, "restored", contextlib.nullcontext)

    differs, moved = drawn(forward)

    assert differs
    assert moved


def test_a_private_generator_is_never_drawn_from_twice():
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        source = torch.Generator().manual_seed(3)
        h = model(x)
        mask = torch.rand(h.shape, generator=source)
        loss = (h * mask * torch.rand(h.shape, generator=source)).sin().square().mean()
        left.append(source.get_state())
        return loss

    left: list[torch.Tensor] = []
    assert wrong(mlp(), torch.randn(4, 16), step) == []
    assert all(torch.equal(state, left[0]) for state in left)


# -- in-place chains --------------------------------------------------------------------------------------------------


def in_place_chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.3, inplace=True),
        nn.Linear(8, 8), nn.Hardtanh(inplace=True), nn.ReLU(inplace=True),
    )  # fmt: skip


def out_argument(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x)
    table = self.layers[2].weight.data
    scale = (table * 2).sin()  # reads the table before it changes
    torch.add(table, 1.0, out=table)
    return self.layers[1](h @ scale).sin() @ table


def index_written(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x).sin() * 2
    cache = torch.zeros(4, 8)
    cache[:2] = h[:2]
    cache[2:] = h[2:].cos()
    return self.layers[1](cache).sin()


CHAINS = {
    "modules": in_place_chain,
    "out=": lambda: Net(out_argument),
    "indices": lambda: Net(index_written),
}


@pytest.mark.parametrize("make", CHAINS.values(), ids=list(CHAINS))
def test_in_place_chains_are_right(make):
    assert wrong(make(), torch.randn(4, 8)) == []


def no_versions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recorder, "written", lambda self, storage: None)
    patch.setattr(values.Kept, "__init__", _unversioned)


def no_finish(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recipes.Recipe, "extend", lambda self, *args: None)


@pytest.mark.parametrize(("chain", "remove"), [("modules", no_finish), ("out=", no_versions)])
def test_in_place_chains_are_wrong_without_the_guard(chain, remove, monkeypatch):
    remove(monkeypatch)

    assert wrong(CHAINS[chain](), torch.randn(4, 8))


def _unversioned(self: values.Kept, tensor: torch.Tensor) -> None:
    self.tensor = tensor.detach()  # with a counter of its own
    self.version = self.tensor._version


def finished_with_what_is_written_later(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x)
    finished = self.layers[1](x).sin().add_(h)
    h.mul_(2)
    return (finished * finished + h).sin()


def test_what_was_finished_with_memory_that_is_written_later_is_saved():
    assert wrong(Net(finished_with_what_is_written_later), torch.randn(4, 8)) == []


def read_before_it_is_finished(self: Net, x: torch.Tensor, peek: bool = False) -> torch.Tensor:
    h = self.layers[0](x)
    early = self.layers[1](h) if peek else 0  # stores h as it is now
    return self.layers[2](h.relu_()).sin() + early


def test_an_inplace_op_is_no_part_of_a_recipe_that_somebody_holds_already():
    model, x = Net(read_before_it_is_finished), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        plain(model, {"x": x, "peek": True})
    plan = harshest(model, x)

    with lowtide.apply(model, plan) as applied:
        loss = model(x, peek=True).square().mean()
    assert applied.counts.mismatched
    with contextlib.suppress(RuntimeError):  # plain's error, or the gradient of what was stored
        loss.backward()
        exact = Net(lambda self, x: self.layers[2](self.layers[0](x).relu()).sin() + self.layers[1](self.layers[0](x)))
        exact.load_state_dict(model.state_dict())
        found, expected = outcome(model, loss), plain(exact, x)
        assert all(torch.allclose(found[n], expected[n], atol=1e-6) for n in found)


# -- the op sequence changes ------------------------------------------------------------------------------------------


def branching(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x).sin()
    h = (h * 2).exp() if x.sum() > 0 else F.dropout(h.cos(), 0.5)
    return self.layers[2](self.layers[1](h).sin()).exp()


def test_another_branch_is_counted_as_drift_and_right():
    model, x = Net(branching), torch.ones(4, 8)
    plan = harshest(model, x)

    ours = copy.deepcopy(model)
    torch.manual_seed(7)
    with lowtide.apply(ours, plan) as applied:
        loss = ours(-x).square().mean()
    loss.backward()

    assert differing(plain(model, -x), outcome(ours, loss)) == []
    assert applied.counts.mismatched > 0
    assert applied.counts.unplanned > 0


def test_fit_makes_a_new_plan_when_the_ops_drift(monkeypatch):
    monkeypatch.setattr(planning, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
    model, x = Net(branching), torch.ones(4, 8)
    fit = lowtide.fit(model, x, budget="100%")
    first = fit.plan
    assert first.counts[RECOMPUTE]

    for _ in range(3):
        model.zero_grad()
        torch.manual_seed(7)
        loss = model(-x).square().mean()
        loss.backward()
        bare = copy.deepcopy(model)
        assert differing(plain(bare, -x), outcome(model, loss)) == []
    fit.remove()

    assert len(set(map(id, [first, *fit.plans.values()]))) == 2


class CountsOnDemand(Liar):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).sin()
        other = h.detach().cos() if x.sum() > 0 else torch.ops.lowtide_tests.counted(h.detach(), self.calls)
        return self.linear(h * other)


@pytest.mark.parametrize("matched", [True, False])
def test_an_op_that_is_not_the_planned_one_is_never_dropped(matched, monkeypatch):
    if not matched:
        monkeypatch.setattr(Slot, "names", lambda self, func: self._is(func) or True)
    model, x = CountsOnDemand(), torch.ones(4, 8)
    plan = harshest(model, x)

    assert (differing(plain(model, -x), planned(model, -x, plan)) == []) is matched


# -- what recipes hold ------------------------------------------------------------------------------------------------


def pinning(self: Net, x: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(4, 4096).fill_(0.5)  # cannot be made again, and nothing stores it
    return self.layers[1](self.layers[0](x) * wide.sum(-1, keepdim=True))


def test_the_exact_method_never_pins_more_than_it_saves():
    model, x = Net(pinning), torch.randn(4, 8)
    graph = lowtide.trace(model, x)
    costs = lowtide.Costs(op_ms=(1.0,) * len(graph.ops))
    everything = drop_everything(graph)
    exact = lowtide.solve(graph, costs, budget="100%")

    measured = {}
    for name, plan in (("everything", everything), ("exact", exact)):
        proof = lowtide.verify(model, x, plan, rounds=0)
        measured[name], measured["plain"] = proof.measured_peak_bytes, proof.plain_peak_bytes

    assert measured["everything"] >= measured["plain"]  # the danger is there
    assert measured["exact"] <= measured["plain"]
    assert not any(d.action == SAVE and not d.stored for d in exact.decisions)


def reused(model: nn.Module, x: torch.Tensor) -> list[str]:
    """A dropped storage dies and its address is given out again within one forward pass."""
    return differing(plain(model, x), planned(model, x, harshest(model, x)))


def many_of_one_size(self: Net, x: torch.Tensor) -> torch.Tensor:
    source = torch.Generator().manual_seed(5)
    for layer in self.layers:
        for _ in range(4):
            x = layer(x).sin()
            x = x * torch.rand(x.shape, generator=source)  # never dropped, in memory that just became free
    return x


def test_an_address_used_again_is_another_storage():
    assert reused(Net(many_of_one_size), torch.randn(64, 8)) == []


def test_an_address_used_again_gives_another_tensor_if_storages_go_by_address(monkeypatch):
    by_address: dict[int, values.Value] = {}
    original = values.stand_in

    def stand_in(tensor: torch.Tensor, run: object) -> values.Value | values.View | None:
        stands = original(tensor, run)
        if stands is not None:
            by_address[tensor.untyped_storage().data_ptr()] = stands.value
        value = by_address.get(tensor.untyped_storage().data_ptr())
        return values.View(value, tensor) if value is not None and value.run is run else None

    monkeypatch.setattr(tape, "stand_in", stand_in)
    monkeypatch.setattr(recipes, "stand_in", stand_in)

    assert reused(Net(many_of_one_size), torch.randn(64, 8))


# -- backward in every form -------------------------------------------------------------------------------------------


def test_a_second_backward_replays_no_more_than_the_first_and_is_equal():
    model, x = mlp(6), torch.randn(4, 16)
    with lowtide.apply(model, harshest(model, x)):
        loss = model(x).square().mean()
    found, counts = [], []
    for retain in (True, True, False):
        model.zero_grad()
        with replays() as seen:
            loss.backward(retain_graph=retain)
        found.append(outcome(model, loss))
        counts.append(len(seen))

    assert counts[0] == len({id(r) for r in seen}) > 0  # each recipe once
    assert counts[1:] == counts[:1] * 2
    assert differing(found[0], found[1]) == differing(found[0], found[2]) == []
    assert differing(found[0], plain(model, x)) == []


def left_by_a_retained_backward() -> int:
    """Replayed tensors alive after ``backward(retain_graph=True)``."""
    model, x = mlp(6), torch.randn(4, 16)
    with lowtide.apply(model, harshest(model, x)):
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    return sum(isinstance(o, values.Value) and o.tensor is not None for o in gc.get_objects())


def test_a_retained_backward_leaves_no_replayed_tensor_behind():
    assert left_by_a_retained_backward() == 0


def test_a_retained_backward_keeps_what_it_replayed_without_use_counts(monkeypatch):
    monkeypatch.setattr(recipes, "graph_task_keeps_graph", lambda: False)

    assert left_by_a_retained_backward() > 0


def long_chain(length: int = 20_000) -> tuple[nn.Module, torch.Tensor, Any]:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = model(x)
        for _ in range(length // 2):
            x = x.sin() * 1.01
        return x.sum()

    return nn.Linear(2, 2), torch.randn(2, 2), step


def test_a_chain_of_20000_ops_neither_overflows_nor_replays_twice():
    model, x, step = long_chain()
    plan = harshest(model, x, step)
    with lowtide.apply(model, plan):
        loss = step(model, x)
        dropped = step(model, x)
    with replays() as seen:
        loss.backward()
    assert len(seen) == len({id(r) for r in seen}) == sum(d.action == RECOMPUTE for d in plan.decisions)

    del loss, dropped  # a graph that never runs backward is freed without recursion, too


def test_a_chain_of_recipes_overflows_if_replayed_recursively(monkeypatch):
    def materialise(value: values.Value) -> torch.Tensor:
        if value.tensor is None:
            for needed in value.recipe.inputs:
                materialise(needed)
            value.recipe.replay(keep=False)
        return value.tensor

    monkeypatch.setattr(bursts, "materialise", materialise)
    model, x, step = long_chain(4000)
    with lowtide.apply(model, harshest(model, x, step)):
        loss = step(model, x)

    with pytest.raises(RecursionError):
        loss.backward()


LONG = """
import sys, threading
import torch, lowtide
from lowtide.tracing.recorder import Recorder

def step(model, x):
    for _ in range(2000):
        x = x.sin() * model.weight
    return x.sum()

if sys.argv[1] == "unguarded":
    Recorder.forget_nodes = lambda self: self._nodes.clear()
model = torch.nn.LayerNorm(8)
threading.stack_size(256 * 1024)  # a chain of 100,000 ops overflows the usual 8 MiB as well
thread = threading.Thread(target=lambda: print(len(lowtide.trace(model, torch.ones(8), step=step).forward_ops)))
thread.start()
thread.join()
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_freeing_the_graph_of_a_long_traced_step_overflows_no_stack(guarded):
    done = subprocess.run(
        [sys.executable, "-c", LONG, "guarded" if guarded else "unguarded"], capture_output=True, text=True
    )

    if guarded:
        assert (done.returncode, done.stdout, done.stderr) == (0, "4001\n", "")
    else:
        assert done.returncode == -signal.SIGSEGV


def test_double_backward_is_exact():
    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sin().square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in grads)

    model, x = mlp(), torch.randn(4, 16)
    graph_of_forward = harshest(model, x)
    ours = copy.deepcopy(model)
    with lowtide.apply(ours, graph_of_forward) as applied:
        loss = ours(x).sin().square().mean()
    grads = torch.autograd.grad(loss, list(ours.parameters()), create_graph=True)
    total = loss + sum(g.square().sum() for g in grads)
    total.backward()

    assert applied.counts.dropped
    assert differing(plain(model, x, penalty), outcome(ours, total)) == []


def test_double_backward_inside_the_region_is_exact():
    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in grads)

    model, x = mlp(), torch.randn(4, 16)

    assert differing(plain(model, x, penalty), planned(model, x, harshest(model, x), penalty)) == []
    assert wrong(model, x, penalty) == []


def test_a_partial_backward_and_then_the_rest_are_equal():
    def partial(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        middle = model[:4](x)
        last = model[4:](middle).square().mean()
        (g,) = torch.autograd.grad(last, middle)
        found.append(g)
        middle.backward(g)
        return last

    found: list[torch.Tensor] = []
    model, x = mlp(), torch.randn(4, 16)
    plan = harshest(model, x, lambda m, x: m[4:](m[:4](x)).square().mean())
    bare, ours = copy.deepcopy(model), copy.deepcopy(model)
    expected = partial(bare, x)
    with lowtide.apply(ours, plan) as applied:
        middle = ours[:4](x)
        last = ours[4:](middle).square().mean()
    (g,) = torch.autograd.grad(last, middle)
    middle.backward(g)

    assert applied.counts.dropped
    assert torch.equal(found[0], g)
    assert differing(outcome(bare, expected), outcome(ours, last)) == []


def test_a_look_at_a_saved_tensor_uses_nothing_up():
    model, x = mlp(), torch.randn(4, 16)
    with lowtide.apply(model, harshest(model, x)):
        out = model(x)
        loss = out.square().mean()

    first = out.grad_fn._saved_self.clone()
    assert torch.equal(first, out.grad_fn._saved_self)
    loss.backward()
    assert differing(plain(model, x), outcome(model, loss)) == []


# -- where hooks are forbidden ----------------------------------------------------------------------------------------


def test_a_model_called_under_a_functional_transform_runs_plainly():
    model, x = mlp(), torch.randn(4, 16)
    weights = {n: p.detach() for n, p in model.named_parameters()}

    def loss(w: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, w, (x,)).square().mean()

    expected = torch.func.grad(loss)(weights)
    fit = lowtide.fit(model, x, budget="100%")
    found = torch.func.grad(loss)(weights)
    per_row = torch.vmap(lambda row: model(row))(x)
    fit.remove()

    assert all(torch.equal(expected[n], found[n]) for n in expected)
    assert per_row.shape == x.shape


def inner_gradient(self: Net, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.grad(lambda y: y.sin().sum())(x)
    return self.layers[1](self.layers[0](slope).sin()).sin()


def no_hooks_allowed(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x).sin()
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        h = self.layers[1](h).sin()
    return self.layers[2](h).sin()


def batched(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x).sin()
    return self.layers[1](torch.vmap(lambda row: row.sin() * row)(h)).sin()


@pytest.mark.parametrize("forward", [inner_gradient, no_hooks_allowed, batched], ids=lambda f: f.__name__)
def test_where_forward_forbids_hooks_the_step_is_right_or_refused_by_name(forward):
    model, x = Net(forward), torch.randn(4, 8)
    try:
        assert wrong(model, x) == []
    except LowtideError as error:
        assert "hooks" in str(error)
    assert is_clean(model)


# -- threads ----------------------------------------------------------------------------------------------------------


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(jobs)

    def run(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_two_models_train_in_two_threads_at_once():
    models = [mlp(5), mlp(7)]
    x = torch.randn(4, 16)
    plans = [harshest(m, x) for m in models]
    together = threading.Barrier(2, timeout=20)

    def job(number: int) -> list[list[str]]:
        found = []
        for _ in range(5):
            ours = copy.deepcopy(models[number])
            together.wait()
            with lowtide.apply(ours, plans[number]):
                together.wait()
                loss = ours(x).square().mean()
            loss.backward()
            found.append(differing(outcome(ours, loss), expected[number]))
        return found

    expected = [plain(m, x) for m in models]
    assert in_threads(lambda: job(0), lambda: job(1)) == [[[]] * 5] * 2


def test_one_fitted_model_is_called_in_two_threads_at_once():
    both_inside = threading.Barrier(2, timeout=20)

    def meet(self: Net, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x).sin()
        if threading.current_thread() is not threading.main_thread():
            both_inside.wait()
        h = self.layers[1](h).sin()
        if threading.current_thread() is not threading.main_thread():
            both_inside.wait()
        return self.layers[2](h).sin()

    model, x = Net(meet), torch.randn(64, 8)
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().mean(), weights)
    with pytest.raises(lowtide.BudgetInfeasibleError) as least:
        lowtide.fit(model, x, budget=1)
    fit = lowtide.fit(model, x, budget=least.value.least_bytes)
    assert fit.plan.counts[RECOMPUTE]

    found = in_threads(*[lambda: torch.autograd.grad(model(x).square().mean(), weights)] * 2)
    fit.remove()

    assert all(torch.equal(a, b) for grads in found for a, b in zip(grads, expected))


def test_backward_may_run_in_another_thread():
    model, x = mlp(), torch.randn(4, 16)
    with lowtide.apply(model, harshest(model, x)):
        loss = model(x).square().mean()

    in_threads(loss.backward)

    assert differing(plain(model, x), outcome(model, loss)) == []


def test_concurrent_backward_passes_over_shared_recipes_are_equal():
    model, x = mlp(), torch.randn(4, 16)
    with lowtide.apply(model, harshest(model, x)):
        out = model(x)
        losses = [out.square().mean(), out.sin().sum()]
    weights = list(model.parameters())
    jobs = [lambda loss=loss: torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses]
    alone = [job() for job in jobs]

    together = in_threads(*jobs)

    assert all(torch.equal(a, b) for one, two in zip(alone, together) for a, b in zip(one, two))


# -- exceptions -------------------------------------------------------------------------------------------------------


class Trouble(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.at: str = ""
        self.kind: type[BaseException] = RuntimeError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.at == "forward":
            raise self.kind("trouble")
        if self.at == "backward":
            x = x * 1
            x.register_hook(self._fail)
        return x * 1

    def _fail(self, grad: torch.Tensor) -> None:
        raise self.kind("trouble")


@pytest.mark.parametrize("at", ["forward", "backward"])
@pytest.mark.parametrize(
    ("how", "kind"),
    [("apply", RuntimeError), ("apply", KeyboardInterrupt), ("fit", KeyboardInterrupt), ("step_region", SystemExit)],
)
def test_an_exception_leaves_nothing_behind(how, at, kind):
    model = nn.Sequential(*mlp(2), trouble := Trouble(), *mlp(2))
    x = torch.randn(4, 16)
    expected = plain(model, x)
    plan = harshest(model, x)
    fit = lowtide.fit(model, x, budget="100%") if how != "apply" else None
    if fit is not None:  # the solver may keep all of so small a step
        fit._planned[0].tape.program.slots[:] = (program := tape_program(plan)).slots
        fit._planned[0].tape.program.nodes[:] = program.nodes
        enter = fit.step_region if how == "step_region" else contextlib.nullcontext
    else:
        enter = lambda: lowtide.apply(model, plan)  # noqa: E731
    trouble.at, trouble.kind = at, kind
    with pytest.raises(kind, match="trouble"):
        with enter():
            loss = model(x).square().mean()
            loss.backward()
    trouble.at = ""
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    for again in (True, False):  # the next step under the plan, then a plain one
        if not again and fit is not None:
            fit.remove()
        model.zero_grad()
        torch.manual_seed(7)
        with enter() if again else contextlib.nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        assert differing(expected, outcome(model, loss)) == []
    assert is_clean(model)


def tape_program(plan: lowtide.Plan) -> Any:
    from lowtide.tape.attach import program_of

    return program_of(plan)


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_an_exception_while_planning_leaves_nothing_behind(at):
    model = nn.Sequential(*mlp(2), trouble := Trouble(), *mlp(2))
    x = torch.randn(4, 16)
    expected = plain(model, x)
    trouble.at, trouble.kind = at, KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lowtide.fit(model, x, budget="50%")
    trouble.at = ""

    assert is_clean(model)
    assert all(p.grad is None for p in model.parameters())
    assert differing(expected, plain(model, x)) == []


# -- memory -----------------------------------------------------------------------------------------------------------


def test_activations_die_with_backward_and_without_the_collector():
    model, x = mlp(), torch.randn(4, 16)
    watched: list[weakref.ref] = []
    for module in model:
        module.register_forward_hook(lambda m, args, out: watched.append(weakref.ref(out)))
    plan = harshest(model, x)
    watched.clear()
    gc.disable()
    try:
        with lowtide.apply(model, plan):
            loss = model(x).square().mean()
        assert sum(w() is not None for w in watched) == 0
        loss.backward()
        del loss
        held = sum(isinstance(o, (recipes.Recipe, values.Value)) for o in gc.get_objects())
    finally:
        gc.enable()

    assert held == 0


def test_a_forward_that_never_runs_backward_frees_its_recipes_without_the_collector():
    model, x = mlp(), torch.randn(4, 16)
    plan = harshest(model, x)
    gc.disable()
    try:
        with lowtide.apply(model, plan):
            loss = model(x).square().mean()
        del loss
        held = sum(isinstance(o, (recipes.Recipe, values.Value)) for o in gc.get_objects())
    finally:
        gc.enable()

    assert held == 0


def test_repeated_steps_leave_no_more_tensors_behind():
    model, x = mlp(), torch.randn(4, 16)
    plan = harshest(model, x)
    counts = []
    for _ in range(4):
        with lowtide.apply(model, plan):
            model(x).square().mean().backward()
        counts.append(live_tensors())

    assert counts[1:] == counts[1:2] * 3


def test_peak_under_everything_dropped_is_what_was_predicted():
    model, x = mlp(6, 64), torch.randn(128, 64)
    plan = harshest(model, x)
    proof = lowtide.verify(model, x, plan, rounds=0)

    assert proof.equal, proof.differing
    assert abs(proof.measured_peak_bytes - proof.predicted_peak_bytes) <= 0.001 * proof.predicted_peak_bytes


# -- refused by name --------------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A wrapper subclass, as quantised and sharded weights are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(t: Any) -> Any:
            return t.inner if isinstance(t, Wrapped) else t

        result = func(*map(unwrap, args), **(kwargs or {}))
        return Wrapped(result) if func is torch.ops.aten.detach.default else result


def subclass_weight() -> nn.Module:
    model = mlp()
    model[2].weight = nn.Parameter(Wrapped(torch.randn(16, 16)), requires_grad=False)
    return model


REFUSED = {
    "DataParallel": (
        lambda: nn.DataParallel(mlp()),
        "the model is a DataParallel, which the tape does not carry out yet.\n"
        "Fit the module inside it, or train without lowtide.",
    ),
    "subclass weight": (
        subclass_weight,
        "parameter 2.weight is a Wrapped: subclass parameters other than DTensors are not taped yet.\n"
        "Fit the model before it is quantised, or train without lowtide.",
    ),
}


@pytest.mark.parametrize("verb", ["trace", "fit", "apply"])
@pytest.mark.parametrize("case", REFUSED)
def test_wrapped_and_subclass_models_are_refused_by_name(case, verb):
    make, message = REFUSED[case]
    plan = harshest(mlp(), x := torch.randn(4, 16))
    model = make()
    before = [m._compiled_call_impl for m in model.modules()]

    with pytest.raises(UnsupportedModelError) as error:
        if verb == "apply":
            with lowtide.apply(model, plan):
                pass
        else:
            {"trace": lowtide.trace, "fit": lowtide.fit}[verb](model, x)

    assert str(error.value) == message
    assert [m._compiled_call_impl for m in model.modules()] == before


def test_a_subclass_that_only_appears_in_the_step_is_refused_by_name():
    model = Net(lambda self, x: self.layers[0](x).sin() @ Wrapped(torch.randn(8, 8)))

    with pytest.raises(UnsupportedModelError, match=r"got a .*Wrapped in module \(the step\)|Wrapped"):
        lowtide.trace(model, torch.randn(4, 8))
    assert is_clean(model)


def test_without_the_refusal_a_subclass_weight_is_taped(monkeypatch):
    from lowtide.tracing import tracer

    monkeypatch.setattr(recorder, "PLAIN_TYPES", (*operators.PLAIN_TYPES, Wrapped))
    monkeypatch.setattr(tracer, "check_supported", lambda model: None)

    lowtide.trace(subclass_weight(), torch.randn(4, 16))  # no error names the subclass any more


def test_a_compiled_function_inside_forward_is_right_or_refused_by_name():
    torch._dynamo.reset()
    inner = torch.compile(lambda h: F.dropout(h.sin() * h.cos(), 0.5), backend="aot_eager")
    model, x = Net(lambda self, x: self.layers[1](inner(self.layers[0](x))).sin()), torch.randn(4, 8)
    try:
        plan = harshest(model, x)
        torch.manual_seed(7)
        bare = copy.deepcopy(model)
        expected = bare(x).square().mean()
        expected.backward()
        torch.manual_seed(7)
        with lowtide.apply(model, plan):
            loss = model(x).square().mean()
        loss.backward()
        assert differing(outcome(bare, expected), outcome(model, loss)) == []
    except UnsupportedModelError as error:
        assert "compile" in str(error)
    finally:
        torch._dynamo.reset()
    assert is_clean(model)


# -- drift must not make recipes hold what the plan lets go -------------------------------------------------------


class _Wide(nn.Module):
    """Makes something wide, in one of two ways."""

    def __init__(self):
        super().__init__()
        self.other, self.made = False, []

    def forward(self, x):
        wide = (x * 1 if self.other else x).repeat(1, 64)
        self.made.append(weakref.ref(wide.untyped_storage()))
        return wide


def wide_lives_on_after_drift() -> bool:
    narrow = Net(lambda _, wide: wide.view(4, 64, 8).mean(1))
    model, x = nn.Sequential(nn.Linear(8, 8), _Wide(), narrow, nn.Linear(8, 8)), torch.randn(4, 8)
    plan = harshest(model, x)
    model[1].other = True
    with lowtide.apply(model, plan) as applied:
        loss = model(x).square().mean()
    assert applied.counts.mismatched
    alive = model[1].made[-1]() is not None
    loss.backward()
    return alive


class Checkpointed(nn.Module):
    """Its middle is checkpointed already."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(3))
        self.first, self.middle, self.last = parts
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(torch.utils.checkpoint.checkpoint(self.middle, h, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_that_is_checkpointed_already_is_right(reentrant):
    model, x = Checkpointed(reentrant), torch.randn(8, 16)
    plan = harshest(model, x)

    assert any(d.action == RECOMPUTE for d in plan.decisions)
    assert differing(plain(model, x), planned(model, x, plan)) == []


def test_drift_adds_no_strong_references():
    assert not wide_lives_on_after_drift()


def test_drift_adds_strong_references_without_the_count_of_dropped_inputs(monkeypatch):
    monkeypatch.setattr(tape.Slot, "needs", property(lambda slot: 0, lambda slot, count: None), raising=False)
    assert wide_lives_on_after_drift()


# -- a second backward after an optimizer fused into the first ---------------------------------------------------


def second_backward_under_a_fused_optimizer(planned_too: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Net(lambda net, x: net.layers[1](net.layers[0](x).sin().exp())), torch.randn(4, 8)

    def update(p):
        p.data.add_(p.grad, alpha=-0.1)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    plan = harshest(model, x) if planned_too else None
    with lowtide.apply(model, plan) if plan else contextlib.nullcontext():
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return model.state_dict()


def test_a_second_backward_under_a_fused_optimizer_is_refused():
    with pytest.raises(ReplayError, match="post-accumulate hooks"):
        second_backward_under_a_fused_optimizer(planned_too=True)


def test_a_second_backward_under_a_fused_optimizer_is_wrong_without_the_refusal(monkeypatch):
    monkeypatch.setattr("lowtide.tape.ambient.Ambient.steps_in_backward", lambda self: False)
    ours, plain_state = (second_backward_under_a_fused_optimizer(planned_too=flag) for flag in (True, False))
    assert not all(torch.equal(ours[name], plain_state[name]) for name in plain_state)
