"""What was foreseen beside what a GPU took: what was foreseen first stays, and classes are counted as they lie."""

import json

import foreseen_gpu
import operator_shares
import pytest
from foreseen_gpu_table import NOT_PROFILED, foreseen_table, shares_table
from scripts.gpu_training import CASES

from lowtide.estimation.device_table import device_named
from lowtide.pretending.step_record import Entry, StepRecord

LINES = json.loads(foreseen_gpu.RESULTS.read_text())
ALL_SHARES = json.loads(operator_shares.RESULTS.read_text())
SHARES = [line for line in ALL_SHARES if "class" in line]
WEIGHT = {"t": [1024, 1024], "stride": [1024, 1], "dtype": "bfloat16", "device": "cuda"}
GPU = {"case": "gpt2 medium", "device": "NVIDIA H200", "step_ms": 2.0, "peak_allocated_bytes": 512,
       "peak_reserved_bytes": 2 << 20, "torch": "2.11.0"}  # fmt: skip


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(foreseen_gpu, "RECORDS", tmp_path)
    signature = {"op": "aten.mm.default", "args": [WEIGHT, WEIGHT], "kwargs": {}}
    record = {"entries": [["op", 0, 0, 0, 2 << 20, 1]], "signatures": [signature], "graphs": {}, "took_ns": 5000}
    body = {"peak_allocated_bytes": 1024, "peak_reserved_bytes": 2 << 20, "record": record, "torch": "2.11.0",
            "facts": {"host_ns": [5000, 4000], "tf32": False}}  # fmt: skip
    foreseen_gpu.path_of("gpt2 medium").write_text(json.dumps(body))
    return body


def test_what_was_foreseen_first_stays_while_the_measured_case_does(recorded):
    (line,) = foreseen_gpu.joined([GPU, GPU | {"case": "without a record"}], {})
    old = line | {"first": line["first"] | {"step_ms": 7.0}}

    (again,) = foreseen_gpu.joined([GPU], {"gpt2 medium": old})
    (other,) = foreseen_gpu.joined([GPU | {"step_ms": 3.0}], {"gpt2 medium": old})

    assert line["first"] == line["foreseen"] and line["foreseen"]["peak_allocated_bytes"] == 1024
    assert again["first"]["step_ms"] == 7.0 and again["foreseen"] == line["foreseen"]
    assert other["first"] == other["foreseen"]


def test_the_run_with_the_fastest_host_is_kept(recorded):
    path = foreseen_gpu.path_of("gpt2 medium")

    foreseen_gpu.keep("gpt2 medium", recorded | {"facts": {"host_ns": [9000, 4500], "tf32": False}})
    assert json.loads(path.read_text())["facts"]["host_ns"] == [5000, 4000]
    foreseen_gpu.keep("gpt2 medium", recorded | {"facts": {"host_ns": [9000, 3000], "tf32": False}})
    assert json.loads(path.read_text())["facts"]["host_ns"] == [9000, 3000]


def test_every_line_is_of_a_case_and_the_table_has_them_all():
    table = foreseen_table(LINES)

    assert {line["case"] for line in LINES} == set(CASES) - {"llama 1b, compiled"}  # it was not reached in time
    assert all(f"| {line['case']}" in table for line in LINES)
    assert set(NOT_PROFILED) < {line["case"] for line in LINES}
    assert {line["cases"] for line in SHARES} <= set(range(1, len(LINES) - len(NOT_PROFILED) + 1))


def test_what_the_table_of_devices_says_now_is_nearer_than_what_it_said():
    before, now = (
        sum(abs(line[name] - line["measured_ms"]) for line in SHARES) for name in ("before_ms", "foreseen_ms")
    )

    assert now < 0.1 * before
    assert all(0 < line["at_peak_ms"] < 1.1 * line["measured_ms"] for line in SHARES if line["measured_ms"] > 1)
    assert all(f"{line['held_out']} " in shares_table(ALL_SHARES) for line in ALL_SHARES if "held_out" in line)


def test_a_case_that_is_held_out_is_told_by_the_others_alone():
    by_case = {"a": {"norm": [10.0, 1.0, 5.0, 9.0], "pool": [3.0, 1.0, 2.0, 2.0]}, "b": {"norm": [8.0, 1.0, 2.0, 9.0]}}

    a, b = operator_shares.held_out(by_case)

    assert (a["measured_ms"], a["before_ms"], a["told_ms"]) == (0.013, 0.007, (5 * 8 / 2 + 2) / 1e3)
    assert b["told_ms"] == 2 * 10 / 5 / 1e3


def test_time_of_operators_with_the_same_shapes_is_divided_as_foreseen():
    plain = {"op": "aten.copy_.default", "args": [WEIGHT, WEIGHT], "kwargs": {}}
    cast = {"op": "aten.copy_.default", "args": [WEIGHT, WEIGHT | {"dtype": "float32"}], "kwargs": {}}
    record = StepRecord((Entry("op", 0, 0, 0, 2 << 20, 1), Entry("op", 0, 0, 1, 2 << 20, 1)), (plain, cast), {}, 1, 1)
    profile = [["aten::copy_", "[[1024, 1024], [1024, 1024], []]", 2, 100.0, 9.0], ["a kernel", "[]", 2, 100.0, 0]]

    found = {name: numbers for name, *numbers in operator_shares.of_case(record, profile, device_named("h200"))}

    assert set(found) == {"copy", "copy, cast"}
    assert sum(numbers[0] for numbers in found.values()) == pytest.approx(100.0)
    assert found["copy, cast"][0] / found["copy"][0] == pytest.approx(found["copy, cast"][3] / found["copy"][3])
    assert found["copy"][1] == pytest.approx(2 * 2**21 / 4.8e12 * 1e6)  # at the data sheet's bandwidth
