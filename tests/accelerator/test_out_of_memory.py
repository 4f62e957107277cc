"""A step without a plan on a device that has less memory than its budget says: it lets go of more and goes on."""

import gc

import pytest
import torch
from support.training_steps import mlp

import lowtide
from lowtide.runtime.watched_step import WatchedStep
from lowtide.tape.online import online_tape

MIB = 2**20
NO_HOST = lowtide.Offload(host_budget=None)
CAPACITIES = [80, 72, 64, 56]  # MiB; the plain step takes 85 and reserves more


def trained(device, capacity_mib, steps=3, **budget):
    """Losses and weights after some steps of a watched fit, its status, and how often memory ran out for the user."""
    torch.manual_seed(0)
    model, batch = mlp(8, 128).to("standin"), torch.randn(8192, 128, device="standin")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, failures = [], 0
    gc.collect()
    torch.accelerator.empty_cache()
    with device.capacity(capacity_mib * MIB):
        fit = lowtide.fit(model, optimizer=optimizer, offload=NO_HOST, **budget) if budget else None
        for _ in range(steps):
            try:
                loss = model(batch).square().mean()
                loss.backward()
            except torch.OutOfMemoryError:
                failures += 1
                continue
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        status = None if fit is None else fit.status()
        if fit is not None:
            fit.remove()
    return losses, [p.detach().cpu() for p in model.parameters()], status, failures


@pytest.mark.parametrize("capacity_mib", CAPACITIES)
def test_every_step_finishes_with_the_bits_of_plain_training(device, capacity_mib):
    plain_losses, plain, *_ = trained(device, 1 << 10)
    losses, weights, status, failures = trained(device, capacity_mib, budget="auto")

    assert failures == 0 and losses == plain_losses
    assert all(map(torch.equal, weights, plain))
    assert status.steps == 3 and status.highest_peak_bytes <= capacity_mib * MIB


@pytest.mark.parametrize("attempts", [1, 4])
def test_an_op_without_memory_runs_again_when_more_has_been_let_go(device, monkeypatch, attempts):
    """As where others take memory in the middle of a step: the budget is not what the device has."""
    monkeypatch.setattr(online_tape, "ATTEMPTS", attempts)
    refused = []
    run_timed = WatchedStep._run_timed

    def run_or_refuse(tape, func, args, kwargs):
        if not refused and func is torch.ops.aten.addmm.default and tape.live.now > 40 * MIB:
            refused.append(tape)
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 4.00 MiB.")
        return run_timed(tape, func, args, kwargs)

    monkeypatch.setattr(WatchedStep, "_run_timed", run_or_refuse)
    plain_losses, *_ = trained(device, 1 << 10, steps=1)
    asked_bytes = torch.accelerator.memory_allocated() + 64 * MIB
    losses, _, status, failures = trained(device, 1 << 10, steps=1, budget=asked_bytes)

    (tape,) = refused
    if attempts == 1:
        assert failures == 1 and tape.releaser.num_released == 0
    else:
        assert failures == 0 and losses == plain_losses and tape.releaser.num_released > 0
        assert tape.live.peak < asked_bytes and "out of memory" in " ".join(status.reasons)


def test_where_nothing_fits_the_error_says_what_was_held(device):
    model, batch = mlp(8, 128).to("standin"), torch.randn(8192, 128, device="standin")
    gc.collect()
    torch.accelerator.empty_cache()
    with device.capacity(torch.accelerator.memory_reserved() + 4 * MIB):
        with lowtide.fit(model, budget="1GiB", offload=NO_HOST), pytest.raises(torch.OutOfMemoryError) as caught:
            model(batch).square().mean().backward()

    told = "".join(caught.value.__notes__)
    assert "when memory ran out, this step held" in told and "lowtide let go of all that it could" in told
