"""Reports: whole texts of a handmade plan, and laws that tie every view to the plan it shows."""

import dataclasses
import json
import re
import sys
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.toy_graphs import decoder, decoder_costs

import lowtide
from lowtide.errors import LowtideError, PlanMismatchError
from lowtide.explanation import Evidence, FunctionGroup, LinkUse, PeakGroup, collapse_path, short_op, told_of_functions
from lowtide.graph.step_graph import Frame
from lowtide.plan import Decision, Plan, PlannedOp
from lowtide.reports.breakdown import BREAKDOWNS, attention_scores, by_layer, by_module, by_tensor
from lowtide.reports.comparison import Comparison
from lowtide.reports.curves import memory_curves
from lowtide.reports.html import html_report
from lowtide.reports.labels import joined, placed
from lowtide.reports.plots import plot_memory
from lowtide.reports.summary import TrainingCounts, overhead_text, summary, warnings
from lowtide.reports.svg import decimal_ticks, round_ticks
from lowtide.reports.terminal import fit_report
from lowtide.reports.what_binds import help_sentences, peak_sentences
from lowtide.simulation.simulator import simulate
from lowtide.solvers.dispatch import solve
from lowtide.verifier import Verification

MIB = 2**20


def handmade(**changes) -> Plan:
    """Two layers; of each, one tensor saved, one recomputed, one kept only because a replay reads it."""
    frames, ops, decisions = [Frame(-1, "", 0)], [], []
    for layer in range(2):
        for path, name, action, size, stored, ms in (
            ("mlp.up", "aten.mm.default", "recompute", 11, True, 7.25),
            ("mlp.act", "aten.silu.default", "save", 11, True, 0.0),
            ("norm", "aten.mul.Tensor", "save", 4, False, 0.0),
        ):
            frames.append(Frame(0, f"layers.{layer}.{path}", 0))
            ops.append(PlannedOp(name, len(frames) - 1))
            decisions.append(Decision(len(decisions), action, size * MIB, len(ops) - 1, 0, stored, ms))
    plan = Plan(
        method="exact",
        decisions=tuple(decisions),
        frames=tuple(frames),
        ops=tuple(ops),
        graph_fingerprint="00000000deadbeef",
        budget_bytes=150 * MIB,
        predicted_peak_bytes=149 * MIB,
        plain_peak_bytes=200 * MIB,
        resident_bytes=100 * MIB,
        predicted_step_ms=114.5,
        plain_step_ms=100.0,
        bound_ms=114.0,
        status="optimal",
        solve_s=0.31,
    )
    return dataclasses.replace(plan, **changes)


def verification(**changes) -> Verification:
    found = Verification(
        loss_bitwise_equal=True, gradients_bitwise_equal=True, buffers_bitwise_equal=True, differing=(),
        predicted_peak_bytes=149 * MIB, measured_peak_bytes=149 * MIB, plain_peak_bytes=200 * MIB, overhead=0.081,
        predicted_overhead=0.145, proven_ops=2, dropped_ops=2, mismatched_ops=0, unplanned_ops=0,
    )  # fmt: skip
    return dataclasses.replace(found, **changes)


def test_the_report_says_all_of_this():
    counts = TrainingCounts(steps=7, unplanned_ops=1, proven_ops=2, dropped_ops=2, trace_s=0.5, measure_s=1.25)

    text = fit_report(handmade(), None, verification(), counts, warnings=("something else to know",))

    assert (
        text
        == """\
lowtide: method exact (optimal), solved in 0.3 s, on cpu

                       peak  activations      step  overhead
plain            200.00 MiB      100.0 %  100.0 ms
plain, measured  200.00 MiB      100.0 %
budget           150.00 MiB       50.0 %
predicted        149.00 MiB       49.0 %  114.5 ms   +14.5 %
measured         149.00 MiB       49.0 %              +8.1 %

time bound         no plan within the budget is under 114.0 ms; gap 0.44%
storages           save 2 (22.00 MiB), recompute 2 (22.00 MiB)
for replays alone  save 2 (8.00 MiB)
before the step    100.00 MiB
planned            the model's own calls; what runs outside them is saved
proof              2 of 2 dropped ops ran twice and gave the same bits
against plain      loss, gradients and buffers bitwise equal, in a rehearsal
drift              0 ops not as planned, 1 unknown to the plan, in 7 steps of 1 input shape
preparation        trace 0.5 s, measure 1.2 s

by module                                 save             recompute              replay
layers.*.mlp                                 2  22.00 MiB          2  22.00 MiB  14.5 ms

by operator                               save             recompute              replay
mm                                           -                     2  22.00 MiB  14.5 ms
silu                                         2  22.00 MiB          -                   -
all                                          2  22.00 MiB          2  22.00 MiB  14.5 ms

warnings
  - Steps differ from the traced one: what did not match was saved, so the peak may be higher.
  - something else to know"""
    )


def test_a_plan_alone_is_reported_without_what_nobody_measured():
    text = fit_report(handmade(budget_bytes=None, bound_ms=None, method="every_n", status="fixed"))

    assert "measured" not in text and "warnings" not in text
    assert "lowtide: method every_n (fixed rule)" in text
    assert "time bound         none known for this method" in text
    assert re.search(r"^budget +- +-$", text, re.MULTILINE)


@pytest.mark.parametrize("deep", [1, 30])
def test_no_line_is_wider_than_a_terminal(deep):
    plan = handmade()
    frames = tuple(dataclasses.replace(f, path=".".join(["encoder_of_something"] * deep)) for f in plan.frames)
    ops = tuple(dataclasses.replace(o, name=f"custom.{'operator_' * deep}.default") for o in plan.ops)
    plan = dataclasses.replace(plan, frames=frames, ops=ops)

    text = fit_report(plan, decoder(), verification(overhead=float("nan")), warnings=("word " * 60,))

    assert max(map(len, text.splitlines())) <= 100


def test_a_timing_that_was_not_taken_is_a_dash():
    assert overhead_text(None) == overhead_text(verification(overhead=float("nan"))) == "-"
    assert overhead_text(verification(overhead=-0.011)) == "-1.1 %"


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("model.layers.17.mlp.up_proj", "model.layers.*.mlp"),
        ("model.layers.17", "model.layers.*"),
        ("encoder.block.0.layer.1.SelfAttention.q", "encoder.block.*.layer.*.SelfAttention"),
        ("0", "*"),
        ("conv1.weight2", "conv1.weight2"),
        ("lm_head", "lm_head"),
        ("", "(outside modules)"),
    ],
)
def test_numbered_siblings_share_a_row(path, row):
    assert collapse_path(path) == row


@pytest.mark.parametrize(
    ("name", "row"),
    [("aten.mm.default", "mm"), ("aten.mul.Tensor", "mul"), ("mylib.op.default", "mylib.op"), ("odd", "odd")],
)
def test_overloads_of_an_operator_share_a_row(name, row):
    assert short_op(name) == row


@pytest.mark.parametrize("method", ["none", "every_n", "full"])
@pytest.mark.parametrize("view", BREAKDOWNS.values(), ids=BREAKDOWNS)
def test_groups_add_up_to_the_plan(view, method):
    graph = decoder()
    plan = solve(graph, decoder_costs(graph), method=method)

    groups = view(plan)

    for action in ("save", "recompute"):
        assert sum(getattr(g, f"{action}_count") for g in groups) == plan.counts[action]
        assert sum(getattr(g, f"{action}_bytes") for g in groups) == plan.bytes_by_action[action]
    assert sum(g.recompute_ms for g in groups) == pytest.approx(sum(d.recompute_ms for d in plan.decisions))


def test_the_summary_is_plain_json_also_without_a_bound():
    plan = handmade(bound_ms=None)

    body = json.loads(json.dumps(summary(plan, verification(overhead=float("nan")), None, ["w"]), allow_nan=False))

    assert body["gap"] is None and body["measured"]["overhead"] is None and body["warnings"] == ["w"]
    assert body["counts"] == plan.counts and body["kept_for_replays"] == {"count": 2, "bytes": 8 * MIB}


def with_opaque_calls() -> Plan:
    """Of 44 MiB stored, calls of two Functions made 22, and those of one run again; a module made 11."""
    plan = handmade()
    names = ["function.Norm.kernels", "function.Counts.kernels", "aten.mul.Tensor"] * 2
    names[4] = "function.Experts.module:models"
    ops = tuple(dataclasses.replace(op, name=name) for op, name in zip(plan.ops, names, strict=True))
    functions = (
        FunctionGroup("Norm", 2, 22 * MIB, ms=7.25),
        FunctionGroup("Counts", 1, 11 * MIB, 11 * MIB, "gives other bits when it runs again", ms=1.0),
        FunctionGroup("Experts", 1, 11 * MIB, ms=2.0, is_module=True),
    )
    evidence = Evidence(when="forward", module="", op="mm", functions=functions, stored_bytes=88 * MIB)
    return dataclasses.replace(plan, ops=ops, evidence=evidence)


def test_every_report_tells_of_opaque_calls():
    plan = with_opaque_calls()
    told = "made 50 % of what is stored; run again: Norm; saved: Counts, Experts"
    page = Page()
    page.feed(html_report(plan))

    text = fit_report(plan)
    assert f"opaque calls       {told}" in text and told in page.text
    assert summary(plan)["opaque_calls"] == f"opaque calls {told}"
    assert json.loads(json.dumps(summary(plan)))["explanation"]["functions"][0]["ms"] == 7.25
    assert text.endswith(
        """made by kernels that no dispatcher sees: 38 % of what is stored
    22.00 MiB  2 x Norm, 7.2 ms
    11.00 MiB  1 x Counts, 1.0 ms: 11.00 MiB always saved, it gives other bits when it runs again
made in modules that are one op each: 12 % of what is stored
    11.00 MiB  1 x Experts, 2.0 ms"""
    )


def test_no_report_tells_of_calls_that_are_not_there():
    assert "opaque calls" not in fit_report(handmade()) and summary(handmade())["opaque_calls"] is None
    unstored = dataclasses.replace(
        with_opaque_calls(), evidence=Evidence(when="", module="", op="", functions=(FunctionGroup("Norm", 1, 0),))
    )
    assert unstored.opaque_calls() == ""


def test_of_many_names_some_are_told():
    groups = tuple(FunctionGroup(f"F{n}", 1, 1) for n in range(6))
    evidence = Evidence(when="", module="", op="", functions=groups, stored_bytes=6)

    told = told_of_functions(evidence, {"F1"})
    assert told == "opaque calls made 100 % of what is stored; run again: F1; saved: F0, F2, F3, F4 and 1 more"
    assert told_of_functions(evidence, ()) == "opaque calls made 100 % of what is stored; none runs again"


def test_a_plan_of_an_older_lowtide_has_no_times_of_calls():
    plan = with_opaque_calls()
    body = json.loads(plan.to_json())
    for group in body["evidence"]["functions"]:
        del group["ms"], group["is_module"]

    assert Plan.from_json(json.dumps(body)).explain().functions[0] == FunctionGroup("Norm", 2, 22 * MIB)


def test_each_warning_fires_on_its_own_cause_and_on_nothing_else():
    assert warnings(handmade(), verification(), TrainingCounts()) == []
    assert len(warnings(handmade(status="feasible", bound_ms=110.0), verification())) == 1
    assert len(warnings(handmade(status="feasible", bound_ms=None), verification())) == 1
    assert warnings(handmade(status="feasible"), verification()) == []  # a gap of 0.44 % alarms nobody
    for bad in ({"measured_peak_bytes": 151 * MIB}, {"loss_bitwise_equal": False}, {"mismatched_ops": 1}):
        assert len(warnings(handmade(), verification(**bad))) == 1
    for drift in ({"mismatched_ops": 1}, {"unplanned_ops": 1}):
        assert len(warnings(handmade(), None, TrainingCounts(**drift))) == 1


class Page(HTMLParser):
    """What a browser would fetch, and whether tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.linked: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.fetched += [v for k, v in attrs if k in ("src", "href", "data", "action") and not v.startswith("#")]
        self.linked += [v[1:] for k, v in attrs if k == "href"]
        self.ids += [v for k, v in attrs if k == "id"]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_no_other_file_and_shows_the_memory_curve():
    graph = decoder()
    costs = decoder_costs(graph)
    plan = solve(graph, costs, method="full")
    page = Page()

    page.feed(html_report(plan, graph, verification(overhead=0.05), costs=costs))
    page.close()

    assert page.fetched == [] and page.open == []
    assert page.linked == page.ids and len(set(page.ids)) > 5
    assert "Memory over one step" in page.text and "milliseconds of the plain step" in page.text
    assert "url(" not in page.text and "@import" not in page.text
    for group in by_module(plan):
        assert group.name in page.text


def test_the_page_escapes_what_a_model_is_called():
    plan = handmade(provenance={"model": "<script>alert(1)</script>"}, method="<i>")

    page = html_report(plan)

    assert "<script" not in page and "&lt;script&gt;" in page and "<i>" not in page and "&lt;i&gt;" in page


def test_a_page_of_a_plan_alone_shows_peaks_and_no_curve():
    page = Page()
    page.feed(html_report(handmade()))

    assert "Peak memory" in page.text and "Memory over one step" not in page.text


@pytest.mark.parametrize("points", [1, 7, 10**6])
def test_thinned_curves_keep_both_peaks(points):
    graph = decoder()
    costs = decoder_costs(graph)
    plan = solve(graph, costs, method="full")

    curves = memory_curves(graph, plan, costs, points=points)

    assert max(curves.plain_bytes) == simulate(graph, costs, {}).peak_bytes
    assert max(curves.planned_bytes) == plan.predicted_peak_bytes
    assert len(curves.at) == len(curves.plain_bytes) == len(curves.planned_bytes) <= points + 1
    assert list(curves.at) == sorted(curves.at) and 0 < curves.backward_at < curves.at[-1]
    assert curves.at[-1] == pytest.approx(costs.plain_step_ms)


def test_curves_of_another_graph_are_refused():
    graph = decoder()
    with pytest.raises(PlanMismatchError):
        memory_curves(graph, handmade())


@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_plot_is_a_picture(tmp_path, suffix, begin):
    pytest.importorskip("matplotlib")
    graph = decoder()
    plan = solve(graph, decoder_costs(graph), method="full")

    plot_memory(graph, plan, tmp_path / f"memory.{suffix}")

    assert (tmp_path / f"memory.{suffix}").read_bytes().startswith(begin)


def test_without_matplotlib_the_plot_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LowtideError) as error:
        plot_memory(decoder(), handmade(), "memory.png")
    assert str(error.value) == (
        "cannot draw memory.png: matplotlib is not installed "
        "(import of matplotlib.figure halted; None in sys.modules).\n"
        "Install it with: pip install 'lowtide[plots]'"
    )


@pytest.mark.parametrize("top", [1, 5, 1000, 3 * 2**20, 37 * 2**30])
def test_axis_ticks_are_few_and_round(top):
    ticks = round_ticks(top)
    assert ticks[0] == 0 and len(ticks) <= 7 and ticks[-1] <= top
    assert all(tick % ticks[1] == 0 for tick in ticks[1:])


@pytest.mark.parametrize("end", [0.013, 1.0, 37.0, 999.0, 12345.6])
def test_time_ticks_are_few_and_round(end):
    ticks = decimal_ticks(end)
    assert ticks[0] == 0 and 5 <= len(ticks) <= 11 and ticks[-1] <= end
    assert all(len(f"{tick:g}".replace(".", "").strip("0")) <= 2 for tick in ticks[1:])


def attention(implementation: str, dropout: float = 0.0):
    """The step of one attention of 2 heads, batch 3, 64 positions, without and with dropout on the probabilities."""
    query = torch.nn.Parameter(torch.randn(3, 2, 64, 8))

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query = query

        def forward(self, key, value):
            if implementation == "fused":
                return torch.nn.functional.scaled_dot_product_attention(self.query, key, value)
            scores = torch.softmax(self.query @ key.transpose(-1, -2) * 0.35, -1)
            return torch.nn.functional.dropout(scores, dropout) @ value

    return lowtide.trace(Attention(), (torch.randn(3, 2, 64, 8), torch.randn(3, 2, 64, 8)))


def test_what_scores_take_is_said_of_the_other_kernel_too():
    rows, elements = 3 * 2 * 64, 3 * 2 * 64 * 64

    eager, dropped = attention_scores(attention("eager")), attention_scores(attention("eager", dropout=0.1))
    fused = attention_scores(attention("fused"))

    assert (eager.eager_count, eager.eager_bytes, eager.eager_as_fused_bytes) == (1, 4 * elements, 4 * rows)
    assert dropped.eager_bytes in (5 * elements, 8 * elements)  # the mask besides, a byte or four an element
    assert (fused.eager_count, fused.fused_count, fused.fused_bytes) == (0, 1, 4 * rows)
    assert fused.fused_as_eager_bytes == 4 * elements
    (said,) = eager.sentences(lambda count: f"{count} B")
    assert f"{4 * elements} B" in said and f"{4 * rows} B" in said


def test_layers_come_in_the_order_in_which_they_run_and_tensors_by_size():
    assert [row.name for row in by_layer(handmade())] == ["layers.0", "layers.1"]
    rows = by_tensor(handmade())
    assert [row.name for row in rows][:2] == ["layers.0.mlp.up: mm", "layers.0.mlp.act: silu"]
    assert [row.bytes for row in rows] == sorted((row.bytes for row in rows), reverse=True)


def test_what_binds_and_what_helps_are_sentences_with_numbers():
    holders = (PeakGroup("backward", "(outside modules)", "_log_softmax_backward_data", 1, 30 * MIB),)
    evidence = Evidence(
        when="backward", module="the step itself", op="nll_loss_backward", holders=holders, other_bytes=19 * MIB,
        ms_per_byte=1e-7, links=(LinkUse("disk", "fetch", 5 * MIB, 20.0, 3.5, (0.5,)),),
    )  # fmt: skip
    plan = handmade(evidence=evidence, bound_ms=100.0)

    assert peak_sentences(plan) == [
        "The peak is 149.00 MiB, in backward, while nll_loss_backward of the step itself runs.",
        "100.00 MiB of it (67 %) live before the step; no plan changes that.",
        "The most of the rest is 30.00 MiB made in backward: _log_softmax_backward_data of (outside modules).",
        "One more MiB takes at most 0.105 ms off the step.",
    ]
    residents, loss, link, gap = help_sentences(plan)
    assert "LoRA" in residents and "30.00 MiB" in loss and "chunk_loss=True" in loss
    assert "the step waits 3.5 ms" in link and "14.5 % slower" in gap
    page = Page()
    page.feed(html_report(plan))
    assert page.open == [] and all(says in page.text for says in [*peak_sentences(plan), *help_sentences(plan)])
    assert "disk fetch" in page.text and "busy 50 %" in page.text
    small = handmade(resident_bytes=10 * MIB)
    assert help_sentences(small) == [] == peak_sentences(small)


def test_two_plans_are_compared_by_module():
    a = handmade()
    kept = tuple(dataclasses.replace(d, action="save", recompute_ms=0.0) for d in a.decisions[:1])
    b = dataclasses.replace(
        a, decisions=(*kept, *a.decisions[1:]), predicted_peak_bytes=160 * MIB, predicted_step_ms=107.3
    )
    found = Comparison("a.json", "b.json", a, b)

    assert (
        found.text()
        == """\
b.json needs 11.00 MiB more memory at the peak than a.json, for an overhead of +7.3 % against +14.5
%.

                      a.json      b.json       change
plain peak        200.00 MiB  200.00 MiB          0 B
predicted peak    149.00 MiB  160.00 MiB   +11.00 MiB
before the step   100.00 MiB  100.00 MiB          0 B
save, bytes        22.00 MiB   33.00 MiB   +11.00 MiB
recompute, bytes   22.00 MiB   11.00 MiB   -11.00 MiB
plain step          100.0 ms    100.0 ms      +0.0 ms
predicted step      114.5 ms    107.3 ms      -7.2 ms
overhead             +14.5 %      +7.3 %  -7.2 points
method                 exact       exact

saved bytes by module, 1 differ                   a          b      change   replay
layers.*.mlp                              22.00 MiB  33.00 MiB  +11.00 MiB  -7.2 ms"""
    )
    assert found.as_json()["same_step"] and len(found.as_json()["modules"]) == 1
    page = Page()
    page.feed(found.html())
    assert page.fetched == [] and page.open == [] and "+11.00 MiB" in page.text
    assert Comparison("a", "a", a, a).modules() == []
    apart = Comparison("a", "b", a, dataclasses.replace(b, plain_step_ms=90.0)).sentences()
    assert "measured apart" in apart[1]
    assert "different steps" in Comparison("a", "b", a, handmade(graph_fingerprint="1")).sentences()[1]


@given(
    st.lists(st.tuples(st.sampled_from(["full", "every_n", "rotor"]), st.floats(0, 900), st.floats(0, 300)), max_size=8)
)
def test_labels_stay_in_the_picture_and_each_point_has_one(points):
    points = joined(points, within=5)
    labels = placed(points, [], size=(900, 300), letter=7, line=14)

    assert [(label.text, label.x, label.y) for label in labels] == points
    for label in labels:
        if len(label.text) < 20 and 14 < label.y < 286:
            assert label.left >= 0 and label.left + 7 * len(label.text) <= 900
            assert label.middle - 7 >= 0 and label.middle + 7 <= 300 + 1e-6


def test_two_near_points_have_labels_apart_and_one_place_has_one_label():
    assert joined([("full", 10, 10), ("rotor", 11, 10), ("full", 9, 10), ("sqrt_n", 50, 10)], within=5) == [
        ("full, rotor", 10, 10),
        ("sqrt_n", 50, 10),
    ]
    a, b = placed([("full", 100, 100), ("rotor", 120, 100)], [], size=(900, 300), letter=7, line=14)
    assert a.left + 28 <= b.left or abs(a.middle - b.middle) >= 14
