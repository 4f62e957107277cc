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


def test_a_large_layer_runs_once_between_two_plain_runs_and_no_oftener(clock):
    plain, least = variant("plain", clock, [2.0]), variant("least", clock, [4.0])
    proof.measure_ms(measurable(), plain, [least])
    assert (plain.step_ms, least.step_ms, clock.s) == (pytest.approx(2000.0), pytest.approx(4000.0), 8.0)


@pytest.mark.parametrize(("seconds", "turns"), [([0.15], 6), ([0.15, 0.12] * 50, 30)], ids=["quiet", "uneven"])
def test_an_uneven_machine_is_sampled_oftener(clock, seconds, turns):
    plain, least = variant("plain", clock, [0.1]), variant("least", clock, seconds)
    proof.measure_ms(measurable(), plain, [least])
    assert clock.s == pytest.approx(0.1 + sum(0.1 + s for s in (seconds * turns)[:turns]))


def test_a_machine_that_changes_its_speed_changes_no_ratio(clock):
    half_speed = [0.1] * 4 + [0.05] + [0.1] * 20  # the least sample of the plain one is from its only fast run
    plain, least = variant("plain", clock, half_speed), variant("least", clock, [0.12])
    proof.measure_ms(measurable(), plain, [least])
    assert (plain.step_ms, least.step_ms) == (pytest.approx(100.0), pytest.approx(120.0))


def test_the_plain_variant_is_timed_alone_where_there_is_no_other(clock):
    plain = variant("plain", clock, [0.2])
    proof.measure_ms(measurable(), plain, [])
    assert plain.step_ms == pytest.approx(200.0)


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
