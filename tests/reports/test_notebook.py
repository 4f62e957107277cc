"""What a notebook shows: the numbers of the plan, within itself, in nobody else's way."""

import dataclasses
import random
import re
from html.parser import HTMLParser

import pytest
import torch
from support.toy_graphs import decoder, decoder_costs

import lowtide
from lowtide.graph.step_graph import Frame
from lowtide.reports.notebook import card, plan_html
from lowtide.training.status import Status
from lowtide.units import format_bytes


@pytest.fixture(scope="module")
def step():
    graph = decoder()
    costs = decoder_costs(graph)
    return graph, costs, lowtide.solve(graph, costs, method="full"), lowtide.frontier(graph, costs, points=4)


@pytest.fixture(scope="module")
def fragments(step):
    graph, costs, plan, front = step
    status = Status(True, "", 5, 4, 5, 4, 3 * 2**20, 4 * 2**20, 1, 1, 0.5, reasons=("a reason",))
    return {
        "plan": plan._repr_html_(),
        "plan over time": plan_html(plan, graph, costs),
        "front": front._repr_html_(),
        "status": status._repr_html_(),
    }


NAMES = ["plan", "plan over time", "front", "status"]


class Balanced(HTMLParser):
    """Which tags are open."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", NAMES)
def test_a_fragment_is_whole_and_needs_nothing_from_outside(fragments, name):
    parser = Balanced()
    parser.feed(fragments[name])

    assert parser.open == []
    assert not re.search(r"<script|<style|<link|<img|href=|src=|url\(|\bon\w+=|https?:", fragments[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_fragment_has_no_class_that_a_page_could_style_and_no_colour_of_paper_or_ink(fragments, name):
    assert "class=" not in fragments[name]
    assert not re.search(r"[^-]color:|background:#(fff|000)", fragments[name].replace("currentColor", ""))


@pytest.mark.parametrize("name", ["plan over time", "front"])
def test_every_shape_of_a_chart_has_a_style(fragments, name):
    shapes = re.findall(r"<(?:path|line|rect|circle|text)\b[^>]*>", fragments[name])

    assert len(shapes) > 20
    assert [shape for shape in shapes if "style=" not in shape] == []
    assert fragments[name].count("<svg") == 1  # not the narrow one too


def test_a_plan_shows_its_peak_and_over_time_where_the_graph_is_at_hand(step, fragments):
    _, _, plan, _ = step

    assert format_bytes(plan.predicted_peak_bytes) in fragments["plan"]
    assert "<svg" not in fragments["plan"] and "Memory over one training step" in fragments["plan over time"]
    assert "Decisions by module" in fragments["plan"]


def test_a_front_shows_each_point_once_and_stays_a_list(step, fragments):
    front = step[3]

    assert isinstance(front, list) and len(front) >= 2
    for point in front:
        assert "<td style" in fragments["front"] and format_bytes(point.peak_bytes) in fragments["front"]
    assert fragments["front"].count("<circle") == len(front)
    assert "this plan" not in fragments["front"]
    assert "no points" in type(front)()._repr_html_()


def test_a_status_says_what_ran_and_why_not(fragments):
    assert "4 of 5" in fragments["status"] and "3.00 MiB" in fragments["status"] and "a reason" in fragments["status"]
    none = Status(False, "no step has been seen yet", 0, 0, 0, 0, None, None, 0, 0, 0.0)

    assert "Not in force: no step has been seen yet" in none._repr_html_() and "not known" in none._repr_html_()


def test_names_are_escaped(step):
    plan = step[2]
    frames = tuple(Frame(f.parent, "<script>alert(1)</script>", f.ordinal) for f in plan.frames)
    shown = dataclasses.replace(plan, frames=frames)._repr_html_() + card("<b>", [("<i>", "<i>", "<i>")], notes=["<p>"])

    assert "<script" not in shown and "&lt;script" in shown
    assert "&lt;b&gt;" in shown and "&lt;i&gt;" in shown and "&lt;p&gt;" in shown


def test_a_fit_shows_what_ran_and_its_plan_and_draws_no_random_number():
    model = torch.nn.Sequential(*(m for _ in range(6) for m in (torch.nn.Linear(32, 32), torch.nn.Tanh())))
    with lowtide.fit(model, budget="70%") as fit:
        assert "no step has been seen yet" in fit._repr_html_()
    with lowtide.fit(model, (torch.randn(256, 32),), budget="70%") as fit:
        before = random.getstate(), torch.get_rng_state()
        shown = fit._repr_html_()
        after = random.getstate(), torch.get_rng_state()

    assert before[0] == after[0] and torch.equal(before[1], after[1])
    assert "<svg" in shown and format_bytes(fit.plan.predicted_peak_bytes) in shown
