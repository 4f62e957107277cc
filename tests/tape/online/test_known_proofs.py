"""Values that go without a proof of their own: what is made again at a place of the model has been proven there."""

import pytest
import torch
from support.online_steps import Steps, layers, online
from support.training_steps import differing
from support.unseen_memory import memory_of
from torch import nn

from lowtide.errors import ReplayError
from lowtide.tape.online import known_proofs, release

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_place_is_proven_in_the_first_step_alone():
    model, x = layers(), torch.randn(256, 64)
    plain, free = online(model, x, float("inf"))
    steps = Steps(model, 0.5 * free.live.peak)
    seen = [steps.run(x) for _ in range(3)]

    assert all(differing(plain, found) == [] for found, _ in seen)
    first, *later = [tape.releaser.num_proofs for _, tape in seen]
    assert first > 0
    assert later == [0, 0]
    assert all(tape.releaser.num_released > 0 for _, tape in seen)


@pytest.mark.parametrize(("rows", "is_proven"), [(400, False), (272, False), (520, True)])
def test_sizes_between_two_powers_of_two_are_one_kind(rows, is_proven):
    model = layers()
    peak = online(model, torch.randn(rows, 64), float("inf"))[1].live.peak
    steps = Steps(model, 0.5 * peak)
    steps.budget_bytes = 0.5 * online(model, torch.randn(304, 64), float("inf"))[1].live.peak
    for _ in range(2):
        steps.run(torch.randn(304, 64))
    steps.budget_bytes = 0.5 * peak

    _, tape = steps.run(torch.randn(rows, 64))

    assert tape.releaser.num_released > 0
    assert (tape.releaser.num_proofs > 5) is is_proven


class RawWrites(nn.Module):
    """The same op at two places; what the second one reads is written past every version counter, if asked."""

    def __init__(self, writes: bool = True) -> None:
        super().__init__()
        self.weight, self.writes = nn.Parameter(torch.randn(64, 64)), writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = (x @ self.weight).sin()
        hidden = first * self.weight
        second = hidden.sin()
        product = second * second
        if self.writes:
            memory_of(hidden)[0, 0] = 9.0
        return (product.cos() * hidden.detach()).tanh().exp().sigmoid()


def test_what_differs_at_a_place_is_kept_in_each_step():
    model, x = RawWrites(), torch.randn(64, 64)
    plain, _ = online(model, x, float("inf"))
    steps = Steps(model, 0)

    for _ in range(3):
        found, tape = steps.run(x)
        assert differing(plain, found) == []
        assert tape.releaser.differed


def test_a_proof_says_nothing_of_another_place(monkeypatch):
    model, x = RawWrites(), torch.randn(64, 64)
    plain, _ = online(model, x, float("inf"))
    calm = RawWrites(writes=False)

    def wrong() -> list[str]:
        steps = Steps(calm, 0)
        steps.run(x)  # all places but those of the write are the same
        steps.model = model
        return differing(plain, steps.run(x)[0])

    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    steps = Steps(calm, 0)
    steps.run(x)
    steps.model = Elsewhere()
    assert differing(online(Elsewhere(), x, float("inf"))[0], steps.run(x)[0]) == []

    of_any_place = known_proofs.kind_of
    monkeypatch.setattr(known_proofs, "SEAL_EVERY", 10**9)
    monkeypatch.setattr(known_proofs, "kind_of", lambda recipe: (of_any_place(recipe) or (None,))[1:] or None)
    steps = Steps(calm, 0)
    steps.run(x)
    steps.model = Elsewhere()
    assert differing(online(Elsewhere(), x, float("inf"))[0], steps.run(x)[0]) != []


def test_a_value_that_differs_where_it_was_proven_before_is_an_error_where_it_is_sealed(monkeypatch):
    model, x = RawWrites(writes=False), torch.randn(64, 64)
    written = RawWrites()
    written.load_state_dict(model.state_dict())
    plain, _ = online(written, x, float("inf"))

    def second_step() -> dict[str, torch.Tensor | None]:
        steps = Steps(model, 0)
        steps.run(x)
        steps.model = written
        return steps.run(x)[0]

    monkeypatch.setattr(known_proofs, "SEAL_EVERY", 1)
    with pytest.raises(ReplayError, match="gives other bits than in the forward pass"):
        second_step()

    monkeypatch.setattr(release, "sum_of_words", lambda tensor: 0)
    assert differing(plain, second_step()) != []
