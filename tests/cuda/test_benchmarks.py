"""The benchmarks of a GPU run from end to end on a stand-in for one, and say that it is none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture
def on_stand_in():
    from stand_in import is_cuda_stand_in

    if not is_cuda_stand_in():
        pytest.skip("a GPU is here: make gpu")


def lines_of(script, *arguments, out):
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments, "--out", out], capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("on_stand_in")
def test_every_method_runs_with_the_same_bits_and_its_line_says_standin(tmp_path):
    lines = lines_of("gpu.py", "--rounds", "1", out=tmp_path / "gpu.jsonl")
    trained = [line for line in lines if line["status"] == "ok"]

    assert {line["standin"] for line in lines} == {True} and {line["device_type"] for line in lines} == {"cuda"}
    assert len(trained) >= 9 and all(line["losses_equal"] and line["weights_equal"] for line in trained)
    assert {line["status"] for line in lines} <= {
        "ok",
        "infeasible",
    }  # a workspace of cuBLAS is most of so small a step
    assert all(line["peak_bytes"] == line["predicted_peak_bytes"] for line in trained if "counts" in line)


@pytest.mark.slow
@pytest.mark.usefixtures("on_stand_in")
def test_host_time_is_measured_for_every_method(tmp_path, monkeypatch):
    lines = lines_of("host_time.py", "--sizes", "2 x 256", "--rounds", "2", out=tmp_path / "host.jsonl")
    found = {line["method"]: line for line in lines}

    assert len(found) == 9 and all(line["standin"] and line["host_ms"] > 0 for line in lines)
    assert found["plain"]["more_us_per_op"] == 0 and found["lowtide, all kept"]["counts"]["recompute"] == 0
    for name in ("lowtide, 60 %", "lowtide, 35 %"):
        assert found[name]["waits"] <= found["plain"]["waits"] + 1
        assert found[name]["activation_bytes"] < found["plain"]["activation_bytes"]
