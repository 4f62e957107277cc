"""Whether a variant has the plain one's bits is tried on many values; how long it takes is measured warm."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowtide.compiled import proof, samples
from lowtide.compiled.captured_layer import OTHER_ORDER, Variant
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

    return SimpleNamespace(name=name, run=run, refused="", step_ms=0.0, kernels=SimpleNamespace(compile=lambda: None))


def measurable():
    ambient = SimpleNamespace(entered=nullcontext)
    return SimpleNamespace(
        ambient=ambient, alone=nullcontext, device=CPU, roundings=0, sample_inputs=lambda **values: []
    )


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
    given.sample_inputs = lambda **values: [weight]
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


def drawing(*values):
    """A layer that returns the next of ``values`` in each run, the last of them ever after."""
    left = list(values)

    def run(*inputs):
        return [left.pop(0) if len(left) > 1 else left[0]]

    return Variant("drawn", None, None, run=run)


ONE, OTHER, NAN = torch.ones(2), torch.zeros(2), torch.full((2,), torch.nan)


@pytest.mark.parametrize(
    ("roundings", "samples"), [(0, 1), (1 << 40, 2), (1 << 26, 4), (3, 64)], ids=["none", "many", "some", "few"]
)
def test_the_fewer_values_a_layer_rounds_the_more_samples_prove_it(roundings, samples):
    given, taken = measurable(), []
    given.roundings, given.sample_inputs = roundings, lambda **values: taken.append(values) or []
    assert proof.why_not_equal(given, [drawing(ONE)], drawing(ONE)) == [""]
    assert [values["other"] for values in taken] == [number % 2 == 1 for number in range(samples)]
    assert all(values["as_trained"] for values in taken)


def test_a_difference_that_is_rare_is_found_and_the_others_go_on():
    given = measurable()
    given.roundings = 3
    rare, late = drawing(*[ONE] * 40, OTHER, ONE), drawing(*[ONE] * 50, OTHER)
    found = proof.why_not_equal(given, [rare, late, drawing(ONE)], drawing(ONE))
    assert found == [*["output 0 has other bits than in the plain compiled layer"] * 2, ""]


@pytest.mark.parametrize("roundings", [3, 0], ids=["bfloat16", "float32"])
def test_where_values_are_rounded_kernels_that_turned_out_to_add_up_in_another_order_are_refused(roundings):
    given, text = measurable(), "size_hints={'x': 8, 'r0_': 64},\n    tl.sum("
    given.roundings = roundings
    plain, alike, other = drawing(ONE), drawing(ONE), drawing(ONE)
    for one, blocks in ((plain, "8"), (alike, "8"), (other, "32")):
        kernel = f"@triton_heuristics.reduction(\n    {text}"
        one.sources = "", f"kernel = async_compile.triton('kernel', '''{kernel}''')\nkernel.run(x)"
        one.kernels = SimpleNamespace(compile=lambda: None, blocks=lambda known={kernel: blocks}: known)
    found = proof.why_not_equal(given, [alike, other], plain)
    assert found == ["", OTHER_ORDER if roundings else ""]


def test_what_is_no_number_on_any_sample_proves_nothing():
    given, taken = measurable(), []
    given.sample_inputs = lambda **values: taken.append(values) or []
    found = proof.why_not_equal(given, [drawing(NAN)], drawing(NAN))
    assert len(taken) == 4 and found == ["output 0 of the plain compiled layer is no number on any sample"]
    assert proof.why_not_equal(given, [drawing(NAN, ONE)], drawing(NAN, ONE)) == [""]


def test_a_mask_is_sampled_as_it_is_and_what_has_a_gradient_is_drawn():
    mask = torch.zeros(4, 8).masked_fill(torch.arange(8) > 5, -torch.inf)
    assert torch.equal(Sample.of(mask).tensor(), mask)
    drawn = Sample.of(mask.clone().requires_grad_()).tensor()
    assert drawn.requires_grad and drawn.isfinite().all()


@pytest.mark.parametrize("mask", [torch.rand(1, 8), torch.rand(4, 1) < 0.5], ids=["scores", "truth"])
def test_an_expanded_mask_is_sampled_and_copied_with_its_strides(mask):
    expanded = mask.expand(4, 8)
    for made in (Sample.of(expanded).tensor(), samples.copy_of(expanded)):
        assert torch.equal(made, expanded) and made.stride() == expanded.stride()
    assert Sample.of(expanded).tensor(other=True).stride() == expanded.stride()


def test_the_masks_of_other_calls_keep_out_others():
    torch.manual_seed(0)
    mask = torch.zeros(64, 64).masked_fill(torch.arange(64) > 60, -torch.inf)
    drawn = Sample.of(mask).tensor(other=True)
    assert set(drawn.unique().tolist()) == {0.0, -torch.inf} and 0.2 < drawn.isinf().float().mean() < 0.4
    assert 0.4 < Sample.of(torch.ones(64, 64, dtype=torch.bool)).tensor(other=True).float().mean() < 0.6
    for places in (torch.arange(8), torch.zeros(8, dtype=torch.int64)):
        assert torch.equal(Sample.of(places).tensor(other=True), places)
    whole = torch.ones(64, 64, dtype=torch.int64)
    assert 0.4 < Sample.of(whole).tensor(other=True).float().mean() < 0.6


def test_a_mask_that_keeps_out_nothing_yet_is_drawn_as_one_that_does_and_as_numbers():
    torch.manual_seed(0)
    sample = Sample.of(torch.zeros(8, 8))
    lowest = {sample.tensor(other=True).min().item() for _ in range(20)}
    assert sample.is_constant and torch.finfo(torch.float32).min in lowest and any(0 < one < 1 for one in lowest)


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("num", [8, 1 << 17], ids=["few", "many"])
def test_a_parameter_of_one_value_is_tried_with_many(value, num):
    parameter = nn.Parameter(torch.full((num,), value))
    made = samples.as_trained(parameter)
    assert made.requires_grad and len(made.unique()) > 7 and torch.all((made - value).abs() <= 0.126)
    assert torch.equal(parameter, torch.full((num,), value))


def test_a_large_parameter_of_many_values_takes_no_memory_when_it_is_tried():
    large, frozen = nn.Parameter(torch.randn(1 << 17)), nn.Parameter(torch.randn(8), requires_grad=False)
    assert samples.as_trained(large) is large
    assert not samples.as_trained(frozen).requires_grad and not torch.equal(samples.as_trained(frozen), frozen)


def test_numbers_of_eight_bits_are_tried_as_they_are():
    tiny = torch.ones(8, 8).to(torch.float8_e4m3fn)
    assert samples.as_trained(tiny) is tiny
    assert torch.equal(Sample.of(tiny).tensor(other=True).float(), tiny.float()) and not Sample.of(tiny).is_constant
