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
