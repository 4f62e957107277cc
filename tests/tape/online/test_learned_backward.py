"""Backwards whose ops no mode sees, since what they hold is known."""

from typing import Any

import pytest
import torch
from support.online_steps import Steps, layers, online
from support.training_steps import differing
from torch import nn

from lowtide.errors import ReplayError
from lowtide.measurement.allocator import peak_bytes
from lowtide.tape.online import online_tape
from lowtide.tape.online.holdings import Holdings
from lowtide.tape.online.learned_backward import SeenBackward, UnseenBackward
from lowtide.tape.online.live_bytes import LiveBytes
from lowtide.tape.online.online_calls import KnownCalls
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.online.release import Releaser
from lowtide.tape.online.room import ExpectedBytes, LearnedBackward

pytestmark = pytest.mark.usefixtures("one_thread")


def saw_backward(tape: OnlineTape) -> bool:
    return tape.number > tape.releaser.num_ops


@pytest.mark.parametrize("share", [1.0, 0.7, 0.4])
def test_only_the_first_backward_of_a_sequence_is_seen_and_all_keep_the_budget(share):
    model, x = layers(), torch.randn(256, 64)
    plain, free = online(model, x, float("inf"))
    steps = Steps(model, share * free.live.peak)
    seen = [steps.run(x) for _ in range(3)]

    assert [saw_backward(tape) for _, tape in seen] == [True, False, False]
    assert all(differing(plain, found) == [] for found, _ in seen)
    own = peak_bytes(lambda: online(model, x, float("inf"))) - free.live.peak  # copies of the model
    assert peak_bytes(lambda: steps.run(x)) <= own + 1.02 * share * free.live.peak


def test_a_backward_of_other_forward_ops_is_seen():
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[: int(x[0, 0] > 0) + 4]:
                x = layer(x)
            return x

    model, x = Skips(), torch.randn(256, 64)
    x[0, 0] = 1.0
    other = x.clone()
    other[0, 0] = -1.0
    steps = Steps(model, 0.5 * online(model, x, float("inf"))[1].live.peak)

    assert [saw_backward(steps.run(batch)[1]) for batch in (x, other, x, other)] == [True, True, False, False]


class WritesInBackward(torch.autograd.Function):
    """Its backward writes what recipes of the forward pass read; plain autograd does not mind."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        ctx.shift = shift
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.shift.add_(1.0)
        return gradient, None


class WritesWhatRecipesRead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("shift", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = ((x @ self.weight + self.shift).sin() * 2).cos().tanh()
        return WritesInBackward.apply(z.exp(), self.shift)


def test_a_backward_that_writes_what_recipes_read_is_always_seen(monkeypatch):
    model, x = WritesWhatRecipesRead(), torch.randn(64, 64)
    plain, _ = online(model, x, float("inf"))
    steps = Steps(model, 0)
    for _ in range(3):
        found, tape = steps.run(x)
        assert differing(plain, found) == []
        assert saw_backward(tape)

    monkeypatch.setattr(SeenBackward, "keep_mode", lambda self: None)
    unguarded = Steps(model, 0)
    unguarded.run(x)
    with pytest.raises(ReplayError, match="changed in place"):
        unguarded.run(x)


def test_one_that_unpacks_another_number_of_tensors_is_seen_from_then_on():
    model, x = layers(), torch.randn(256, 64)
    expected, known = ExpectedBytes(), KnownCalls()

    def step(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = copied(batch).square().mean()
        if cut_short:
            loss.register_hook(lambda gradient: gradient)
        return loss

    def run() -> OnlineTape:
        def make(model: nn.Module, budget_bytes: float) -> OnlineTape:
            tape = OnlineTape(model, budget_bytes, expected, known)
            if cut_short:  # only the last layer is trained
                for p in model[:-1].parameters():
                    p.requires_grad_(False)
            return tape

        return online(model, x, 1e9, step=step, make=make)[1]

    cut_short = False
    run()
    cut_short = True
    assert not saw_backward(run())
    assert saw_backward(run())


def test_nothing_is_known_of_a_backward_that_failed():
    model, x = layers(), torch.randn(256, 64)
    steps = Steps(model, 1e9)

    class FailsError(Exception):
        pass

    def failing(gradient: torch.Tensor) -> torch.Tensor:
        raise FailsError

    def step(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output = copied(batch)
        output.register_hook(failing)
        return output.square().mean()

    def make(model: nn.Module, budget_bytes: float) -> OnlineTape:
        return OnlineTape(model, budget_bytes, steps.expected, steps.known_calls)

    with pytest.raises(FailsError):
        online(model, x, 1e9, step=step, make=make)
    assert saw_backward(online(model, x, 1e9, step=lambda m, b: m(b).square().mean(), make=make)[1])


def test_what_kernels_take_beside_what_they_make_is_learned(monkeypatch):
    run_counted = OnlineTape._run_counted

    def taking_more(self: OnlineTape, need: Any, inputs: list, read_bytes: int, func: Any, *given: Any) -> Any:
        made = run_counted(self, need, inputs, read_bytes, func, *given)
        self.note_workspace(func, 1 << 20)
        return made

    model, x = layers(), torch.randn(256, 64)

    def most() -> int:
        steps = Steps(model, float("inf"))
        steps.run(x)
        (learned,) = steps.expected.backwards._known.values()
        return max(learned.most_bytes)

    before = most()
    monkeypatch.setattr(OnlineTape, "_run_counted", taking_more)
    assert most() >= before + (1 << 20) // 2


def test_what_an_allocator_does_not_split_off_is_left_free_while_no_op_is_seen():
    learned = LearnedBackward([0, 1, 2, 3, 4, 5, 6], [10, 11, 12, 13, 14, 15, 16], unpacked=[1, 2, 3, 4, 5])
    live, asked = LiveBytes(), list[int]()
    releaser = Releaser(Holdings(), live, 1000)

    def unsplit(held_bytes: int) -> int:
        asked.append(held_bytes)
        return 100 * len(asked)

    backward = UnseenBackward(learned, live, releaser, unsplit)
    assert releaser.aside_bytes == 10 + 100
    for claim in range(1, 5):
        backward.note_unpacking(claim)
        backward.note_unpacked()

    assert asked == [0, 4]
    assert releaser.aside_bytes == 14 + 200
    assert live.peak == 14


@pytest.mark.parametrize("live, expected", [(60 << 20, (5 << 20) + (1 << 20)), (30 << 20, 0)])
def test_an_allocator_is_asked_once_half_of_the_budget_is_full(live, expected, monkeypatch):
    """1 MiB is left for the next block."""
    monkeypatch.setattr(online_tape, "allocated_bytes", lambda device: 75 << 20)
    tape = OnlineTape(None, 100 << 20)
    tape.releaser.device, tape.live.now = torch.device("cuda"), live
    tape.run_state.most_unsplit_bytes = 1 << 20

    assert tape._unsplit_bytes(10 << 20) == expected


@pytest.mark.parametrize("order, aside", [((3, 1), 12), ((1, 3), 20), ((3, 2), 20)])
def test_a_backward_in_another_order_is_given_the_most_and_is_seen_the_next_time(order, aside):
    learned = LearnedBackward([0, 1, 2, 3], [10, 20, 12, 11], unpacked=[3, 1])
    releaser = Releaser(Holdings(), LiveBytes(), 1000)
    backward = UnseenBackward(learned, LiveBytes(), releaser, lambda held_bytes: 0)
    for claim in order:
        backward.note_unpacking(claim)
        backward.note_unpacked()

    assert releaser.aside_bytes == aside
    assert backward.end() == (aside == 12)
