"""Ops of a plan that are proven in its first step take no more memory than the plan says."""

import pytest
import torch
from support.watched_training import batch_of, train
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
_BALLAST, _WIDTHS = 48, (8, 9)  # times the batch


class Wide(nn.Module):
    """Two wide values, each beside ballast that is there in forward only: to fit, the first of them has to go."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        hidden, total = self.linear(x), 0
        for width in _WIDTHS:
            ballast = torch.cat([x] * _BALLAST, 1)
            total = total + torch.cat([hidden] * width, 1).norm(dim=1)
            del ballast
        return total


def test_what_is_proven_in_a_planned_step_takes_no_more_than_the_plan():
    model, batch = Wide(), batch_of(512)
    with lowtide.fit(model, budget="90%") as fit:
        for _ in range(3):
            train(model, [batch])
            fit.wait()
        (planned,) = fit._lifecycle.plans_by_shape.plans
        dropped = [op for op in planned.tape.program.ops if op.drops]
        assert any("cat" in op.name for op in dropped)
        proven_bytes = peak_bytes(lambda: train(model, [batch]))
        for op in dropped:
            op.proven = False
        bytes_of_proofs = peak_bytes(lambda: train(model, [batch]))

        assert fit.status().in_force and all(op.proven for op in dropped)
    assert proven_bytes > _BALLAST * batch.nbytes
    assert bytes_of_proofs == pytest.approx(proven_bytes, rel=1e-3)
