"""Jagged nested tensors: ops on them come to ops on plain values, and what autograd stores of them stays."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.tape import values
from lowtide.tape.online import online_tape

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*nested tensors.*")]


class Jagged(nn.Module):
    """Layers on sequences of two lengths, then on their values."""

    def __init__(self) -> None:
        super().__init__()
        self.on_sequences, self.on_values = (
            nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(32, 32), nn.GELU()))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequences = torch.nested.nested_tensor([x[:100], x[100:]], layout=torch.jagged)
        return self.on_values(self.on_sequences(sequences).values())


def trained(budget: str | None) -> tuple[list[torch.Tensor], lowtide.Fit | None]:
    torch.manual_seed(0)
    model = Jagged()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit = None if budget is None else lowtide.fit(model, budget=budget)
    for i in range(4):
        x = torch.randn(512, 32, generator=torch.Generator(torch.get_default_device()).manual_seed(i))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if fit is not None:
            fit.wait()
    return [p.detach().clone() for p in model.parameters()], fit


def test_steps_on_them_are_planned_and_as_plain():
    plain, _ = trained(None)
    ours, fit = trained("80%")
    assert all(map(torch.equal, plain, ours))
    assert fit.status().planned_steps == 3
    assert not any("saved whole" in line for line in fit.status().reasons)
    assert any(d.action == "recompute" for d in fit.plan.decisions)
    fit.remove()


def test_under_a_mode_that_takes_ops_on_them_for_its_own_nothing_is_planned(monkeypatch):
    monkeypatch.setattr(online_tape, "is_opened_type", online_tape.is_wrapper_type)
    _, fit = trained("1MiB")
    assert not fit.status().planned_steps and any("NestedTensor" in line for line in fit.status().reasons)
    fit.remove()


def test_what_is_kept_of_one_is_one():
    sequences = torch.nested.nested_tensor_from_jagged(torch.ones(6, 2), torch.tensor([0, 2, 6]))
    kept = values.detached(sequences)
    assert type(kept) is type(sequences) and torch.equal(kept.values(), sequences.values())
