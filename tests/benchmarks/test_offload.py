"""``benchmarks/offload.py --quick``, and the table made of its lines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from table import offload_table

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "offload.py"


@pytest.mark.slow
def test_the_quick_run_measures_every_way_and_its_lines_make_a_table(tmp_path):
    out = tmp_path / "offload.jsonl"
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--out", str(out)], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]

    # So small a step recomputes down to what the disk reaches: there is no row beyond recomputing.
    assert len(lines) in (1 + 3 * 2, 1 + 4 * 2) and {line["benchmark"] for line in lines} == {"offload_cpu"}
    if beyond := {line["way"]: line for line in lines if line["budget"] == "beyond recomputing"}:
        assert beyond["recompute"]["status"] == "no plan" and beyond["disk"]["moved_bytes"] > 0
    for line in lines:
        if line["status"] == "ok" and line["way"] != "plain":
            assert line["activation_bytes"] == line["predicted_activation_bytes"] and line["elapsed_ms"] > 0
            assert line["bitwise_equal"]
    table = offload_table(lines)
    assert table.count("| no plan |") >= 1 and "with the disk" in table


def test_no_table_is_made_of_gradients_that_differ_where_they_must_not():
    shared = {"case": "x", "rounds": 1, "links": {"disk": [1e9, 1e9, 0.0]}, "file_system": "ext4", "device": "a",
              "threads": 1, "torch": "2", "commit": "c", "status": "ok"}  # fmt: skip
    measured = {"activation_bytes": 1, "fraction": 1.0, "elapsed_ms": 1.0, "elapsed_ratio": 1.0,
                "elapsed_ratio_quartiles": [1.0, 1.0], "predicted_overhead": 0.0, "bitwise_equal": True}  # fmt: skip
    lines = [shared | measured | {"budget": "", "way": "plain"}]
    lines += [shared | measured | {"budget": "50%", "way": way} for way in ("recompute", "disk")]
    assert "| 50 % |" in offload_table(lines)

    lines[2]["bitwise_equal"] = False
    with pytest.raises(SystemExit, match="gradients differ where they must not"):
        offload_table(lines)
