"""A fit whose budget is of reserved memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.case_graphs import load_case
from torch import nn

from lowtide.options import FitOptions, Offload
from lowtide.shapes.call_shapes import CallShape
from lowtide.simulation.simulator import simulate
from lowtide.tracing.model_facts import ModelFacts
from lowtide.training.plans_by_shape import PlansByShape


@pytest.mark.parametrize(("kind", "is_kept"), [("allocated", True), ("reserved", False)])
def test_a_shape_that_fits_plain_as_allocated_is_not_left_alone_where_its_segments_do_not_fit(kind, is_kept):
    graph, costs = load_case("toy")
    graph = replace(graph, device="standin")
    plain = simulate(graph, costs, {})
    options = FitOptions("1GiB", None, None, "exact", {"budget_kind": kind}, Offload())
    plans_by_shape = PlansByShape(ModelFacts(nn.Identity()), options, None, None, None)
    plans_by_shape._budget_bytes = (plain.peak_bytes + plain.reserved_peak_bytes) // 2
    known = SimpleNamespace(graph=graph, costs=costs)
    plans_by_shape._statistics = SimpleNamespace(fits_plain=lambda *_: True, derive=lambda shape: ((shape,), known))
    plans_by_shape._put_in_force = lambda shapes, graph, costs, plan: plan

    kept = plans_by_shape._keep_everything(CallShape("toy", ()))

    assert (kept is not None) is is_kept
    if is_kept:
        assert kept.budget_kind == kind
