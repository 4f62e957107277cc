"""A replay with other bits is an error before an optimizer can step, and a planned step hardly waits for the device."""

import pytest
import torch
from support.training_steps import mlp

import lowtide
from accelerator.schedules import EARLY, LATE
from lowtide.errors import ReplayError
from lowtide.step import bits, storage_bits
from lowtide.step.bits import same_bits

MIB = 2**20
NO_HOST = lowtide.Offload(host_budget=None)
SEALED_STEPS = 16  # in so many steps each dropped tensor is sealed once


class Training:
    """A planned fit that drops tensors in each step; ``meddles`` writes what they are made of, unseen."""

    def __init__(self):
        torch.manual_seed(0)
        self.model, self.batch = mlp(8, 64).to("standin"), torch.randn(2048, 64, device="standin")
        self.meddles = False
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.step()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        self.step()
        share = 0.5 * (torch.accelerator.max_memory_allocated() - before)
        self.fit = lowtide.fit(self.model, self.batch, budget=int(before + share), offload=NO_HOST)

    def step(self):
        loss = self.model(self.batch).square().mean()
        if self.meddles:
            for p in self.model.parameters():
                p.data.add_(1e-3)
        loss.backward()


@pytest.fixture
def training(device):
    training = Training()
    with training.fit:
        yield training


@pytest.mark.parametrize("schedule", [(EARLY, EARLY), (LATE, LATE), (LATE, EARLY), (EARLY, LATE)])
def test_right_replays_are_found_right_on_every_schedule(device, training, schedule):
    with device.schedule(*schedule):
        for _ in range(SEALED_STEPS):
            training.step()
    status = training.fit.status()
    assert status.planned_steps == SEALED_STEPS and status.reasons == ()


@pytest.mark.parametrize("schedule", [(EARLY, EARLY), (LATE, LATE)])
def test_after_a_change_that_no_version_shows_no_gradient_is_a_number_and_backward_ends_with_an_error(
    device, training, schedule
):
    for _ in range(2):
        training.step()
    training.meddles = True
    with device.schedule(*schedule), pytest.raises(ReplayError, match="are not a number, or wrong") as raised:
        for number in range(3 * SEALED_STEPS):
            training.step()
            if number == SEALED_STEPS - 1:  # each dropped tensor has been compared
                assert all(p.grad.isnan().any() for p in list(training.model.parameters())[:2])
    assert "was changed since, without a version" in str(raised.value)


@pytest.mark.parametrize("asks", [lowtide.Fit.wait, lowtide.Fit.remove])
def test_who_waits_or_ends_is_told_of_what_was_not_raised_yet(training, asks):
    training.meddles = True
    for _ in range(SEALED_STEPS - 1):
        training.step()
    assert "other bits than in the forward pass" not in " ".join(training.fit.warnings)
    asks(training.fit)
    assert "other bits than in the forward pass" in " ".join(training.fit.warnings)


def test_without_nan_gradients_would_be_numbers(training, monkeypatch):
    monkeypatch.setattr(storage_bits, "_spoil_where", lambda differs, tensor: None)
    training.meddles = True
    for _ in range(SEALED_STEPS - 1):
        training.step()
    assert not any(p.grad.isnan().any() for p in training.model.parameters())


def test_without_the_comparison_nothing_tells(training, monkeypatch):
    monkeypatch.setattr(storage_bits.SealsOnDevice, "_look", lambda self, reading, *, waits: None)
    training.meddles = True
    for _ in range(2 * SEALED_STEPS):
        training.step()
    assert training.fit.status().planned_steps == 2 * SEALED_STEPS and not training.fit.warnings


def test_where_an_optimizer_steps_inside_backward_the_error_comes_before_any_gradient(training):
    stepped = []
    for p in training.model.parameters():
        p.register_post_accumulate_grad_hook(stepped.append)
    training.meddles = True
    with pytest.raises(ReplayError, match="No gradient was computed from it"):
        for _ in range(SEALED_STEPS):
            stepped.clear()
            training.step()
    assert len(stepped) < len(list(training.model.parameters()))


@pytest.mark.parametrize("schedule", [(EARLY, EARLY), (LATE, EARLY)])
def test_a_planned_step_does_not_wait_for_the_device(device, training, schedule):
    for _ in range(2):  # ops are proven at their birth
        training.step()
    waits = []
    with device.schedule(*schedule):
        for _ in range(2 * SEALED_STEPS):
            before = device.synchronized()
            training.step()
            waits.append(device.synchronized() - before)
    assert max(waits) == 0
    assert training.fit.status().reasons == ()


def test_a_comparison_takes_hardly_any_memory(device, monkeypatch):
    whole = torch.randint(0, 2**60, (2**22 + 7,)).to("standin")
    transposed = whole[: 2**22].view(2**11, 2**11).t()
    for a in (whole, transposed):
        same, other = a.clone(), a.clone()
        other[(-1,) * a.dim()] += 1
        assert same_bits(a, same) and not same_bits(a, other)
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        same_bits(a, same)
        assert torch.accelerator.max_memory_allocated() - before <= 2 * MIB
    monkeypatch.setattr(bits, "_PIECE", 1 << 40)
    torch.accelerator.reset_peak_memory_stats()
    same_bits(whole, whole.clone())
    assert torch.accelerator.max_memory_allocated() - before > 4 * MIB
