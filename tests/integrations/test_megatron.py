"""Megatron-Core's GPT on the CPU, in a plain loop: bitwise what it is without lowtide, within the budget."""

from importlib.util import find_spec

import pytest
from support import megatron_training
from support.quick import is_quick, thorough_but
from support.ranks import on_every_rank

from lowtide.plan import RECOMPUTE

# Only the rank imports it, which takes seconds.
pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")

QUICK_WAYS, QUICK_RECOMPUTING = ("attention dropout",), ("full",)


@pytest.fixture(scope="module")
def alone():
    """Both in one process, which imports Megatron once."""
    ways = QUICK_WAYS if is_quick() else [*megatron_training.WAYS]
    recomputing = QUICK_RECOMPUTING if is_quick() else [*megatron_training.RECOMPUTING]
    return on_every_rank(megatron_training.alone, ways, recomputing, world=1)[0]


def bitwise_the_same(a, b):
    return a["losses"] == b["losses"] and a["weights"] == b["weights"]


@pytest.mark.parametrize("way", thorough_but(QUICK_WAYS, megatron_training.WAYS))
def test_a_gpt_trains_the_same_within_the_budget(way, alone):
    plain, ours = alone["trained", way]

    assert bitwise_the_same(ours, plain)
    assert ours["status"].in_force and ours["status"].planned_steps in (4, 5) and ours["mismatched"] == 0
    assert ours["plan"].counts[RECOMPUTE] > 0
    assert max(ours["peaks"][2:]) <= ours["status"].budget_bytes < min(plain["peaks"])


@pytest.mark.parametrize("way", thorough_but(QUICK_RECOMPUTING, megatron_training.RECOMPUTING))
def test_megatrons_recomputation_is_off_while_the_model_is_fitted_and_back_afterwards(way, alone):
    plain, ours, kept = alone["recomputing", way]

    assert bitwise_the_same(ours, plain)
    assert ours["was"] == (None, False) and ours["is"] == plain["is"] == (way, way == "selective")
    told = [reason for reason in ours["status"].reasons if f"Megatron's recompute_granularity='{way}'" in reason]
    assert len(told) == 1 and "switched off while the model is fitted" in told[0]
    assert ours["status"].in_force and ours["plan"].counts[RECOMPUTE] > 0
    assert max(ours["peaks"][2:]) <= ours["status"].budget_bytes

    assert kept["was"] == plain["is"] and kept["losses"] == plain["losses"][:2]
    assert any("is on and stays on" in reason for reason in kept["status"].reasons)
