"""Guards around a kernel that runs again: flags, layouts, generators, in-place chains.

Each guard fires, and with each taken out the harm it prevents comes back. Plans here drop every storage that may be
dropped, the setting with the most ways to go wrong.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support.guards import IN_PLACE, wrong
from support.training_steps import (
    Net,
    differing,
    harshest,
    mlp,
    outcome,
    plain,
    planned,
)
from torch import nn

import lowtide
from lowtide import LowtideError
from lowtide.recording import live_storages
from lowtide.recording.graph_builder import GraphBuilder
from lowtide.simulation import simulator
from lowtide.solvers import graph_queries
from lowtide.step.execution_state import GeneratorState
from lowtide.tape import recipes, replay, values

pytestmark = pytest.mark.usefixtures("one_thread")


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
    monkeypatch.setattr(GraphBuilder, "mark_written", lambda self, storage: None)

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
        with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
            loss.backward()
        found.append(outcome(used, loss))
    return differing(*found)


def test_autocast_around_backward_does_not_reach_replays():
    assert under_autocast_backward() == []


def test_autocast_around_backward_reaches_replays_without_the_guard(monkeypatch):
    monkeypatch.setattr(replay, "no_autocast", contextlib.nullcontext)

    assert under_autocast_backward()


def test_forward_under_autocast_is_replayed_with_its_casts():
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
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

    monkeypatch.setattr(values.View, "view_of", of)

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
    monkeypatch.setattr(live_storages, "storage_of", torch.Tensor.untyped_storage)

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
    """(what differs, whether the generator's state differs from the plain step's)."""
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
def test_random_ops_draw_other_numbers_without_the_recorded_state(forward, monkeypatch):
    monkeypatch.setattr(GeneratorState, "restored", contextlib.nullcontext)

    differs, moved = drawn(forward)

    assert differs
    assert moved


def test_a_private_generator_is_never_drawn_from_twice():
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        source = torch.Generator(torch.get_default_device()).manual_seed(3)
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
    patch.setattr(GraphBuilder, "mark_written", lambda self, storage: None)
    for module in (graph_queries, simulator):
        patch.setattr(module, "ops_written_under", lambda graph: frozenset())
    patch.setattr(values.Kept, "__init__", _unversioned)


def no_inplace_ops_in_recipes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recipes.Recipe, "extend", lambda self, *args: None)


@pytest.mark.parametrize(("chain", "remove"), [("modules", no_inplace_ops_in_recipes), ("out=", no_versions)])
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
