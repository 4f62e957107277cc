"""Dimension vectors: what varies among the inputs' sizes, each once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.shapes.dimensions import covers, join, varying_dimensions

vectors = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4)


def llama(batch, length):
    return [(batch, length), (batch, length), (batch, length)]  # ids, labels, mask


def test_ids_labels_and_mask_share_batch_and_length():
    found = varying_dimensions([llama(2, 48), llama(2, 64), llama(3, 64)])

    assert found.of(llama(5, 96)) == (5, 96)


def test_source_and_target_lengths_are_two_dimensions():
    found = varying_dimensions([[(2, 48), (2, 20)], [(2, 64), (2, 30)], [(2, 64), (2, 20)]])

    assert found.of([(2, 9), (2, 7)]) == (9, 7)


def test_what_never_moved_must_not_move():
    found = varying_dimensions([llama(2, 48), llama(2, 64)])

    assert found.of(llama(2, 96)) == (96,)
    with pytest.raises(ValueError) as error:
        found.of(llama(3, 96))
    assert str(error.value) == (
        "size 0 of the inputs is 3 and was always 2. Infer the dimensions anew with these shapes among them."
    )


def test_what_was_always_equal_must_stay_equal():
    found = varying_dimensions([llama(2, 48), llama(3, 64)])

    with pytest.raises(ValueError, match=r"sizes \[1, 3, 5\] of the inputs are \[48, 48, 47\] and were always equal"):
        found.of([(2, 48), (2, 48), (2, 47)])


def test_other_tensors_are_refused():
    found = varying_dimensions([llama(2, 48), llama(3, 64)])

    with pytest.raises(ValueError, match=r"have \[2\] sizes, not \[2, 2, 2\]"):
        found.of([(2, 48)])
    with pytest.raises(ValueError, match="2 different forms"):
        varying_dimensions([llama(2, 48), [(2, 48)]])


def test_covering_is_a_partial_order():
    assert covers((2, 96), (2, 48))
    assert not covers((2, 96), (4, 48)) and not covers((4, 48), (2, 96))


@given(vectors)
def test_a_join_covers_all_and_nothing_below_it_does(found):
    top = join(found)

    assert all(covers(top, vector) for vector in found)
    for at in range(2):
        less = tuple(size - (place == at) for place, size in enumerate(top))
        assert not all(covers(less, vector) for vector in found)
