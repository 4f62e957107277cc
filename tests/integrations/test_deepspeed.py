"""DeepSpeed on the CPU with gloo: bitwise what it is without lowtide, within the budget."""

from importlib.util import find_spec

import pytest
from support import deepspeed_training
from support.quick import is_quick, thorough_but
from support.ranks import on_every_rank

from lowtide.plan import RECOMPUTE
from lowtide.recording.sharding import CROSSES, OUT_OF_WINDOW

# Only the ranks import it, which takes seconds.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")

# gloo's threads free a buffer when they come to it: each is a gathered weight, 2 % of what these small steps need.
BUFFERS = 0.1


def check(told, beyond=0):
    plain, ours = told
    assert all(ours[what] == plain[what] for what in ("losses", "weights", "sent"))
    status, planned_from = ours["status"], ours["planned from"]
    assert status.in_force and status.planned_steps >= 8 - planned_from and ours["mismatched"] == 0
    assert ours["plan"].counts[RECOMPUTE] > 0
    assert max(ours["peaks"][planned_from:]) <= (1 + beyond) * status.budget_bytes < min(plain["peaks"])


QUICK_WAYS = ("ZeRO-2 in bf16", "ZeRO-3, windows in windows")


@pytest.fixture(scope="module")
def alone():
    """What is asked of one process, in one process: importing DeepSpeed takes longer than most of it."""
    ways = QUICK_WAYS if is_quick() else deepspeed_training.SHORT
    return on_every_rank(deepspeed_training.alone, ways, world=1)[0]


@pytest.mark.parametrize("way", thorough_but(QUICK_WAYS, deepspeed_training.SHORT))
def test_an_engine_trains_the_same_within_the_budget(way, alone):
    check(alone["trained"][way])


@pytest.mark.slow
@pytest.mark.parametrize("way", deepspeed_training.WAYS)
def test_two_ranks_train_the_same_each_under_its_own_plan(way):
    for told in on_every_rank(deepspeed_training.all_ways, (way,)):
        check(told[way], beyond=BUFFERS if way.startswith("ZeRO-3") else 0)


def test_zero_3_steps_without_a_plan_keep_the_budget_from_the_first_on(alone):
    plain, ours, budget, told = alone["without a plan"]

    assert all(ours[what] == plain[what] for what in ("losses", "weights", "sent"))
    assert max(ours["peaks"]) <= 1.01 * budget < min(plain["peaks"])
    assert told == [{""}, {"", OUT_OF_WINDOW}]


def test_a_model_that_zero_3_partitions_after_fit_is_saved_whole_and_told(alone):
    plain, early = alone["partitioned after fit"]

    assert early["losses"] == plain["losses"] and early["weights"] == plain["weights"]
    assert any("ZeRO-3 has partitioned the model since fit" in reason for reason in early["status"].reasons)


def test_zero_3_is_not_rehearsed_and_the_engine_trains_on(alone):
    told = dict(alone["rehearsed"])

    plain, ours = told.pop("losses")
    assert ours == plain
    assert told.pop("no engine").endswith("Call fit after deepspeed.initialize.")
    assert set(told) == {"fit", "diagnose", "trace"}
    assert all("Call lowtide.fit without a batch" in said for said in told.values())


def test_parameters_that_zero_3_has_changed_before_backward_are_an_error_by_name(alone):
    told = alone["guarded"]

    assert told[""] == ""
    assert all(told[what].startswith("ReplayError") for what in ("an optimizer's step", "a write"))


def test_what_leaves_the_window_of_a_parameter_is_saved(alone):
    told = alone["reasons to save"]
    saved, _ = told["none"]
    outside, error = told["blocks gather what they read"]
    _, refused = told["what crosses is saved"]

    assert CROSSES in saved and OUT_OF_WINDOW not in saved
    assert OUT_OF_WINDOW in outside and not error
    assert refused.startswith("ReplayError") and "was freed afterwards" in refused


def test_the_doctor_sees_checkpointing_settings_that_nothing_reads(alone):
    unread, read = alone["diagnosed"]

    assert unread.codes == ("LT109",) and not read and not (unread.notes or read.notes)
    inside = 3 * deepspeed_training.ROWS * 128 * 4  # of a layer: around the activation, and the dropout's mask
    assert unread[0].gain_bytes == pytest.approx(5 * inside, rel=0.1)  # of six layers all but one


@pytest.mark.slow
def test_layers_in_deepspeeds_own_checkpointing_train_the_same():
    plain, ours = on_every_rank(deepspeed_training.checkpointed, world=1)[0]

    assert ours["losses"] == plain["losses"] and ours["weights"] == plain["weights"]


def test_deepspeeds_own_checkpointing_is_told_or_refused(alone):
    told = alone["settings"]

    assert sum("activation_checkpointing block wraps nothing by itself" in reason for reason in told["a block"]) == 1
    assert not told["no block"]
    assert "activation_checkpointing.cpu_checkpointing is on" in told["cpu_checkpointing"]
    assert told["no engine"].startswith("Linear is no DeepSpeedEngine")
