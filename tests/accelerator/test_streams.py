"""Streams run when the schedule says, and a missing wait is wrong on one schedule, every time."""

import pytest
import torch

from accelerator.schedules import EARLY, LATE, RANDOM, SCHEDULES, schedule_name

ALL = pytest.mark.parametrize("schedule", SCHEDULES, ids=schedule_name)
WANTED = torch.arange(1000.0)


def out_and_back(*, produced=True, copied=True, fetched=True, read=True):
    """Values made on the default stream, copied out and back on streams of their own. Each argument is one wait."""
    compute, out, back = torch.accelerator.current_stream(), torch.Stream("standin"), torch.Stream("standin")
    host = torch.zeros(1000, pin_memory=True)
    values = torch.arange(1000.0, device="standin") * 2
    if produced:
        out.wait_stream(compute)
    with out:
        host.copy_(values, non_blocking=True)
        left = out.record_event()
    if copied:
        compute.wait_event(left)
    values.zero_()  # the memory is used for something else
    fetched_values = torch.empty(1000, device="standin")
    if fetched:
        back.wait_event(left)
        back.wait_stream(compute)  # its memory may have been another's
    with back:
        fetched_values.copy_(host, non_blocking=True)
        arrived = back.record_event()
    if read:
        compute.wait_event(arrived)
    result = (fetched_values / 2).cpu()
    torch.accelerator.synchronize()
    return result


@ALL
def test_with_every_wait_the_bytes_are_right(device, schedule):
    for seed in range(4):
        with device.schedule(*schedule, seed=seed):
            assert out_and_back().equal(WANTED)


@pytest.mark.parametrize(
    ("wait", "found_on"),
    [
        ("produced", {"late-early"}),
        ("copied", {"late-late", "early-late"}),
        ("fetched", {"late-early"}),
        ("read", {"late-late", "early-late"}),
    ],
)
def test_a_missing_wait_is_found_every_time(device, wait, found_on):
    found = []
    for _ in range(2):
        wrong = set()
        for schedule in set(SCHEDULES) - {(RANDOM, RANDOM)}:
            with device.schedule(*schedule):
                if not out_and_back(**{wait: False}).equal(WANTED):
                    wrong.add(schedule_name(schedule))
        found.append(wrong)

    assert found == [found_on, found_on]


def test_a_seed_gives_one_order(device):
    def results():
        found = []
        for seed in range(12):
            with device.schedule(RANDOM, RANDOM, seed=seed):
                found.append(out_and_back(produced=False, copied=False, fetched=False, read=False).equal(WANTED))
        return found

    first = results()
    assert first == results()
    assert not all(first)


def test_the_error_of_a_kernel_comes_when_the_host_waits(device):
    with device.schedule(LATE, LATE):
        torch.zeros(3, device="standin")[torch.tensor([7], device="standin")]
        with pytest.raises(IndexError, match="index 7 is out of bounds"):
            torch.accelerator.synchronize()
        torch.accelerator.synchronize()


def test_a_loop_that_asks_for_an_event_comes_to_its_end(device):
    with device.schedule(LATE, LATE):
        torch.ones(3, device="standin").mul_(2).add_(1)
        event = torch.accelerator.current_stream().record_event()
        questions = 1
        while not event.query():
            questions += 1
        assert questions > 2


def test_streams_belong_to_a_thread_and_a_device(device):
    side = torch.Stream("standin:1")
    with side:
        assert torch.accelerator.current_stream() == side
        assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_stream(1) != side
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("schedule", [(EARLY, EARLY), (LATE, LATE)], ids=schedule_name)
def test_no_op_of_a_training_step_makes_the_host_wait(device, schedule):
    layer = torch.nn.Linear(4, 4, device="standin")
    inputs = torch.randn(2, 4, device="standin")
    with device.schedule(*schedule):
        before = device.synchronized()
        torch.nn.functional.gelu(layer(inputs)).sum().backward()
        assert device.synchronized() == before
