"""How long a variant takes is measured warm."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lowtide.compiled import proof
from lowtide.compiled.samples import Sample

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
    [([0.15], 3), ([0.15, 0.12] * 50, 9), ([0.3, 0.28] * 50, 3)],
    ids=["quiet", "uneven", "uneven, but known well enough to be slow"],
)
def test_an_uneven_machine_is_sampled_oftener(clock, seconds, turns):
    plain, least = variant("plain", clock, [0.1]), variant("least", clock, seconds)
    proof.measure_ms(measurable(), plain, [least])
    assert clock.s == pytest.approx(0.1 + sum(0.1 + s for s in (seconds * turns)[:turns]))


def test_two_samples_of_each_are_enough_where_several_variants_show_a_quiet_machine(clock):
    plain, *others = (variant(name, clock, [0.2]) for name in ("plain", "one", "two", "three"))
    proof.measure_ms(measurable(), plain, others)
    assert clock.s == pytest.approx(0.2 * (3 + 2 * 3))


def test_what_is_known_well_enough_waits_for_no_other(clock):
    """A variant that takes twice the time may be off by more than one that takes a little more."""
    plain, slow, fast = (variant(name, clock, [0.1, 0.104] * 50) for name in ("plain", "slow", "fast"))
    runs = {"slow": 0, "fast": 0}
    for one, share in ((slow, 2.0), (fast, 1.0)):

        def run(*inputs, name=one.name, run=one.run, share=share):
            runs[name] += 1
            start_s = clock.s
            made = run(*inputs)
            clock.s = start_s + share * (clock.s - start_s)
            return made

        one.run = run
    proof.measure_ms(measurable(), plain, [slow, fast])
    assert runs == {"slow": 3, "fast": 9}


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


def test_what_the_samples_of_all_differ_by_is_the_error_of_each(clock):
    """The machine spreads them, whichever variant runs."""
    plain, steady, uneven = (variant(name, clock, [0.1]) for name in ("plain", "steady", "uneven"))
    uneven.run = variant("uneven", clock, [0.2, 0.1] * 50).run
    proof.measure_ms(measurable(), plain, [steady, uneven])
    assert 0.02 < steady.error < 0.1 and 0.02 < uneven.error < 0.1


def test_the_error_of_few_samples_is_that_of_many(clock):
    """As few samples often agree by luck, those of all variants and of the plain one count together."""
    drawn = random.Random(0)
    share = []
    for _ in range(60):
        seconds = [[2.0 * drawn.gauss(1.0, 0.05) for _ in range(9)] for _ in range(4)]
        plain, *others = (variant(str(n), clock, seconds[n]) for n in range(4))
        proof.measure_ms(measurable(), plain, others)
        share += [abs(v.step_ms / plain.step_ms - 1) > 3 * v.error for v in others]
    assert sum(share) / len(share) < 0.1


def test_a_machine_that_gets_slower_within_a_turn_favours_none_of_its_variants(clock):
    plain, first, second = (
        variant(name, clock, [start + 0.3 * turn for turn in range(50)])
        for name, start in (("plain", 0.1), ("first", 0.2), ("second", 0.3))
    )
    proof.measure_ms(measurable(), plain, [first, second])
    assert first.step_ms == pytest.approx(plain.step_ms) == second.step_ms


def test_a_mask_is_sampled_as_it_is_and_what_has_a_gradient_is_drawn():
    """Variants differ in bfloat16 where masks are minus infinity, and nowhere under random ones."""
    mask = torch.zeros(4, 8).masked_fill(torch.arange(8) > 5, -torch.inf)
    assert torch.equal(Sample.of(mask).tensor(), mask)
    drawn = Sample.of(mask.clone().requires_grad_()).tensor()
    assert drawn.requires_grad and drawn.isfinite().all()
