"""``nn.Embedding(sparse=True)``: its gradient has indices and values, no storage of its own."""

import pytest
import torch
from support.watched_training import Layered, resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.tape.online import room

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 512


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(1000, 64, sparse=True), Layered()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(x).sum(1))


def trained(budget: int | None) -> tuple[list[torch.Tensor], list[int], lowtide.Fit | None]:
    """Weights, the peak of each step beside what is there before it, and the fit."""
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit = None if budget is None else lowtide.fit(model, budget=budget)
    batches = [
        torch.randint(1000, (ROWS, 4), generator=torch.Generator(torch.get_default_device()).manual_seed(i))
        for i in range(5)
    ]
    peaks = []
    for batch in batches:
        peaks.append(peak_bytes(lambda batch=batch: model(batch).square().mean().backward()))
        optimizer.step()
        optimizer.zero_grad()
        if fit is not None:
            fit.wait()
    return [p.detach().clone() for p in model.parameters()], peaks, fit


def test_steps_are_planned_within_the_budget_and_as_plain(repeated):
    plain_runs = []

    def run_plain():
        plain_runs.append(trained(None))
        return plain_runs[-1][0]

    plain = repeated(run_plain)
    peaks = plain_runs[-1][1]
    there = resident_bytes(Words()) + ROWS * 4 * 8
    budget = there + int(0.7 * max(peaks))
    ours, peaks, fit = trained(budget)
    assert fit.status().planned_steps == 4 and "saved whole" not in " ".join(fit.status().reasons)
    assert all(map(torch.equal, plain, ours))
    assert max(peaks[1:]) + there <= 1.01 * budget
    fit.remove()


def test_what_has_no_storage_is_guessed():
    index, values = torch.tensor([[0, 2]]), torch.ones(2, 3)
    assert room._made_on_meta(torch.ops.aten._sparse_coo_tensor_unsafe.default, (index, values, [4, 3]), {}) is None
