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

    return SimpleNamespace(name=name, run=run, step_ms=0.0)


def test_a_slow_first_run_is_no_sample_and_leaves_time_for_warm_ones(clock):
    captured = SimpleNamespace(ambient=SimpleNamespace(entered=nullcontext), device=CPU, sample_inputs=lambda: [])
    plain = variant("plain", clock, [9.0, 0.022, 0.022, 0.022, 0.010])  # which backward compiles, then cold caches
    least = variant("least", clock, [0.012])

    proof.measure_ms(captured, plain, [least])

    assert (plain.step_ms, least.step_ms) == (pytest.approx(10.0), pytest.approx(12.0))


def test_a_later_variant_is_in_the_measure_of_the_first_time(clock):
    captured = SimpleNamespace(ambient=SimpleNamespace(entered=nullcontext), device=CPU, sample_inputs=lambda: [])
    plain, later = variant("plain", clock, [0.020]), variant("later", clock, [0.030])
    plain.step_ms = 10.0  # when the processor was twice as fast

    proof.measure_ms(captured, plain, [later])

    assert (plain.step_ms, later.step_ms) == (10.0, pytest.approx(15.0))
