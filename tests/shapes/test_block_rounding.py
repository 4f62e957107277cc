"""Sizes in blocks of an accelerator's allocator, at unseen shapes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from support.watched_shapes import watched

from lowtide.shapes.block_rounding import estimate_in_blocks
from lowtide.shapes.interpolation import Interpolation
from lowtide.shapes.shape_family import ShapeFamily


def in_blocks(size):
    return -(-size // 512) * 512


def estimate(function, lengths, asked):
    values = tuple(in_blocks(function(n)) for n in lengths)
    return estimate_in_blocks(Interpolation([(n,) for n in lengths]), values, (asked,), 512)


def test_a_size_of_one_term_is_exact_from_a_few_hundred_tokens_on():
    for per_token in (4, 8, 252):
        found = estimate(lambda n, c=per_token: c * n, (1003, 1100, 1311), 2047)
        assert (found.value, found.least, found.confirmed) == (in_blocks(per_token * 2047),) * 2 + (True,)


def test_what_stayed_in_one_block_may_grow_out_of_it():
    inside, beyond = (estimate(lambda n: 4, (48, 64, 96), asked) for asked in (80, 960))

    assert (inside.least, inside.value) == (512, 512)
    assert beyond.least == 512 < beyond.value


def test_exact_interpolation_would_be_wrong_or_silent():
    lengths = (1003, 1100, 1311)
    values = [in_blocks(4 * n) for n in lengths]
    exact = Interpolation([(n,) for n in lengths]).estimate(values, (1201,))

    assert exact is None or exact.value != in_blocks(4 * 1201)
    assert estimate(lambda n: 4 * n, lengths, 1201).value == in_blocks(4 * 1201)


def test_no_polynomial_of_few_terms_no_size():
    assert estimate(lambda n: 5000 * (n % 7), (10, 11, 15, 20), 30) is None
    assert estimate(lambda n: 0, (10, 11, 15), 30).value == 0


def test_an_empty_batch_is_an_example_like_others():
    assert estimate(lambda n: 4096 * n, (0, 10, 11), 30).value == 4096 * 30
    found = estimate(lambda n: 4096 * n + 1024, (0, 10, 11), 30)
    assert found.least <= in_blocks(4096 * 30 + 1024) <= found.value  # two terms: one gives an empty batch nothing


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 10**6), st.sampled_from([0, 1, 2]),
    st.lists(st.integers(1, 3000), min_size=2, max_size=4, unique=True), st.integers(1, 6000),
)  # fmt: skip
def test_the_range_holds_the_true_size(coefficient, power, lengths, asked):
    found = estimate(lambda n: coefficient * n**power, lengths, asked)

    assert found.least <= in_blocks(coefficient * asked**power) <= found.value


def on_an_accelerator(graph):
    """``graph`` as an allocator with blocks would have counted it."""
    return replace(
        graph,
        device="cuda",
        storages=tuple(replace(s, bytes=in_blocks(s.bytes)) for s in graph.storages),
        ops=tuple(replace(op, workspace_bytes=in_blocks(op.workspace_bytes)) for op in graph.ops),
        resident={**graph.resident, "batch": sum(in_blocks(s.bytes) for s in graph.storages if s.kind == "input")},
    )


@pytest.mark.parametrize("asked", [120, 190])
def test_a_model_on_an_accelerator_is_derived_within_a_small_slack(asked):
    family = ShapeFamily()
    for length in (101, 133, 157, 181):
        family.add((2, length), on_an_accelerator(watched("gpt2", 2, length, padded=True)))

    derived = family.derive((2, asked))
    real = on_an_accelerator(watched("gpt2", 2, asked, padded=True))

    assert derived.check(real) == ""
    assert derived.graph.resident == real.resident
    made = sum(s.bytes for s in real.storages)
    assert made <= sum(s.bytes for s in derived.graph.storages) <= 1.01 * made
    assert 0 < derived.slack_bytes <= 0.01 * made
    larger = replace(real.storages[100], bytes=real.storages[100].bytes + 4096)
    assert derived.check(replace(real, storages=(*real.storages[:100], larger, *real.storages[101:]))) != ""
