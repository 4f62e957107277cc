"""``lowtide report PLAN.json --check COMMITTED.json``: what got worse, for plans of steps and of compiled layers."""

import json

import pytest

from lowtide.cli import main
from lowtide.compiled.compiled_plan import CompiledPlan
from lowtide.graph.step_graph import Frame
from lowtide.plan import COMPILED, RECOMPUTE, SAVE, Decision, Plan, PlannedOp
from lowtide.reports.worse import CommittedPlanError, worse_than

FIELDS = dict(
    method=COMPILED, graph_fingerprint="", budget_bytes=None, predicted_peak_bytes=1000, plain_peak_bytes=2000,
    resident_bytes=100, predicted_step_ms=11.0, plain_step_ms=10.0, bound_ms=None, status="feasible", region="layers",
    solve_s=1.0, device="cpu",
    frames=(Frame(-1, "", 0), Frame(0, "layers.0", 0), Frame(0, "layers.1", 0)),
    ops=(PlannedOp("mm", 1), PlannedOp("mm", 2)),
)  # fmt: skip


def made(saved=(400, 0), kind=CompiledPlan, **changed):
    """Each of two layers makes 400 bytes, and saves them or makes them again."""
    decisions = tuple(
        Decision(i, SAVE if size else RECOMPUTE, 400, i, 0, True, 0.0 if size else 1.0) for i, size in enumerate(saved)
    )
    return kind(**{**FIELDS, "decisions": decisions, **changed})


def test_nothing_is_worse_than_itself_or_within_the_tolerance():
    assert worse_than(made(), made(), 0.0) == []
    assert (
        worse_than(made(), made(predicted_peak_bytes=1020, plain_peak_bytes=2040, predicted_step_ms=11.22), 0.02) == []
    )
    assert worse_than(made(), made(predicted_peak_bytes=900, predicted_step_ms=10.0), 0.0) == []


@pytest.mark.parametrize(
    ("name", "changed", "numbers"),
    [
        ("predicted_peak_bytes", {"predicted_peak_bytes": 1021}, (1000, 1021)),
        ("plain_peak_bytes", {"plain_peak_bytes": 2041}, (2000, 2041)),
        ("step_time", {"predicted_step_ms": 11.3}, (1.1, 1.13)),
    ],
)
def test_a_number_that_got_worse_is_named(name, changed, numbers):
    (found,) = worse_than(made(), made(**changed), 0.02)
    assert found.what == name and (found.before, found.now) == pytest.approx(numbers)


def test_a_slower_machine_alone_is_not_worse():
    assert worse_than(made(), made(predicted_step_ms=33.0, plain_step_ms=30.0), 0.0) == []


def test_the_modules_that_grew_are_shown():
    more, less = made(saved=(400, 400), predicted_peak_bytes=1400), made()
    (found,) = worse_than(less, more, 0.02)
    assert found.modules == [("layers.*", "saved_bytes", 400, 800)]
    (found,) = worse_than(more, made(predicted_peak_bytes=1400, predicted_step_ms=12.0), 0.02)
    assert found.modules == [("layers.*", "recompute_ms", 0.0, 1.0)]


def test_plans_of_other_devices_or_kinds_are_refused():
    with pytest.raises(CommittedPlanError, match="of compiled layers on cpu, this one of compiled layers on cuda"):
        worse_than(made(), made(device="cuda"), 0.02)
    with pytest.raises(CommittedPlanError, match="of compiled layers on cpu, this one of a step on cpu"):
        worse_than(made(), made(kind=Plan, method="exact"), 0.02)


def test_the_command_exits_1_where_a_saved_compiled_plan_got_worse(tmp_path, capsys):
    before, now = tmp_path / "committed.json", tmp_path / "now.json"
    made().save(before)
    made(saved=(400, 400), predicted_peak_bytes=1400).save(now)

    assert main(["report", str(before), "--check", str(before)]) == 0
    assert f"No worse than {before}, by 2.0% at most." in capsys.readouterr().out
    assert main(["report", str(now), "--check", str(before)]) == 1
    shown = capsys.readouterr().out
    assert f"predicted_peak_bytes is worse than in {before}: 1000 B -> 1.37 KiB (+40.0%)" in shown
    assert "  layers.*: saved_bytes 400 B -> 800 B" in shown
    assert main(["report", str(now), "--check", str(before), "--tolerance", "0.5", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["status"], body["check"]) == ("ok", {"tolerance": 0.5, "worse": []})
    assert main(["report", str(now), "--check", str(before), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["check"]["worse"][0]["modules"][0]["module"] == "layers.*"
    assert main(["report", str(now), "--check", str(before), "--tolerance", "-1"]) == 2
    assert "--tolerance -1.0 is no part" in capsys.readouterr().err
    assert main(["report", "--compare", str(now), str(before), "--check", str(before)]) == 2
    capsys.readouterr()
