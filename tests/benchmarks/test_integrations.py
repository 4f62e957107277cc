"""The benchmark of other libraries: what its lines say is what ran."""

from pathlib import Path
from types import SimpleNamespace

import full_size_programs
import integration_cases
import integrations
import programs
import pytest
from full_size_programs_table import full_size_programs_table
from integrations_table import programs_table
from pretend_cases import CASES

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


def test_programs_above_their_budget_are_told_with_the_reason_and_two_plain_runs_that_differ():
    line = {
        "program": "a program", "version": "1", "case": "boxes", "lines_changed": 0, "bitwise_losses": False,
        "bitwise_weights": False, "plain_repeats": False, "plain_peak_bytes": 10 << 10, "budget_bytes": 8 << 10,
        "peak_bytes": 9 << 10, "steps": 9, "planned_steps": 7, "over_budget_steps": 2, "reasons": ["It is the least"],
        "seconds": {"plain": 2.0, "lowtide": 2.2}, "device": "", "threads": 1, "torch": "", "commit": "abc",
    }  # fmt: skip

    table = programs_table([line])

    assert "| two plain runs differ, two plain runs differ |" in table
    assert table.splitlines()[-1] == "- a program (boxes): 2 of 9 steps, by 1.0 KiB at most: it is the least."
    assert "| equal, two plain runs differ |" in programs_table([{**line, "bitwise_losses": True}])
    within = programs_table([{**line, "peak_bytes": 8 << 10}])
    assert "took more than its budget" not in within


def full_size_line(method, budget, peaks, launches, **lowtide):
    steps = [
        {"allocated_bytes": p << 30, "launches": n, "host_ms": 1.0} for p, n in zip(peaks, launches, strict=True)
    ]  # fmt: skip
    return {
        "name": "sft", "method": method, "budget_bytes": budget and budget << 30, "steps": steps, "ranks": 1,
        "verdict": "fits", "peak_reserved_bytes": 9 << 30, "time": {"host_ms": 5.0, "step_ms": 1500.0},
        "lowtide": lowtide or None, "commit": "abc", "versions": {"torch": "2", "transformers": "5", "trl": "1"},
    }  # fmt: skip


def test_a_program_at_full_size_has_the_highest_of_its_first_and_of_its_later_steps():
    told = {"in_force": True, "planned_steps": 3, "reasons": ["proofs (LOWTIDE_WITHOUT_VALUES)", "the least\nthere is"]}
    lines = [
        full_size_line("plain", None, [8, 9, 9, 9], [10, 10, 10, 10]),
        full_size_line("lowtide", 4, [3, 6, 4, 4], [90, 90, 90, 12], **told),
        full_size_line("lowtide", 4, [3, 4, 4, 4], [90, 90, 12, 12], **told),
    ]

    table = full_size_programs_table(lines).splitlines()

    assert "| plain |  | 9.00 | 9.00 | 9.00 | 10 | 5 | 1,500 |" in table
    assert "| lowtide | 4.00 | 6.00 | 4.00 | 9.00 | 12 | 5 | 1,500 (no plan yet) |" in table
    assert "| lowtide | 4.00 | 4.00 | 4.00 | 9.00 | 12 | 5 | 1,500 |" in table
    assert [line for line in table if line.startswith("- ")] == ["- sft: the least there is."]


@pytest.mark.parametrize("program", full_size_programs.PROGRAMS, ids=lambda program: program.name)
def test_checkpointing_at_full_size_is_another_command(program):
    assert program.name in {case.name for case in CASES}
    plain, own = (full_size_programs.command_of(program, own=own) for own in (False, True))
    assert (plain != own) == bool(program.own)
    assert plain.count("gradient_checkpointing") <= 1
