"""``benchmarks/changing_steps.py``: a case of each question in this process, and a process that fails."""

import changing_steps
import one_process
import pytest
from changing_steps import CASES

pytestmark = pytest.mark.usefixtures("one_thread")


def line(name):
    return changing_steps.line(next(case for case in CASES if case.name == name), 3)


def test_steps_that_leave_a_plan_keep_their_bits_and_their_budget():
    found = line("more_layers")
    assert [step["kind"] for step in found["steps"]] == [1, 2, 3] * 4  # tight and roomy, met before or not
    assert all(step["bitwise_equal"] and step["planned_before"] >= 3 for step in found["steps"])
    assert all(max(step["peaks"]) <= 1.05 * step["budget_bytes"] < step["plain_peak_bytes"] for step in found["steps"])
    assert "of the budget" in changing_steps.told(found)


def test_steps_that_change_each_time_keep_their_bits():
    found = line("layerdrop")
    assert found["bitwise_equal"] and len(found["peaks"]) == 3 and set(found["step_ms"]) >= {"plain", "lowtide"}


def test_a_case_that_fails_says_so_and_one_that_hangs_is_ended():
    failed = one_process.line_of(["-c", "raise ValueError('mine')"], 60)
    assert failed["status"] == "ended with 1" and "ValueError: mine" in failed["error"][-1]
    assert one_process.line_of(["-c", "import time; time.sleep(60)"], 0.5)["status"] == "no end after 0.5 s"
