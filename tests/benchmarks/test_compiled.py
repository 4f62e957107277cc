"""``benchmarks/compiled.py``: what the table makes of its lines."""

from compiled_table import compiled_table

SHARED = {
    "case": "decoder, 8 layers", "rounds": 7, "device": "a CPU", "threads": 1, "torch": "2.13", "transformers": "5",
    "commit": "abc",
}  # fmt: skip
RAN = {
    "status": "ok", "activation_bytes": 3 << 20, "fraction": 0.5, "time_ratio": 1.25,
    "time_ratio_quartiles": [1.2, 1.3], "first_step_s": 12.0,
}  # fmt: skip


def rows_of(*lines):
    table = compiled_table([SHARED | line for line in lines])
    return {row.split(" | ")[0].strip("| "): row for row in table.splitlines() if row.startswith("| ")}


def test_without_results_a_sentence_says_how_to_get_them():
    assert "make compiled" in compiled_table([])


def test_a_row_has_peaks_and_times_predicted_and_measured():
    ours = {"predicted_activation_bytes": 3 << 20, "predicted_overhead": 0.2, "planning_s": 40.0}
    rows = rows_of(
        RAN | {"method": "full checkpointing", "bitwise_equal": True},
        RAN | ours | {"method": "lowtide 0.50", "bitwise_equal": True},
    )

    assert rows["full checkpointing"] == "| full checkpointing | 3.0 MiB | 0.500 |  | +25.0 % ± 5.0 |  | 12 s | equal |"
    assert (
        rows["lowtide 0.50"] == "| lowtide 0.50 | 3.0 MiB | 0.500 | 3.0 MiB | +25.0 % ± 5.0 | +20.0 % | 40 s | equal |"
    )


def test_other_bits_and_infeasible_budgets_stay_in_the_table():
    rows = rows_of(
        RAN | {"method": "memory budget 0.1", "bitwise_equal": False},
        {"method": "lowtide 0.10", "status": "infeasible", "least_bytes": 2 << 20, "planning_s": 3.0},
    )

    assert rows["memory budget 0.1"].endswith("**differ** |")
    assert "infeasible, least 2.0 MiB" in rows["lowtide 0.10"]


def test_a_table_of_two_runs_names_both():
    lines = [SHARED | RAN | {"method": name, "bitwise_equal": True} for name in ("eager", "compile alone")]
    table = compiled_table([lines[0], lines[1] | {"rounds": 9, "commit": "def"}])
    assert "medians of 7 or 9 interleaved rounds" in table and "commit abc or def." in table
