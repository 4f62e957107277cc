"""What a mend gains is run on the same step: bytes of the peak and time, against formulas."""

from contextlib import nullcontext

import pytest
import torch
from support import sick_setups as setups
from support.sick_setups import SICK, TOKENS, Case, Flagged, Router, Stack, diagnosed, llama, mlp, plain
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from lowtide.doctor import step_under_test
from lowtide.doctor.finding import Gain
from lowtide.doctor.step_listener import StepListener
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.settings import checkpointing_names

MIB = 2**20


def _by_work(fn, calls, device, now):
    with FlopCounterMode(display=False) as counter:
        fn()
    return counter.get_total_flops()


@pytest.fixture
def _works_time(monkeypatch):
    """Floating-point operations are the time of a step: no neighbour slows them down."""
    monkeypatch.setattr(step_under_test, "calls_ms", _by_work)


@pytest.mark.parametrize(
    ("code", "less_memory"),
    [
        ("LT107", False),
        ("LT201", False),
        ("LT101", True),
        pytest.param("LT103", None, marks=pytest.mark.slow),
        pytest.param("LT210", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("_works_time")
def test_what_a_mend_gains_is_measured_on_the_step(code, less_memory):
    (found,) = diagnosed(SICK[code][0](), code)

    if less_memory is None:
        assert found.gain_ms > 0 > found.gain_bytes, found  # what is recomputed for nothing is stored instead
    elif less_memory:
        assert found.gain_bytes > 0 and not (found.gain_ms or 0) > 0, found
    else:
        assert found.gain_ms > 0, found
    assert "of the peak" in found.gain or "ms a step" in found.gain


def test_a_tensor_at_the_address_of_a_dead_copy_is_no_copy_of_that_weight():
    model = torch.nn.Linear(64, 64)
    listener = StepListener(model, None, compare=False)

    with listener:
        addresses = {model.weight.to(torch.bfloat16).untyped_storage()._cdata for _ in range(64)}  # each dies at once
        others = [torch.ones(64, 64) for _ in range(4096)]  # until the allocator takes one of these places again
    reused = next(tensor for tensor in others if tensor.untyped_storage()._cdata in addresses)
    address = reused.untyped_storage()._cdata
    listener._pack(reused)

    assert listener.stored[address].cast_of == ""


@pytest.mark.parametrize(("last_turn", "gained"), [((11, 11), None), ((11, 10), 2)])
def test_time_is_a_gain_where_every_turn_says_so(last_turn, gained, monkeypatch):
    turns = [(9, 9), (10, 8), (12, 9), (10, 8), (9, 8), last_turn]  # without the mend, and with it
    clock = iter([ms for i, turn in enumerate(turns) for ms in (turn if i % 2 else reversed(turn))])
    monkeypatch.setattr(step_under_test, "calls_ms", lambda *_: next(clock))
    case = SICK["LT201"][0]()

    assert StepUnderTest(case.model, case.batch).gain(nullcontext).ms == gained


@pytest.mark.usefixtures("_works_time")
def test_flags_that_are_read_would_hold_the_inside_of_one_block_alone():
    rows, blocks = 512, 4
    (found,) = diagnosed(Case(Stack(lambda: Flagged(False), plain, blocks), torch.randn(rows, 64)), "LT102")

    inside = 2 * rows * 256 * 4  # before the activation and after it
    assert found.gain_bytes == pytest.approx((blocks - 1) * inside, rel=0.15)
    assert found.gain_ms == -blocks * 2 * rows * 64 * 256  # the first linear again: what the second makes is not stored


def test_a_mended_step_that_fails_leaves_the_finding():
    model = Stack(lambda: Router(True), plain, layers=1)
    model.layers[0].gradient_checkpointing = True

    (found,) = diagnosed(Case(model), "LT102")

    assert found.evidence.startswith("1 module has gradient_checkpointing=True")
    assert found.gain.startswith("not measured: the mended step fails: CheckpointError: ")
    assert found.gain_bytes is None and found.gain_ms is None


def _recomputed(layers: int) -> int:
    """Operations of running the layers of a llama again."""
    model, counts = llama(layers), []
    for on in (False, True):
        if on:
            checkpointing_names.enable(model)
        with FlopCounterMode(display=False) as counter:
            model(**TOKENS).loss.backward()
        counts.append(counter.get_total_flops())
    return counts[1] - counts[0]


@pytest.mark.usefixtures("_works_time")
def test_settings_that_the_trainer_overwrites_cost_the_layers_that_were_to_be_plain():
    (found,) = diagnosed(SICK["LT104"][0](), "LT104")  # every third of six, and then all

    assert found.gain_ms == pytest.approx(_recomputed(6) * 4 / 6) and found.gain_bytes < 0


@pytest.mark.usefixtures("_works_time")
def test_settings_under_the_old_name_cost_what_they_would_have_changed():
    case = setups.old_name(True)
    case.options["arguments"].gradient_checkpointing_kwargs = {"every_n_layers": 2}

    (found,) = diagnosed(case, "LT105")

    assert found.gain_ms == pytest.approx(_recomputed(4) / 2) and found.gain_bytes < 0


@pytest.mark.usefixtures("_works_time")
def test_a_policy_that_saves_spares_the_products_that_it_names():
    (found,) = diagnosed(SICK["LT106"][0](), "LT106")

    assert found.gain_ms == 3 * 2 * 32 * 64 * 256 and found.gain_bytes < 0  # in each block the first of two
    assert found.mend == "Compare with overloads: torch.ops.aten.addmm.default."


def test_a_policy_that_names_no_operator_has_no_mended_twin():
    (found,) = diagnosed(setups.selective("nothing"), "LT106")

    assert found.gain == "not measured: the policy names no operator, so there is nothing to mend it with"
    assert found.mend.startswith("Let the policy save something") and not found.fix


@pytest.mark.parametrize(("ms_without", "speaks"), [(98.0, True), (99.5, False)])
def test_a_kv_cache_that_costs_time_alone_is_told(ms_without, speaks, monkeypatch):
    model = llama(2, vocab_size=4096, use_cache=True)  # logits set the peak: no byte of it is the cache's
    monkeypatch.setattr(step_under_test, "calls_ms", lambda *_: 100.0 if model.config.use_cache else ms_without)

    found = diagnosed(Case(model, TOKENS), "LT205")

    assert [(f.gain_bytes, f.gain_ms) for f in found] == ([(0, 2.0)] if speaks else [])
    assert model.config.use_cache


def test_what_sharding_would_spare_is_told_by_the_sizes():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = Stack(mlp, plain)
    model.first.requires_grad_(False)

    (found,) = diagnosed(setups.replicated(model, asked=True), "LT108")

    frozen, trained = 64 * 64 + 64, 3 * (2 * 64 * 256 + 64 + 256)
    assert f"{(frozen + 2 * trained) * 4 / 2 / 2**10:.2f} KiB of parameters and gradients" in found.gain
    assert found.gain.startswith("not measured, since sharding takes all ranks at once")


def test_a_loss_in_chunks_spares_most_of_the_columns_at_the_peak():
    (found,) = diagnosed(SICK["LT204"][0](), "LT204")

    logits = TOKENS["input_ids"].numel() * 4096 * 4
    assert 3 * logits < found.gain_bytes < 4 * logits  # logits, shifted ones, their softmax, its gradient


def test_a_model_whose_loss_cannot_be_chunked_is_told_the_most_there_is():
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = Stack(mlp, layers=1), torch.nn.Linear(64, 4096)

        def forward(self, x):
            return self.head(self.body(x)).logsumexp(-1).mean()

    (found,) = diagnosed(Case(Head()), "LT204")

    assert found.gain.startswith("not measured: ") and "chunk_loss needs a causal language model" in found.gain
    assert "; at most " in found.gain and found.gain_bytes is None


def test_what_takes_all_ranks_is_not_measured_in_one():
    (found,) = diagnosed(SICK["LT211"][0](), "LT211")

    assert found.gain.startswith("not measured: ") and found.gain_ms is None


def test_a_plan_that_is_not_in_force_gains_what_the_budget_leaves_out():
    case = SICK["LT303"][0]()  # within 60 %
    case.batch = torch.randn(256, 64)
    plain_bytes = StepUnderTest(case.model, case.batch).measured.peak_bytes

    (found,) = diagnosed(case, "LT303")

    assert 0.2 * plain_bytes <= found.gain_bytes < 0.5 * plain_bytes


def test_a_plan_that_does_not_exist_has_no_gain():
    case = setups.fitted(False, budget="1MiB")
    case.batch = torch.randn(4096, 64)

    (found,) = diagnosed(case, "LT303")

    assert found.gain.startswith("not measured: there is no plan for this step: no plan fits budget=1.00 MiB")


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (Gain(), ""),
        (Gain(0, None, 4.0), "none on this step: its peak stays, and its time differs as much from turn to turn"),
        (Gain(3 * MIB, -1.5, 4.0), "3.00 MiB of the peak, for 1.5 ms on top of 4 ms a step"),
        (Gain(-MIB, 1.5, 4.0), "1.5 ms of 4 ms a step, for 1.00 MiB more of the peak"),
        (Gain(-MIB), "none on this step, for 1.00 MiB more of the peak"),
        (Gain(why_not="no layers", note="at most 1"), "not measured: no layers; at most 1"),
    ],
)  # fmt: skip
def test_a_gain_is_told_with_what_it_costs(gain, text):
    assert str(gain) == text
