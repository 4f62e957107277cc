"""The clock's laws on steps written by hand: order of streams, events, a slow host, waits, collectives beside work."""

import pytest

from lowtide.pretending.step_clock import QUEUED, SLOWER_BESIDE_COLLECTIVE, WAIT_US, Task, main_stream, play


def kernel(us, at=0.0, stream=0, name="", launches=1):
    return Task("kernel", at, stream, us, launches, name=name)


def collective(us, at=0.0, stream=1, communicator=7):
    return Task("collective", at, stream, us, which=communicator)


def event(which, at=0.0, stream=0):
    return Task("event", at, stream, which=which)


def wait(which, at=0.0, stream=0):
    return Task("wait", at, stream, which=which)


def played(*tasks, host_us=0.0, launch_us=0.0):
    return play(tasks, host_us, launch_us=launch_us)


def once(*tasks):
    """A step before which there was none."""
    return play(tasks, 0.0, launch_us=0.0, steps=1)


def test_a_stream_runs_one_after_the_other():
    assert played(kernel(30), kernel(70)).step_us == pytest.approx(100)


def test_a_step_takes_as_long_as_the_slower_of_host_and_device():
    assert played(kernel(30), host_us=500).step_us == pytest.approx(500)
    assert played(kernel(900), host_us=500).step_us == pytest.approx(900)


def test_where_the_host_is_slow_the_device_stands_still_for_it():
    found = played(kernel(30), kernel(30, at=250), host_us=500)

    assert found.lost_us["host"] == pytest.approx(500 - 60)
    assert found.busy_us == pytest.approx(60)


def test_launches_take_the_host_their_time():
    tasks = [kernel(1) for _ in range(100)]

    assert play(tasks, 0.0, launch_us=3.0).step_us == pytest.approx(300)
    assert play([task._replace(launches=0) for task in tasks], 0.0, launch_us=3.0).step_us == pytest.approx(100)


def test_streams_share_the_device_where_both_compute():
    """Two kernels at once take as long as one after the other."""
    found = once(kernel(100, stream=0), kernel(100, stream=1), event(5, stream=1), wait(5), kernel(30))

    assert found.step_us == pytest.approx(230)


def test_copies_run_beside_kernels():
    copy = Task("copy", 0.0, 1, 100.0)

    assert played(copy, kernel(100)).step_us == pytest.approx(100)


def test_what_nothing_ties_to_the_step_before_begins_while_that_runs():
    tasks = [Task("copy", 0.0, 1, 80.0), event(5, stream=1), wait(5), kernel(90)]

    assert once(*tasks).step_us == pytest.approx(170)
    assert played(*tasks).step_us == pytest.approx(90)


def test_a_stream_waits_for_an_event_of_another():
    found = once(kernel(10), Task("copy", 0.0, 1, 80.0), event(5, stream=1), wait(5), kernel(10))

    assert found.step_us == pytest.approx(90)
    assert found.lost_us == {"copies": pytest.approx(70)}


def test_an_event_is_what_was_on_the_stream_when_it_was_recorded():
    early = once(event(5, stream=1), collective(80), kernel(10), wait(5), kernel(10))
    late = once(collective(80), event(5, stream=1), kernel(10), wait(5), kernel(10))

    assert early.lost_us == {}
    assert late.lost_us["communication"] == pytest.approx(70)


def test_an_event_passes_on_what_its_stream_waits_for():
    """A waits for B, C for A: C waits for B."""
    found = once(
        collective(80, stream=2), event(1, stream=2), wait(1, stream=1), event(2, stream=1), kernel(10), wait(2),
        kernel(10),
    )  # fmt: skip

    assert found.step_us == pytest.approx(90)
    assert found.lost_us["communication"] == pytest.approx(70)


def test_communication_that_nothing_waits_for_is_not_exposed():
    found = played(collective(15), kernel(15), kernel(15))

    assert found.step_us == pytest.approx(30)
    assert found.communication_us == pytest.approx(15)
    assert "communication" not in found.lost_us


def test_collectives_of_one_communicator_run_one_after_the_other():
    def two(second):
        tasks = [collective(50, stream=1), collective(50, stream=2, communicator=second), event(1, stream=1),
                 event(2, stream=2), wait(1), wait(2), kernel(10)]  # fmt: skip
        return once(*tasks).step_us

    assert two(second=7) == pytest.approx(110)
    assert two(second=8) == pytest.approx(60)


def test_kernels_beside_a_collective_are_slower():
    found = played(event(2), wait(2, stream=1), collective(100), kernel(1000), event(1, stream=1), wait(1))

    assert found.slowed_us == pytest.approx(100 * SLOWER_BESIDE_COLLECTIVE, rel=0.2)
    assert found.busy_us == pytest.approx(1000)


def test_a_collective_on_the_main_stream_is_exposed():
    assert played(kernel(100), collective(40, stream=0)).lost_us["communication"] == pytest.approx(40)


@pytest.mark.parametrize(
    "waiting", [Task("host_stream", 0.0), Task("host_device", 0.0), Task("host_event", 0.0, which=5)],
    ids=lambda task: task.kind,
)  # fmt: skip
def test_a_host_that_waits_launches_late(waiting):
    """After the wait the host needs 200 us for the next launch, and the device has nothing meanwhile."""
    tasks = [kernel(300), event(5), waiting, kernel(100, at=200)]

    found = played(*tasks, host_us=200)

    assert found.step_us == pytest.approx(300 + WAIT_US + 200, abs=100)
    assert found.lost_us["waits"] == pytest.approx(200 + WAIT_US, abs=1)
    assert found.waited_us > 0


def test_a_copy_to_pageable_memory_makes_the_host_wait():
    waits = Task("copy", 0.0, 0, 10.0, waits=True)

    assert played(kernel(300), waits, kernel(100, at=500), host_us=500).step_us > 700
    assert played(kernel(300), waits._replace(waits=False), kernel(100, at=500), host_us=500).step_us < 520


def test_the_host_is_at_most_as_far_ahead_as_the_queue_is_long():
    many = [kernel(10) for _ in range(3 * QUEUED)]

    found = played(*many)

    assert found.step_us == pytest.approx(10 * len(many))


def test_a_step_without_work_takes_what_the_host_takes():
    assert played(host_us=120).step_us == 120
    assert played(event(1), host_us=120).step_us == 120


def test_the_main_stream_is_where_the_work_is():
    assert main_stream([kernel(10, stream=3), kernel(1, stream=0), collective(500, stream=1)]) == 3


def test_times_by_name_add_up():
    found = played(kernel(10, name="matmul"), kernel(20, name="memory"), kernel(5, name="matmul"))

    assert found.by_name_us == {"matmul": pytest.approx(15), "memory": pytest.approx(20)}
