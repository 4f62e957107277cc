"""Gradients that users change: they come and go in mid-training, hooks replace them, an optimizer keeps its own lists.

Each training is bitwise the plain one, and each step within the budget.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from support.watched_training import resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, WIDTH, STEPS = 512, 64, 8


class Branched(nn.Module):
    """A second head that not every step asks for: its gradients come and go."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            *(part for _ in range(5) for part in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()))
        )
        self.head, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        x = self.body(x)
        return self.head(x) + self.other(x) if both else self.head(x)


Loop = Callable[[nn.Module], Iterator[Callable[[], torch.Tensor]]]


def data(i: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator(torch.get_default_device()).manual_seed(i))


def steps_of(
    model: nn.Module, *, update: Callable[[], None], both: Callable[[int], bool] = lambda i: False, inputs=None
) -> Iterator[Callable[[], torch.Tensor]]:
    for i in range(STEPS):
        x = data(i)

        def step(x: torch.Tensor = x, i: int = i) -> torch.Tensor:
            loss = model(x, both(i)).square().mean()
            loss.backward(inputs=None if inputs is None else inputs(i))
            return loss.detach().clone()

        yield step
        update()


@torch.no_grad()
def descend(model: nn.Module, *, keep: Callable[[str], bool] = lambda name: False) -> None:
    for name, p in model.named_parameters():
        if p.grad is not None:
            p.add_(p.grad, alpha=-1e-2)
            if keep(name):
                p.grad.zero_()
            else:
                p.grad = None


def a_head_comes_and_goes(model: nn.Module) -> Iterator[Callable[[], torch.Tensor]]:
    return steps_of(model, update=lambda: descend(model), both=lambda i: i % 3 == 2)


def some_gradients_stay(model: nn.Module) -> Iterator[Callable[[], torch.Tensor]]:
    return steps_of(model, update=lambda: descend(model, keep=lambda name: name.startswith("head")))


def they_stay_from_the_fifth_step_on(model: nn.Module) -> Iterator[Callable[[], torch.Tensor]]:
    done: list[int] = []

    def update() -> None:
        done.append(1)
        descend(model, keep=lambda name: len(done) > 4)

    return steps_of(model, update=update)


def a_hook_gives_another(model: nn.Module) -> Iterator[Callable[[], torch.Tensor]]:
    """A new tensor in place of each ``.grad``, and of the gradient before it is one."""

    def other(p: torch.Tensor) -> None:
        p.grad = p.grad / (p.grad.norm() + 1e-6)

    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-1, 1))
        p.register_post_accumulate_grad_hook(other)
    return steps_of(model, update=lambda: descend(model))


def a_hook_keeps_them_elsewhere(model: nn.Module) -> Iterator[Callable[[], torch.Tensor]]:
    """As ``main_grad``: each gradient is added to another tensor in backward, and goes."""
    sums = {p: torch.zeros_like(p) for p in model.parameters()}

    def add(p: torch.Tensor) -> None:
        sums[p].add_(p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(add)

    @torch.no_grad()
    def update() -> None:
        for p, total in sums.items():
            p.add_(total, alpha=-1e-2)
            total.zero_()

    return steps_of(model, update=update)


def other_inputs_each_time(model: nn.Module) -> Iterator[Callable[[], torch.Tensor]]:
    """``backward(inputs=...)``: the last layers, and every other step all of them."""
    every = [p for name, p in model.named_parameters() if not name.startswith("other")]
    return steps_of(model, update=lambda: descend(model), inputs=lambda i: every if i % 2 else every[-8:])


def state_elsewhere(model: nn.Module) -> Iterator[Callable[[], torch.Tensor]]:
    """No ``torch.optim``: momenta in a list of the loop, made at the first step."""
    momenta: list[torch.Tensor] = []
    trained = list(model.body.parameters())

    @torch.no_grad()
    def update() -> None:
        if not momenta:
            momenta.extend(map(torch.zeros_like, trained))
        for p, momentum in zip(trained, momenta):
            p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=1e-2)
        model.zero_grad()

    return steps_of(model, update=update)


LOOPS: tuple[Loop, ...] = (
    a_head_comes_and_goes, some_gradients_stay, they_stay_from_the_fifth_step_on, a_hook_gives_another,
    a_hook_keeps_them_elsewhere, other_inputs_each_time, state_elsewhere,
)  # fmt: skip


def train(loop: Loop, model: nn.Module, fit: lowtide.Fit | None) -> tuple[list[torch.Tensor], list[int]]:
    """Losses, and peaks of steps beside parameters and batch."""
    losses, peaks = [], []
    for step in loop(model):
        before = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        peaks.append(before + peak_bytes(lambda step=step: losses.append(step())))
        if fit is not None:
            fit.wait()
    return losses, peaks


@pytest.mark.parametrize("loop", LOOPS)
def test_a_training_is_bitwise_and_within_its_budget(loop):
    plain, ours = Branched(), Branched()
    losses, peaks = train(loop, plain, None)
    allowed = int(0.75 * max(peaks))
    beside = sum(p.nbytes for p in ours.parameters()) if loop in (a_hook_keeps_them_elsewhere,) else 0

    with lowtide.fit(ours, budget=resident_bytes(ours) + beside + ROWS * WIDTH * 4 + allowed) as fit:
        found, taken = train(loop, ours, fit)
        status = fit.status()

    assert all(map(torch.equal, losses, found))
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    assert max(taken) <= 1.01 * allowed, (taken, allowed, status)
    assert status.planned_steps + status.plan_left_steps >= STEPS // 2, status
