"""What is still held when a step is over."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.step.execution_state import ExecutionState
from lowtide.tape.online.holdings import Holdings
from lowtide.tape.online.online_values import MARK, Claim, StoredValue


def stored(number, *inputs):
    memory = torch.ones(1000)
    value = StoredValue(memory.untyped_storage(), number, 0, 0, ExecutionState(lambda: None))
    memory.untyped_storage().__dict__[MARK] = value
    value.recipe = SimpleNamespace(inputs=inputs) if inputs else None
    return value, memory


def test_what_no_claim_asks_for_goes_though_readers_are_counted():
    holdings = Holdings()
    (counted, memory), (kept, kept_memory) = stored(1), stored(2)
    counted.readers_released = 1  # the reader has been made again, or is gone
    holdings.hold(counted, memory)
    claim = Claim(kept, holdings.end_claim)
    holdings.claim(kept, claim, kept_memory)

    holdings.let_go_unclaimed()

    assert counted.tensor is None and list(holdings) == [kept] and kept.tensor is kept_memory
    alive = weakref.ref(memory.untyped_storage())
    del memory
    gc.collect()
    assert alive() is None


def test_what_a_released_value_is_made_from_stays_as_long_as_it_is_claimed():
    holdings = Holdings()
    root, _root_memory = stored(1)
    between, _ = stored(2, root)
    last, last_memory = stored(3, between)
    claim = Claim(last, holdings.end_claim)
    holdings.claim(last, claim, last_memory)
    holdings.release(last)
    assert list(holdings) == [root]

    holdings.let_go_unclaimed()
    assert list(holdings) == [root]
    del claim
    holdings.let_go_unclaimed()
    assert list(holdings) == []


@pytest.mark.parametrize("kept", [False, True])
def test_after_a_watched_step_the_tape_holds_what_a_kept_graph_needs_and_no_more(kept, monkeypatch):
    held_at_end = []
    let_go = Holdings.let_go_unclaimed

    def miscounting(holdings):
        for value in holdings:
            value.readers_released += 1
        let_go(holdings)
        held_at_end.append(len(list(holdings)))

    monkeypatch.setattr(Holdings, "let_go_unclaimed", miscounting)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    batch = torch.randn(512, 64)
    plain = [g.clone() for g in torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))]
    fit = lowtide.fit(model, budget="60%")
    loss = model(batch).square().mean()
    loss.backward(retain_graph=kept)
    if kept:
        model.zero_grad()
        loss.backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), plain))
    model.zero_grad()
    model(batch).square().mean().backward()
    fit.remove()
    assert held_at_end and held_at_end[-1] == 0
