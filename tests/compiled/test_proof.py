"""How long a variant takes is measured warm."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lowtide.compiled import proof

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """Seconds of the processor, which only the variants below use up."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(proof.time, "process_time", lambda: now.s)
    return now


def variant(name, clock, seconds):
    """One whose runs take ``seconds`` one after the other, the last of them ever after."""
    left = list(seconds)

    def run(*inputs):
        clock.s += left.pop(0) if len(left) > 1 else left[0]
        return [torch.zeros(1)]

    return SimpleNamespace(name=name, run=run, step_ms=0.0, kernels=SimpleNamespace(compile=lambda: None))


def measurable():
    ambient = SimpleNamespace(entered=nullcontext)
    return SimpleNamespace(ambient=ambient, alone=nullcontext, device=CPU, sample_inputs=list)


def test_cold_runs_of_a_small_layer_leave_time_for_warm_ones(clock):
    plain, least = variant("plain", clock, [0.022, 0.022, 0.022, 0.010]), variant("least", clock, [0.012])
    proof.measure_ms(measurable(), plain, [least])
    assert (plain.step_ms, least.step_ms) == (pytest.approx(10.0), pytest.approx(12.0))


def test_a_large_layer_runs_twice_between_plain_runs_and_no_oftener(clock):
    plain, least = variant("plain", clock, [2.0]), variant("least", clock, [4.0])
    proof.measure_ms(measurable(), plain, [least])
    assert (plain.step_ms, least.step_ms, clock.s) == (pytest.approx(2000.0), pytest.approx(4000.0), 14.0)


@pytest.mark.parametrize(
    ("seconds", "turns"),
    [([0.15], 6), ([0.15, 0.12] * 50, 15), ([0.3, 0.28] * 50, 6)],
    ids=["quiet", "uneven", "uneven, but known well enough to be slow"],
)
def test_an_uneven_machine_is_sampled_oftener(clock, seconds, turns):
    plain, least = variant("plain", clock, [0.1]), variant("least", clock, seconds)
    proof.measure_ms(measurable(), plain, [least])
    assert clock.s == pytest.approx(0.1 + sum(0.1 + s for s in (seconds * turns)[:turns]))


def test_what_is_known_well_enough_waits_for_no_other(clock):
    plain, quiet = variant("plain", clock, [0.1]), variant("quiet", clock, [0.15])
    uneven = variant("uneven", clock, [0.15, 0.12] * 50)
    proof.measure_ms(measurable(), plain, [quiet, uneven])
    assert clock.s == pytest.approx(0.1 + 15 * 0.1 + 6 * 0.15 + 15 * 0.135 + 0.015)


def test_drawing_what_backward_begins_with_is_no_time_of_a_variant(clock, monkeypatch):
    weight = torch.ones(1, requires_grad=True)
    plain, least = variant("plain", clock, [0.1]), variant("least", clock, [0.12])
    for one in (plain, least):
        one.run = lambda *inputs, run=one.run: [run(*inputs)[0] + weight]

    def drawn(like):
        clock.s += 1.0
        return torch.ones_like(like)

    monkeypatch.setattr(proof, "random_like", drawn)
    given = measurable()
    given.sample_inputs = lambda: [weight]
    proof.measure_ms(given, plain, [least])
    assert (plain.step_ms, least.step_ms) == (pytest.approx(100.0), pytest.approx(120.0))


def test_a_machine_that_changes_its_speed_changes_no_ratio(clock):
    half_speed = [0.1] * 4 + [0.05] + [0.1] * 20  # the least sample of the plain one is from its only fast run
    plain, least = variant("plain", clock, half_speed), variant("least", clock, [0.12])
    proof.measure_ms(measurable(), plain, [least])
    assert (plain.step_ms, least.step_ms) == (pytest.approx(100.0), pytest.approx(120.0))


def test_the_plain_variant_is_timed_alone_where_there_is_no_other(clock):
    plain, small = variant("plain", clock, [0.4, 0.2]), variant("small", clock, [0.090, 0.030])
    proof.measure_ms(measurable(), plain, [])
    assert plain.step_ms == pytest.approx(200.0) and clock.s == pytest.approx(0.8)
    proof.measure_ms(measurable(), small, [])
    assert small.step_ms == pytest.approx(30.0) and clock.s == pytest.approx(1.1)


def test_the_plain_variant_runs_once_to_prove_several(clock):
    plain, same, other = (variant(name, clock, [1.0]) for name in ("plain", "same", "other"))
    run = other.run
    other.run = lambda *inputs: [t + 1 for t in run(*inputs)]
    found = proof.why_not_equal(measurable(), [same, other], plain)
    assert found == ["", "output 0 has other bits than in the plain compiled layer"] and clock.s == 3.0


def test_a_later_variant_is_in_the_measure_of_the_first_time(clock):
    plain, later = variant("plain", clock, [0.020]), variant("later", clock, [0.030])
    plain.step_ms = 10.0  # when the processor was twice as fast

    proof.measure_ms(measurable(), plain, [later])

    assert (plain.step_ms, later.step_ms) == (10.0, pytest.approx(15.0))


def test_what_samples_differ_by_is_the_error_of_a_time(clock):
    plain, steady, uneven = (variant(name, clock, [0.1]) for name in ("plain", "steady", "uneven"))
    uneven.run = variant("uneven", clock, [0.2, 0.1] * 50).run
    proof.measure_ms(measurable(), plain, [steady, uneven])
    assert steady.error == pytest.approx(0.0, abs=1e-9) and 0.1 < uneven.error < 0.3


def test_a_machine_that_gets_slower_within_a_turn_favours_none_of_its_variants(clock):
    plain, first, second = (
        variant(name, clock, [start + 0.3 * turn for turn in range(50)])
        for name, start in (("plain", 0.1), ("first", 0.2), ("second", 0.3))
    )
    proof.measure_ms(measurable(), plain, [first, second])
    assert first.step_ms == pytest.approx(plain.step_ms) == second.step_ms
