"""DeepSpeed on the CPU with gloo: bitwise what it is without lowtide, within the budget."""

import pytest

pytest.importorskip("deepspeed")

from support import deepspeed_training
from support.ranks import on_every_rank

from lowtide.plan import RECOMPUTE


def check(told):
    plain, ours = told
    assert ours["losses"] == plain["losses"] and ours["weights"] == plain["weights"]
    status = ours["status"]
    assert status.in_force and status.planned_steps >= 6 and ours["mismatched"] == 0
    assert ours["plan"].counts[RECOMPUTE] > 0
    assert max(ours["peaks"][2:]) <= status.budget_bytes < min(plain["peaks"])


@pytest.fixture(scope="module")
def alone():
    return on_every_rank(deepspeed_training.all_ways, deepspeed_training.SHORT, world=1)[0]


@pytest.mark.parametrize("way", deepspeed_training.SHORT)
def test_an_engine_trains_the_same_within_the_budget(way, alone):
    check(alone[way])


@pytest.mark.slow
def test_two_ranks_train_the_same_each_under_its_own_plan():
    for told in on_every_rank(deepspeed_training.all_ways, tuple(deepspeed_training.WAYS)):
        for way in deepspeed_training.WAYS:
            check(told[way])


def test_zero_3_is_refused_by_name_and_the_engine_trains_on():
    ((engine, module, plain, early),) = on_every_rank(deepspeed_training.partitioned, world=1)

    assert engine == module and engine.startswith(
        "UnsupportedModelError: the model is partitioned by DeepSpeed's ZeRO-3"
    )
    assert "Use ZeRO-2 (stage: 2), or shard the model with fully_shard" in engine
    assert early["losses"] == plain["losses"] and early["weights"] == plain["weights"]
    assert any("ZeRO-3 has partitioned the model since fit" in reason for reason in early["status"].reasons)


def test_the_doctor_sees_checkpointing_settings_that_nothing_reads():
    ((unread, read),) = on_every_rank(deepspeed_training.diagnosed, world=1)

    assert unread == ("LT109",) and read == ()


@pytest.mark.slow
def test_layers_in_deepspeeds_own_checkpointing_train_the_same():
    plain, ours = on_every_rank(deepspeed_training.checkpointed, world=1)[0]

    assert ours["losses"] == plain["losses"] and ours["weights"] == plain["weights"]


def test_deepspeeds_own_checkpointing_is_told_or_refused():
    (told,) = on_every_rank(deepspeed_training.settings, world=1)

    assert sum("activation_checkpointing block wraps nothing by itself" in reason for reason in told["a block"]) == 1
    assert not told["no block"]
    assert "activation_checkpointing.cpu_checkpointing is on" in told["cpu_checkpointing"]
    assert told["no engine"].startswith("Linear is no DeepSpeedEngine")
