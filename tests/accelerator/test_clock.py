"""The clock is the device's own: overlap of copies and kernels is exact, and no schedule changes it."""

import pytest
import torch

from accelerator.schedules import EARLY, LATE, SCHEDULES, schedule_name

ALL = pytest.mark.parametrize("schedule", SCHEDULES, ids=schedule_name)
MS = 1000  # elements of float32 that take one millisecond to copy


@pytest.fixture
def clock(device):
    with device.times(op_ms=1, copy_bytes_per_ms=4 * MS, ms_by_op={"aten::mm": 5}):
        yield device


class Timer:
    """Milliseconds on the device's clock, from here until all streams are done."""

    def __init__(self):
        torch.accelerator.synchronize()
        self.begin = torch.Event("standin", enable_timing=True)
        self.begin.record()

    def ms(self, *streams):
        default = torch.accelerator.current_stream()
        for stream in streams:
            default.wait_stream(stream)
        end = torch.Event("standin", enable_timing=True)
        end.record()
        end.synchronize()
        return self.begin.elapsed_time(end)


@ALL
def test_kernels_follow_one_another(clock, schedule):
    side, values = torch.Stream("standin"), torch.ones(4, 4, device="standin")
    with clock.schedule(*schedule):
        timer = Timer()
        values @ values
        with side:  # one kernel at a time on a device, also from another stream
            values + values
        assert timer.ms(side) == 6


@ALL
def test_a_copy_runs_beside_kernels_if_nothing_makes_it_wait(clock, schedule):
    side, values = torch.Stream("standin"), torch.ones(4, 4, device="standin")
    host, target = torch.zeros(4 * MS, pin_memory=True), torch.empty(4 * MS, device="standin")
    with clock.schedule(*schedule):
        for wait, expected_ms in ((False, 5), (True, 9)):
            timer = Timer()
            values @ values
            if wait:
                side.wait_stream(torch.accelerator.current_stream())
            with side:
                target.copy_(host, non_blocking=True)
            assert timer.ms(side) == expected_ms


def test_copies_share_a_direction_and_not_two(clock):
    streams = torch.Stream("standin"), torch.Stream("standin")
    hosts = torch.zeros(4 * MS, pin_memory=True), torch.zeros(4 * MS, pin_memory=True)
    there = torch.ones(4 * MS, device="standin"), torch.ones(4 * MS, device="standin")

    timer = Timer()
    for stream, host, values in zip(streams, hosts, there, strict=True):
        with stream:
            host.copy_(values, non_blocking=True)
    assert timer.ms(*streams) == 8

    timer = Timer()
    with streams[0]:
        hosts[0].copy_(there[0], non_blocking=True)
    with streams[1]:
        there[1].copy_(hosts[1], non_blocking=True)
    assert timer.ms(*streams) == 4


def test_an_earlier_gap_is_used(clock):
    """What is enqueued later may run first, if it is ready first: a queue that waits holds no other up."""
    side, values = torch.Stream("standin"), torch.ones(4, 4, device="standin")
    other = torch.Stream("standin")
    hosts = torch.zeros(MS, pin_memory=True), torch.zeros(MS, pin_memory=True)
    there = torch.ones(MS, device="standin")

    timer = Timer()
    values @ values
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        hosts[0].copy_(there, non_blocking=True)  # from 5 to 6
    with other:
        hosts[1].copy_(there, non_blocking=True)  # from 0 to 1
    assert timer.ms(other, side) == 6


def test_the_host_has_time_of_its_own(device):
    values = torch.ones(4, device="standin")
    with device.times(op_ms=3, launch_ms=1):
        torch.accelerator.synchronize()
        begin = device.host_clock_ms()
        values + values  # launched at 1, done at 4
        values + values  # launched at 2, done at 7
        assert device.host_clock_ms() - begin == 2
        device.host_works(ms=10)
        values + values  # launched at 13, done at 16
        torch.accelerator.synchronize()
        assert device.host_clock_ms() - begin == 16


def test_events_refuse_what_cuda_events_refuse(device):
    def event(**options):
        made = torch.Event("standin", **options)
        torch.ones(1, device="standin")
        made.record()
        return made

    with device.schedule(LATE, EARLY):
        with pytest.raises(ValueError, match="enable_timing=True"):
            event().elapsed_time(event())
        first, last = event(enable_timing=True), event(enable_timing=True)
        with pytest.raises(RuntimeError, match="must be completed"):
            first.elapsed_time(last)
        last.synchronize()
        assert first.elapsed_time(last) == 0.01
