"""What is known of an operator once and for all."""

import pytest
import torch

from lowtide.step.operators import OPERATORS

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "is_view"),
    [
        (aten.view.default, True), (aten.split.Tensor, True), (aten.detach.default, True),
        (aten.add.Tensor, False), (aten.add_.Tensor, False),
        # Made of others, which copy where no view will do: a mode sees them in inference mode.
        (aten.reshape.default, False), (aten.contiguous.default, False),
    ],
    ids=str,
)  # fmt: skip
def test_a_view_is_what_always_returns_memory_that_it_was_given(func, is_view):
    assert OPERATORS[func].is_view == is_view
