"""``benchmarks/true_steps.py``: one kind in this process, and what is made of its line."""

import json

import pytest
import true_steps
from true_step_kinds import KINDS
from true_steps_table import true_steps_summary, true_steps_table

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def line(request):
    return true_steps.line(next(kind for kind in KINDS if kind.name == "sgd_in_backward"), rounds=2)


def test_a_kind_is_planned_with_the_peak_that_is_predicted(line):
    assert line["status"] == "ok" and line["bitwise_equal"] and line["checkpointed_equal"]
    assert line["planned_parts"] >= true_steps.STEPS - true_steps.PLANNED_AFTER
    assert abs(line["largest_error"]) < 1e-3 and line["planned_peak_share"] <= 1.001
    assert line["budget_bytes"] == line["checkpointed_peak_bytes"] < line["plain_peak_bytes"]


def test_tables_name_what_did_not_run_and_what_is_not_equal(line):
    failed = {"kind": "x", "what": "a kind that failed", "status": "ended with 1", "error": ["why"]} | {
        "commit": line["commit"]
    }
    text = true_steps_table([line, line | {"bitwise_equal": False}, failed])
    assert "| equal |" in text and "| NOT EQUAL |" in text and "| a kind that failed | ended with 1 |" in text
    assert "equal in 1 of 2 kinds" in true_steps_summary([line, failed])
    assert "why" in true_steps.told(failed)


def test_lines_of_the_same_kind_are_replaced_in_the_order_of_the_kinds(tmp_path, line):
    out = tmp_path / "lines.jsonl"
    true_steps._write(out, [line | {"kind": "dropout"}, line])
    true_steps._write(out, [line | {"start_bytes": 7}])
    found = [json.loads(text) for text in out.read_text().splitlines()]
    assert [entry["kind"] for entry in found] == ["sgd_in_backward", "dropout"]
    assert found[0]["start_bytes"] == 7


def test_at_least_24_kinds_have_names_of_their_own():
    assert len({kind.name for kind in KINDS}) == len({kind.what for kind in KINDS}) == len(KINDS) >= 24
