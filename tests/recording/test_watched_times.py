"""Which runs of an op count as its time on a device, whose spans are given here."""

import pytest
import torch

import lowtide
from lowtide.device.timing import Span
from lowtide.recording import watched_times
from lowtide.recording.watched_times import WatchedTimes

ROWS = 64


class Over(Span):
    """A span that has taken so many milliseconds, whatever the host did."""

    def __init__(self, ms):
        super().__init__(99.0, None, None)
        self.__dict__["took_ms"] = ms

    def ms(self):
        return self.took_ms


@pytest.fixture
def graph():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)), torch.nn.Linear(8, 16))
    return lowtide.trace(model, torch.randn(ROWS, 8))


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(watched_times, "is_accelerator", lambda device: True)


def noted(graph, ms_of_runs):
    """``ms_of_runs``: of an op, those of its first run and of all others; 1 ms for the other ops."""
    times, seen = WatchedTimes(torch.device("cpu")), set()
    for op in graph.ops:
        first, later = ms_of_runs.get(op.name, (1.0, 1.0))
        times._last = Over(later if op.signature in seen else first)
        times.note(op.signature, is_first=op.signature not in seen)
        seen.add(op.signature)
    return times


def of_ops(graph, times, name):
    return [ms for op, ms in zip(graph.ops, times.milliseconds(graph)) if op.name == name]


def test_the_first_run_of_an_op_is_left_out(graph, on_device):
    times = noted(graph, {"aten.mm.default": (500.0, 2.0)})
    repeated = {op.signature for op in graph.ops if sum(o.signature == op.signature for o in graph.ops) > 1}
    found = dict(zip((op.signature for op in graph.ops), times.milliseconds(graph)))
    products = {op.signature for op in graph.ops if op.name == "aten.mm.default"}

    assert products & repeated and all(found[s] == 2.0 for s in products & repeated)


def test_an_op_that_ran_once_takes_what_its_work_takes_at_the_rate_of_the_others(graph, on_device):
    """The last layer has twice the operations of the others, and its first run loaded a kernel for half a second."""
    times = noted(graph, {"aten.mm.default": (500.0, 2.0), "aten.addmm.default": (500.0, 500.0)})

    assert of_ops(graph, times, "aten.addmm.default") == [4.0]
    assert max(of_ops(graph, times, "aten.mm.default")) <= 4.0


def test_an_op_that_ran_once_never_takes_more_than_its_one_run(graph, on_device):
    times = noted(graph, {"aten.mm.default": (500.0, 2.0), "aten.addmm.default": (3.0, 3.0)})

    assert of_ops(graph, times, "aten.addmm.default") == [3.0]


def test_on_a_cpu_the_one_run_of_an_op_counts_as_it_was(graph):
    times = noted(graph, {"aten.mm.default": (500.0, 2.0), "aten.addmm.default": (500.0, 500.0)})

    assert of_ops(graph, times, "aten.addmm.default") == [500.0]


def test_calls_as_one_op_have_times_of_launches_on_a_device_which_is_told(graph, on_device):
    times = noted(graph, {})
    assert not times._spans.timed
    assert "no events with times" in times.why_of_launches(graph)
    times._spans.timed = True
    assert times.why_of_launches(graph) == ""
    graph.recorded_ms[graph.ops[0].signature] = 1.0
    assert f"calls that are one op each ({graph.ops[0].name} first)" in times.why_of_launches(graph)


class Moment:
    """An event at a time of the device, in milliseconds."""

    def __init__(self, at):
        self.at = at

    def elapsed_time(self, other):
        return other.at - self.at

    def query(self):
        return True


def spans_of(graph, *, launch_ms, kernel_ms, idle_ms):
    """Each op twice: the device has waited ``idle_ms`` before it, and then for its launch if at all."""
    times, at, before = WatchedTimes(torch.device("cpu")), 0.0, None
    for again in (False, True):
        for op in graph.ops:
            begin = at + idle_ms
            at = begin + kernel_ms + (launch_ms if idle_ms else 0.0)
            times._last = Span(launch_ms / 1e3, Moment(begin), Moment(at), before)
            before = times._last.end
            times.note(op.signature, is_first=not again)
    return times


@pytest.mark.parametrize("idle_ms", [0.0, 0.1])
def test_what_the_device_waited_for_a_launch_is_no_time_of_the_op(graph, idle_ms):
    times = spans_of(graph, launch_ms=0.03, kernel_ms=0.05, idle_ms=idle_ms)

    assert times.milliseconds(graph) == pytest.approx([0.05] * len(graph.ops))


def test_where_launches_are_most_of_it_nothing_is_taken_off(graph):
    """A device that runs a kernel as it is launched looks the same."""
    times = spans_of(graph, launch_ms=0.03, kernel_ms=0.001, idle_ms=0.1)

    assert times.milliseconds(graph) == pytest.approx([0.031] * len(graph.ops))
