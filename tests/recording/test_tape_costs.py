"""What the tape's own work costs a step, by whether the host or the device is the bound."""

import pytest
import torch
from support.toy_graphs import decoder, decoder_costs

import lowtide
from lowtide.device import planned_ops
from lowtide.device.timing import Span
from lowtide.graph.costs import Costs
from lowtide.recording.tape_costs import tape_costs
from lowtide.recording.watched_times import WatchedTimes, costs_of, why_of_host
from lowtide.solvers.dispatch import solve

GRAPH = decoder(layers=6)
LAUNCH_US = 10.0


def op_ms(ms):
    return [ms] * len(GRAPH.ops)


@pytest.mark.parametrize("ms, share", [(1.0, 0.0), (0.001, 1.0)])
def test_what_the_host_does_behind_a_busy_device_costs_little(ms, share):
    """A launch takes 10 us: ops of 1 ms hide it, ops of 1 us do not."""
    found = tape_costs(GRAPH, op_ms(ms), LAUNCH_US)

    assert (found.record_us, found.replay_us) == ((15.0, 10.0) if not share else (75.0, 45.0))
    assert found.move_us == 100.0 * share


def test_between_the_two_a_part_of_it_costs():
    costs = [tape_costs(GRAPH, op_ms(ms), LAUNCH_US).record_us for ms in (1.0, 0.05, 0.04, 0.03, 0.001)]

    assert costs == sorted(costs) and costs[0] < costs[2] < costs[-1]


def test_forward_and_backward_have_each_its_own_bound():
    ms = [0.001 if not op.backward else 1.0 for op in GRAPH.ops]
    found = tape_costs(GRAPH, ms, LAUNCH_US)

    assert (found.record_us, found.replay_us) == (75.0, 10.0)


def test_on_a_cpu_the_tape_costs_what_it_takes(monkeypatch):
    assert tape_costs(GRAPH, op_ms(0.001), None)[1:3] == (15.0, 10.0)
    monkeypatch.setattr(planned_ops, "is_there", lambda: True)
    without_python = tape_costs(GRAPH, op_ms(0.001), None).dispatch_us
    monkeypatch.setattr(planned_ops, "is_there", lambda: False)

    assert (without_python, tape_costs(GRAPH, op_ms(0.001), None).dispatch_us) == (2.0, 15.0)


def test_plans_drop_fewer_tensors_where_the_host_is_the_bound():
    of_device = decoder_costs(GRAPH)
    dropped = []
    for record_us, replay_us in ((0.0, 0.0), (3e3, 1e3)):
        costs = Costs(of_device.op_ms, record_us=record_us, replay_us=replay_us)
        dropped.append(solve(GRAPH, costs, "50%").counts["recompute"])

    assert 0 < dropped[1] < dropped[0]


class Timed(Span):
    """A span between two events of ``took_ms``."""

    def __init__(self, took_ms, launch_us):
        super().__init__(launch_us / 1e6, None, None)
        self.__dict__["took_ms"] = took_ms

    def ms(self):
        return self.took_ms


@pytest.fixture
def graph():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    return lowtide.trace(model, torch.randn(4, 8))


def watched(graph, took_ms, *, timed=True):
    times = WatchedTimes(torch.device("cpu"))
    times._spans.timed = times._on_device = timed
    for op in graph.ops:
        times._last = Timed(took_ms, 2e3)
        times.note(op.signature, is_first=False)
    return times


def test_a_watched_step_shows_what_a_launch_takes_and_the_bound_is_told(graph):
    slow, quick = watched(graph, 0.01), watched(graph, 100.0)

    assert slow.launch_us == pytest.approx(2e3)
    assert costs_of(graph, slow).record_us == pytest.approx(7.5 * 2e3)
    assert costs_of(graph, quick).record_us == 15.0
    assert "the host is the bound of forward and backward" in why_of_host(graph, costs_of(graph, slow), slow)
    assert why_of_host(graph, costs_of(graph, quick), quick) == ""


def test_where_an_op_has_no_time_but_that_of_its_launch_nothing_is_said(graph):
    times = watched(graph, 0.01, timed=False)

    assert times.launch_us is None and why_of_host(graph, costs_of(graph, times), times) == ""
