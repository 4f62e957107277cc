"""``benchmarks/gpu.py`` from end to end on the tests' accelerator, and the table of what it writes."""

import json
import subprocess
import sys
from pathlib import Path

import gpu
import pytest
import torch
from gpu_table import COLUMNS, SHOWN, gpu_summary, gpu_table

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*arguments, timeout=120):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=timeout)


@pytest.mark.thorough
def test_every_method_trains_to_the_same_bits_within_what_was_predicted(accelerator, tmp_path):
    out = tmp_path / "gpu.jsonl"
    ran = run("--device", "standin:1", "--rounds", "1", "--out", out, timeout=600)
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]

    for case in ("decoder", "transformers llama"):
        mine = {line["method"]: line for line in lines if line["case"] == case}
        assert {"plain", "torch checkpoint, every layer", "lowtide, 50 %", "lowtide, at the peak of every layer"} <= {
            name for name, line in mine.items() if line["status"] == "ok"
        }
        assert len(mine) == 7
    trained = [line for line in lines if line["status"] == "ok"]
    assert all(line["losses_equal"] and line["weights_equal"] and line["time_ms"] > 0 for line in trained)
    assert len(set(trained[0]["losses"])) == 3  # the weights move
    ours = [line for line in trained if "predicted_peak_bytes" in line]
    assert all(line["peak_bytes"] == line["predicted_peak_bytes"] for line in ours)
    # So small a step is all in one segment of 2 MiB or two; what training left between the weights decides.
    assert all(abs(line["reserved_bytes"] - line["predicted_reserved_bytes"]) <= 2 << 20 for line in ours)
    moved = [line["counts"]["cpu_offload"] for line in ours if line["method"].endswith("with host memory")]
    assert any(moved)
    assert {"device", "driver", "torch", "transformers", "commit", "device_type"} <= lines[0].keys()

    assert all(line["standin"] for line in lines)

    table = gpu_table(lines)
    assert "DIFFERENT" not in table and f"**{case}**" in table
    assert all(row.count("|") == len(COLUMNS) + 1 for row in table.splitlines() if row.startswith("|"))


@pytest.mark.thorough
def test_when_the_time_is_up_every_method_says_so(accelerator):
    ran = run("--device", "standin", "--minutes", "0")
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(lines) > 8 and {line["status"] for line in lines} == {"out of time"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no accelerator here that torch finds. For the same code on the tests' stand-in for one: "
             "--device standin."),
        (("--device", "xpu"), "there is no device xpu here. Here are: cpu."),
        (("--device", "nope"), f"device 'nope' is not known to torch {torch.__version__}. Here are: cpu."),
        (("--device", "cpu"), "this benchmark is for accelerators. On a CPU: make bench."),
    ],
)  # fmt: skip
def test_without_the_device_it_says_so(arguments, message, monkeypatch, capsys):
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    assert (gpu.main(), capsys.readouterr().err.strip()) == (2, message)


def test_what_differs_or_does_not_run_is_told_in_the_table():
    shared = {
        "case": "decoder", "layers": 1, "width": 8, "batch": 1, "sequence": 4, "dtype": "bfloat16",
        "device": "a device", "driver": None, "runtime": "12", "torch": "2", "commit": "abc", "date": "2026-11-22",
    }  # fmt: skip
    differs = {
        "method": "lowtide", "status": "ok", "peak_bytes": 1 << 20, "reserved_bytes": 2 << 20, "losses_equal": True,
        "weights_equal": False,
    }  # fmt: skip
    rows = gpu_table([shared | differs, shared | {"method": "plain", "status": "out of memory"}]).splitlines()

    assert "| lowtide | 1.0 MiB |  | 2.0 MiB |  |  |  | DIFFERENT |" in rows
    assert "| plain | out of memory |  |  |  |  |  |  |" in rows
    assert rows[-1].startswith("a device, runtime 12, torch 2, commit abc, 2026-11-22.")


def test_a_time_of_a_stand_in_is_never_shown():
    shared = {
        "case": "decoder", "layers": 1, "width": 8, "batch": 1, "sequence": 4, "dtype": "float32", "method": "plain",
        "device": "a device", "driver": None, "runtime": "12", "torch": "2", "commit": "abc", "date": "2026-11-22",
        "status": "ok", "peak_bytes": 1 << 20, "reserved_bytes": 2 << 20, "losses_equal": True, "weights_equal": True,
    }  # fmt: skip
    of_gpu = shared | {"time_ms": 777.0, "overhead": 0.333, "standin": False}
    of_stand_in = shared | {"time_ms": 555.0, "overhead": 0.111, "standin": True}
    table = gpu_table([of_gpu, of_stand_in])

    assert "777 ms" in table and "+33.3 %" in table
    assert "555" not in table and "11.1" not in table
    assert table.count("**decoder**") == 2 and table.count("on a stand-in for a GPU, whose times say nothing") == 1


def test_the_readme_says_where_bits_or_peaks_are_not_as_promised():
    def summary(weights_equal, predicted):
        line = {
            "case": "decoder", "layers": 1, "width": 8, "batch": 1, "sequence": 4, "dtype": "bfloat16",
            "device": "a device", "peak_bytes": 1 << 30, "predicted_peak_bytes": predicted, "time_ms": 3.0,
            "overhead": 0.1, "losses_equal": True, "weights_equal": weights_equal,
        }  # fmt: skip
        return gpu_summary([line | {"method": method} for method in SHOWN])

    assert "kernels all weights keep plain's bits; peaks are as predicted to the byte" in summary(True, 1 << 30)
    assert "kernels NOT all weights keep plain's bits" in summary(False, 1 << 30)
    assert "as predicted but NOT to the byte" in summary(True, (1 << 30) + 1)
