"""Data parallel training on two ranks: bitwise what it is without lowtide, each rank under its own plan."""

import pytest
import torch
from support import ranks, sharded_training
from support.quick import is_quick, thorough_but
from support.ranks import on_every_rank

from lowtide.plan import RECOMPUTE
from lowtide.step import data_parallel

QUICK_WAYS = ("static graph", "no_sync")


@pytest.fixture(scope="module")
def trained():
    return on_every_rank(ranks.all_ways, QUICK_WAYS if is_quick() else [*ranks.WAYS])


@pytest.mark.parametrize("fitted", ["before", "after"])
@pytest.mark.parametrize("way", thorough_but(QUICK_WAYS, ranks.WAYS))
def test_data_parallel_training_is_bitwise_the_same(way, fitted, trained):
    for told in trained:
        plain, ours = told[way, ""], told[way, fitted]
        for what in ("losses", "gradients", "weights"):
            assert ours[what] == plain[what]
        assert ours["dropped"] > 0 and not ours["warnings"]
        assert ours["plan"].counts[RECOMPUTE] > 0


def test_a_rehearsal_that_the_reducer_notices_spoils_a_static_graph():
    assert all(on_every_rank(ranks.noticed))


def test_ranks_may_have_different_plans():
    first, second = told = on_every_rank(ranks.budgets, "85%", "60%")

    assert second["plan"].predicted_fraction <= 0.6 < first["plan"].predicted_fraction
    assert first["plan"].decisions != second["plan"].decisions
    for ours in told:
        assert all(ours[what] == ours["plain"][what] for what in ("losses", "gradients", "weights"))


@pytest.mark.parametrize(
    "budgets",
    [
        pytest.param(ranks.budgets, id="replicas", marks=pytest.mark.thorough),
        pytest.param(sharded_training.with_a_budget, id="shards"),
    ],
)
def test_a_budget_that_one_rank_cannot_keep_is_refused_on_all(budgets):
    first, second = on_every_rank(budgets, "90%", 1)

    assert first == second and int(first) > 1


@pytest.mark.parametrize(
    "fitted",
    [
        pytest.param(ranks.without_a_loss, id="replicas"),
        pytest.param(sharded_training.without_a_loss, id="shards", marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_cannot_be_traced_stops_all(fitted):
    first, second = on_every_rank(fitted, 1)

    assert "failed on rank 1" in first and "StepError" in first
    assert second.startswith("StepError")


def test_aliases_share_memory_and_leave_nothing_behind(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LSTM(4, 4))
    model[0].tied = model[0].weight
    before = dict(model.named_parameters())
    flat = list(model[1]._flat_weights)
    monkeypatch.setattr(data_parallel, "ddp_wrapper_of", lambda model: object())

    with data_parallel.preserve_ddp_state(model):
        inside = dict(model.named_parameters())
        assert list(inside) == list(before)
        assert all(inside[n] is not p and inside[n].data_ptr() == p.data_ptr() for n, p in before.items())
        assert model[0].tied is model[0].weight
        assert all(a is not b for a, b in zip(model[1]._flat_weights, flat, strict=True))

    assert all(a is b for a, b in zip(model.parameters(), before.values(), strict=True))
    assert all(a is b for a, b in zip(model[1]._flat_weights, flat, strict=True))
