"""The benchmark of other libraries: what its lines say is what ran."""

from types import SimpleNamespace

import integration_cases
import integrations
import pytest

STATUS = SimpleNamespace(steps=4, planned_steps=2, plans=1, reasons=(), budget_bytes=100)


def case(ours_losses, ours_weights, budget=100):
    def run(asked):
        if asked is None:
            return integration_cases.Ran([1.0, 2.0], "weights", [150, 150], [], None, budget)
        return integration_cases.Ran(ours_losses, ours_weights, [90, 120, 80, 99], [80, 99], STATUS)

    return integration_cases.Case("a case", "a library", "torch", run)


@pytest.mark.parametrize("budget", [100, None], ids=["in bytes", "as lowtide counts it"])
def test_a_line_has_the_largest_peaks_as_shares_of_the_budget(budget):
    line = integrations._line(case([1.0, 2.0], "weights", budget))

    assert line["bitwise_losses"] and line["bitwise_weights"]
    assert (line["budget_bytes"], line["largest_peak_share"], line["largest_planned_peak_share"]) == (100, 1.2, 0.99)


def test_other_losses_and_other_weights_are_told():
    assert not integrations._line(case([1.0, 2.5], "weights"))["bitwise_losses"]
    assert not integrations._line(case([1.0, 2.0], "others"))["bitwise_weights"]


@pytest.mark.slow
def test_a_case_runs_in_a_process_of_its_own():
    line = integrations._in_processes("a loop of one's own", quick=True)

    assert line["status"] == "ok", line
    assert line["bitwise_losses"] and line["bitwise_weights"] and line["planned_steps"] > 0
