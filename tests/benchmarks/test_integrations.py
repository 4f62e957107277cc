"""The benchmark of other libraries: what its lines say is what ran."""

from pathlib import Path
from types import SimpleNamespace

import integration_cases
import integrations
import programs
import pytest
from integrations_table import programs_table

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


def test_a_program_whose_steps_were_not_all_counted_says_so():
    line = {
        "program": "a program", "version": "1", "case": "lora", "lines_changed": 0, "bitwise_losses": True,
        "bitwise_weights": False, "plain_peak_bytes": 2**20, "budget_bytes": 2**20, "peak_bytes": None, "steps": 9,
        "planned_steps": 7, "seconds": {"plain": 2.0, "lowtide": 2.2}, "device": "", "threads": 1, "torch": "",
        "commit": "abc",
    }  # fmt: skip

    row = programs_table([line]).splitlines()[2]

    assert "| equal, **differ** |" in row and "| not counted | 7 of 9 | +10.0 %, none |" in row


@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda program: program.name)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_command_of_a_program_names_files_that_there_are(program, checkpointed):
    """Each of its own output and steps; checkpointing is another command where the program has it."""
    for kind in program.kinds:
        run = programs.Run("python", kind, checkpointed, 24, Path("out"))
        words = program.command(run)

        files = [word for word in words if word.startswith(str(programs.FILES))]
        assert all(Path(word).exists() for word in files)
        assert any("out" in word for word in words)
        other = program.command(programs.Run("python", kind, not checkpointed, 24, Path("out")))
        assert (words != other) == program.has_checkpointing
