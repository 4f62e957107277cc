"""A step that fits only because it is checkpointed: it is compared all the same."""

import functools
import weakref

import pytest
import torch
from support.sick_setups import ROWS, Stack, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.doctor.value_proof import prove


class Memory:
    """Counts rows of live tensors and refuses more than ``limit``."""

    def __init__(self, limit):
        self.limit, self.rows = limit, 0

    def allocate(self, rows):
        if self.rows + rows > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rows} rows")
        self.rows += rows
        made = torch.zeros(rows)
        weakref.finalize(made, self.free, rows)
        return made

    def free(self, rows):
        self.rows -= rows


class Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, memory):
        ctx.save_for_backward(memory.allocate(len(x)))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.saved_tensors
        return gradient, None


class Large(nn.Module):
    """Stores each row of its input once."""

    def __init__(self, memory, dropout=0.2):
        super().__init__()
        self.inner, self.memory = mlp(dropout), memory

    def forward(self, x):
        return Stored.apply(self.inner(x), self.memory)


def model(limit, preserve, layers=4):
    how = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=preserve)
    memory = Memory(limit)
    return Stack(lambda: Large(memory), how, layers), memory


# One layer stores 32 rows. Made plain alone, it is there while another one is recomputed.
@pytest.mark.parametrize(
    ("limit", "note"),
    [
        (4 * 32, None),
        (2 * 32, "the plain step does not fit in memory: each checkpointed call was made plain alone"),
        (1 * 32, "the whole batch does not fit in memory: 16 of its 32 rows were used"),
    ],
    ids=["at once", "call by call", "half the batch"],
)
@pytest.mark.parametrize("preserve", [True, False])
def test_the_step_is_compared_as_far_as_memory_goes(limit, note, preserve):
    net, memory = model(limit, preserve)

    found = lowtide.diagnose(net, ROWS, only=["LT001", "LT003", "LT201"])

    assert found.codes == (() if preserve else ("LT001", "LT003"))
    assert (note is None and not found.notes) or note in found.notes, found.notes
    assert memory.rows == 0 and all(p.grad is None for p in net.parameters())


def test_call_by_call_is_the_comparison_at_once():
    whole, _ = model(4 * 32, False)
    parts, _ = model(2 * 32, False)

    one, other = prove(StepUnderTest(whole, ROWS)), prove(StepUnderTest(parts, ROWS))

    assert str(one.divergence) == str(other.divergence)
    assert set(other.differing) <= set(one.differing) and "gradient of layers.0.inner.0.weight" in other.differing


def test_what_fits_in_no_way_is_the_users_error():
    with pytest.raises(torch.OutOfMemoryError):
        lowtide.diagnose(model(0, True)[0], ROWS)


def test_where_nothing_can_be_compared_it_is_told():
    net, _ = model(1, True)

    found = lowtide.diagnose(net, ROWS[:1], only=["LT001"])

    assert not found and "LT001: OutOfMemoryError" in found.notes[0]
