"""torchtitan's real Trainer, sharded by FSDP2 with gloo: bitwise what it is without lowtide, within the budget."""

from importlib.util import find_spec

import pytest
from support.ranks import on_every_rank

# Only the ranks import it, which takes seconds. It imports Triton, also on a CPU.
pytestmark = [
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs torchtitan 0.3"),
    pytest.mark.skipif(find_spec("triton") is None, reason="torchtitan needs triton"),
    pytest.mark.thorough,
]


def same(ours, plain):
    return (ours["losses"], ours["weights"]) == (plain["losses"], plain["weights"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_policy_trains_the_same_within_the_budget(accumulate, tmp_path):
    from support import torchtitan_training

    for found in on_every_rank(torchtitan_training.policies, str(tmp_path), 0.6, accumulate, world=1):
        plain, ours, over_full = found["none"], found["lowtide"], found["over full"]
        assert same(ours, plain) and same(over_full, plain)
        for run in (ours, over_full):
            status = run["status"]
            assert status.in_force and status.planned_steps >= 3 * accumulate
            assert status.budget_bytes == ours["budget"]
            assert max(run["peaks"][-2:]) <= ours["budget"] < max(plain["peaks"])
        # Of torchtitan's own wrappers, which are off meanwhile.
        assert ours["wrapped"] == 0 and over_full["wrapped"] == 3
        told = [reason for reason in over_full["status"].reasons if "checkpoint" in reason]
        assert any("switched off while the model is fitted" in reason for reason in told)
        assert max(over_full["peaks"][-2:]) < max(plain["peaks"])


def test_blocks_that_torchtitan_compiles_are_planned_inside_and_train_the_same(tmp_path):
    """Compiled by torchtitan itself, no step of sharded blocks is ever planned, and each is above the budget."""
    from support import torchtitan_training

    (found,) = on_every_rank(torchtitan_training.policies, str(tmp_path), 0.7, 1, True, world=1)
    plain, ours, status = found["none"], found["lowtide"], found["lowtide"]["status"]

    assert same(ours, plain)
    assert status.in_force and status.planned_steps >= 4 and not status.over_budget_steps
    assert max(ours["peaks"]) <= ours["budget"] < max(plain["peaks"])


def test_compiled_blocks_that_tensor_parallelism_splits_are_planned_inside_and_train_the_same(tmp_path):
    """Two ranks share each block. gloo's threads free when they come to it, so that one step alone may take more."""
    from support import torchtitan_training

    for found in on_every_rank(torchtitan_training.policies, str(tmp_path), 0.7, 1, True, 6, True):
        plain, ours, status = found["none"], found["lowtide"], found["lowtide"]["status"]
        assert same(ours, plain)
        assert status.in_force and status.planned_steps >= 4
        assert min(ours["peaks"][-3:]) <= ours["budget"] < min(plain["peaks"][-3:])


def test_what_cannot_be_carried_out_is_refused_by_name(tmp_path):
    from support import torchtitan_training

    (told,) = on_every_rank(torchtitan_training.refused, str(tmp_path), world=1)
    assert told["parts"].startswith("IntegrationError: this rank has 2 parts of the model (an interleaved pipeline)")
    assert told["compiler"].startswith(
        "IntegrationError: MemoryBudgetAC has the compiler recompute what a plan decides"
    )
    assert told["weights"].startswith("BudgetInfeasibleError: no plan fits budget=1.00 KiB")
    assert told["on_excess"].startswith("IntegrationError: on_excess='raise' has no meaning where blocks are compiled")
    assert told["graphs"].startswith("IntegrationError: torchtitan runs its training step as a CUDA graph")
    assert told["typing error"].startswith("ValueError: budget='6Gob': 'Gob' is not a unit of memory")
    assert told["version"].startswith("IntegrationError: torchtitan 0.3.0 was never tried")
