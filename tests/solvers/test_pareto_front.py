"""The trade-off as a whole: monotone, from the least peak to the plain step, each point a plan that holds."""

import itertools
from dataclasses import replace

import pytest
from support.toy_graphs import decoder, decoder_costs, linear_tanh, unit_costs

import lowtide
from lowtide.graph.costs import Link
from lowtide.reports.trade_off import plot_trade_off, trade_off
from lowtide.simulation.simulator import simulate
from lowtide.solvers.dispatch import solve


@pytest.fixture(scope="module")
def front():
    graph = decoder(6)
    costs = decoder_costs(graph)
    return graph, costs, lowtide.frontier(graph, costs, points=7)


def test_it_goes_from_the_least_peak_to_no_recompute(front):
    graph, costs, points = front
    assert len(points) >= 6
    assert points[-1].step_ms == costs.plain_step_ms
    assert points[-1].plan.keeps_everything
    with pytest.raises(lowtide.BudgetInfeasibleError) as caught:
        solve(graph, costs, int(0.98 * points[0].peak_bytes))
    assert caught.value.least_bytes == pytest.approx(points[0].peak_bytes, rel=0.01)


def test_more_memory_never_costs_more_time(front):
    _, _, points = front
    for less, more in itertools.pairwise(points):
        assert less.peak_bytes < more.peak_bytes
        assert less.step_ms > more.step_ms


def test_each_point_is_a_plan_that_holds(front):
    graph, costs, points = front
    for point in points:
        line = simulate(graph, costs, point.plan)
        assert (line.peak_bytes, line.step_ms) == (point.peak_bytes, pytest.approx(point.step_ms))
        assert point.plan.predicted_peak_bytes <= point.plan.budget_bytes


def test_no_classic_is_below_it(front):
    graph, costs, points = front
    for method in ("full", "every_n", "sqrt_n", "selective"):
        classic = solve(graph, costs, method=method)
        ours = solve(graph, costs, classic.predicted_peak_bytes)
        assert ours.predicted_step_ms <= classic.predicted_step_ms
        assert points[0].peak_bytes <= classic.predicted_peak_bytes


def test_a_step_of_one_model_has_one_too():
    graph = linear_tanh(6)
    points = lowtide.frontier(graph, unit_costs(graph), points=5)
    assert len(points) >= 3
    assert points[-1].plan.keeps_everything


def test_progress_counts_to_the_end():
    graph = linear_tanh(3)
    seen = []
    lowtide.frontier(graph, unit_costs(graph), points=4, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen)


@pytest.mark.parametrize("points", [1, 0, -3])
def test_one_point_is_no_trade_off(points):
    graph = linear_tanh(3)
    with pytest.raises(ValueError, match=f"points={points}"):
        lowtide.frontier(graph, unit_costs(graph), points=points)


@pytest.fixture(scope="module")
def moving():
    graph = decoder(2)
    costs = decoder_costs(graph)
    stored = sum(graph.storages[s].bytes for s in graph.stored)
    rate = 4 * stored / costs.plain_step_ms * 1e3
    costs = replace(costs, links={"disk": Link(rate, rate)})
    return graph, costs, lowtide.frontier(graph, costs, points=4, offload=("disk",))


def test_with_a_disk_it_reaches_further_down_and_lies_below(moving):
    graph, costs, points = moving
    alone = lowtide.frontier(graph, costs, points=4)

    assert points[0].peak_bytes < alone[0].peak_bytes and points[0].plan.tiers == {"disk"}
    for less, more in itertools.pairwise(points):
        assert less.peak_bytes < more.peak_bytes and less.step_ms > more.step_ms
    for point in points:
        line = simulate(graph, costs, point.plan)
        assert (line.peak_bytes, line.step_ms) == (point.peak_bytes, point.step_ms)
        assert point.plan.bound_ms <= point.step_ms


@pytest.mark.thorough
def test_the_trade_off_draws_moves_where_links_are_known(moving, tmp_path):
    graph, costs, _ = moving

    found = trade_off(graph, costs, points=2)
    plot_trade_off(found, tmp_path / "front.svg")

    body = found.as_json()
    assert len(body["frontier_moving"]) == len(found.moving) > 1 and body["frontier_moving"][0]["moved_bytes"] > 0
    assert "lowtide, moving to disk" in (tmp_path / "front.svg").read_text().replace("<!-- ", "")
    assert trade_off(graph, replace(costs, links={}), points=3).as_json()["frontier_moving"] == []


def test_a_frontier_of_tiers_that_nobody_measured_is_refused():
    graph = decoder(1)

    with pytest.raises(ValueError, match="costs knows no link to the disk tier"):
        lowtide.frontier(graph, decoder_costs(graph), offload=("disk",))
