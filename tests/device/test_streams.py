"""Streams and clocks of an accelerator, on one whose calls are only noted."""

import time

import pytest
import torch

from lowtide.device import streams, timing


@pytest.fixture
def noted(monkeypatch):
    """What an accelerator is asked for. "meta" is taken for it; device 0 is the current one."""
    calls = []
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(accelerator, "current_stream", lambda index: f"stream before on {index}")
    monkeypatch.setattr(accelerator, "set_stream", lambda stream: calls.append(stream))
    monkeypatch.setattr(accelerator, "set_device_index", lambda index: calls.append(index))
    monkeypatch.setattr(accelerator, "synchronize", lambda index: calls.append("synchronised"))
    for module in (streams, timing):
        monkeypatch.setattr(module, "is_accelerator", lambda device: True)
    timing._has_timed_events.cache_clear()
    yield calls
    timing._has_timed_events.cache_clear()


class Stream:
    device = torch.device("meta", 1)


def test_a_stream_is_the_current_one_inside_and_device_and_stream_are_put_back_after_an_error(noted):
    stream = Stream()
    with pytest.raises(ZeroDivisionError), streams.on_stream(stream):
        assert noted == [stream]
        raise ZeroDivisionError

    assert noted == [stream, "stream before on 1", 0]


def test_without_events_calls_are_timed_by_the_clock_between_two_synchronisations(noted, monkeypatch):
    monkeypatch.setattr(timing, "_by_events", lambda *_: (_ for _ in ()).throw(RuntimeError("no events")))
    now = iter([1.0, 4.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))

    found = timing.calls_ms(lambda: noted.append("call"), 3, "meta", lambda: 0.0)

    assert found == 1000.0 and noted == ["synchronised", "call", "call", "call", "synchronised"]


def test_with_events_calls_are_timed_between_two_of_them(noted, monkeypatch):
    class Event:
        def __init__(self, device, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            noted.append("event")

        def elapsed_time(self, end):
            return 6.0

    monkeypatch.setattr(torch, "Event", Event)
    timing.calls_ms(lambda: None, 1, "meta", lambda: 0.0)  # looks for events first
    noted.clear()

    assert timing.calls_ms(lambda: noted.append("call"), 2, "meta", lambda: 0.0) == 3.0
    assert noted == ["synchronised", "event", "call", "call", "event", "synchronised"]
