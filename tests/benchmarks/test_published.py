"""The page of published measurements: every row has a number, and none that is far off goes without a word."""

import json
from pathlib import Path

import published_table
import pytest
from published_recipes import RECIPES
from published_rows import ALLOCATED, TIME, rows

ROOT = Path(__file__).parents[2]

LINES = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text())


def test_every_row_is_re_created_once_and_has_a_source():
    keys = [row.key for row in rows()]

    assert len(set(keys)) == len(keys) and {line["row"] for line in LINES} == set(keys)
    assert all(row.source.startswith("https://") and row.recipe in RECIPES and row.published > 0 for row in rows())


def test_a_row_without_a_result_stops_the_table():
    with pytest.raises(SystemExit, match="rows and results differ"):
        published_table.summary(LINES[1:])


def test_rows_that_are_far_off_say_why():
    found = published_table.memory(LINES) + published_table.times(LINES)
    for row in rows():
        line = next(line for line in LINES if line["row"] == row.key)
        if abs(line["error"]) > 0.05:
            assert not next(x for x in found.splitlines() if row.configuration in x).endswith("|  |")


def test_what_is_set_aside_is_not_in_the_median():
    counted = [row for row in rows() if row.kind == ALLOCATED and not row.gradients]
    first = next(line for line in published_table.summary(LINES).splitlines() if line.startswith("| allocated"))

    assert f"| {len(counted)} |" in first


def test_times_on_which_shares_were_chosen_test_nothing():
    chosen = [row for row in rows() if row.calibrated]

    assert {row.gpu for row in chosen} == {"h100", "a100-80gb"} and all(row.kind == TIME for row in chosen)


def test_predictions_are_as_near_as_the_page_says():
    """A change that makes them worse is seen when the results are made again."""
    off = [abs(x["error"]) for x in LINES for row in rows() if row.key == x["row"] and row.kind == ALLOCATED
           and not row.gradients]  # fmt: skip
    assert sorted(off)[len(off) // 2] < 0.002 and max(off) < 0.05
