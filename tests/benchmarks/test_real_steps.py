"""``benchmarks/real_steps.py``: one case in this process, and what is made of its line."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import real_steps
import torch
from real_step_loops import LOOPS, Encoder
from step_probe import Probe, Stopwatch, resident_bytes

AUTOCAST = next(loop for loop in LOOPS if loop.name == "autocast")

pytestmark = pytest.mark.usefixtures("one_thread")


def two_layers():
    model = Encoder()
    del model.layers.layers[2:]
    return model


@pytest.fixture(scope="module")
def line():
    torch.set_num_threads(1)
    return real_steps.line(replace(AUTOCAST, make=two_layers, sizes=lambda steps: [(24,)] * 4), quick=True)


def test_a_quick_case_counts_every_step_and_trains_as_without(line):
    assert (line["case"], line["batches"], line["fit"]["steps"]) == ("autocast", 4, 4)
    assert line["plain_repeats_itself"] and line["bitwise_equal"]
    assert len(line["peak_shares"]) == len(line["phases"]) == sum(line["steps_by_phase"].values()) == 4
    assert line["phases"].startswith("f")
    assert max(line["peak_shares"]) == pytest.approx(line["largest_peak_share"], abs=1e-4)
    # A budget that steps without a plan do not reach would say nothing of them.
    assert 0.9 < line["largest_peak_share_by_phase"]["first"] < 1.2
    assert line["planning_cpu_s"] > 0


def test_what_was_asked_stands_beside_what_was_found(line):
    text = real_steps.told(line)
    assert f"{line['largest_peak_share']:.4f}   asked: <= 1.005" in text
    assert "under one fixed plan" not in text  # all batches are alike
    assert "a" * 9 in real_steps.told({"case": "x", "rank": 0, "status": "ended with 1", "error": ["a" * 9]})


def test_lines_of_the_same_case_are_replaced_and_others_stay(tmp_path, line):
    out = tmp_path / "lines.jsonl"
    real_steps._write(out, [line, line | {"case": "trainer"}])
    real_steps._write(out, [line | {"seed": 7}])
    found = [json.loads(text) for text in out.read_text().splitlines()]
    assert [(entry["case"], entry["seed"]) for entry in found] == [("trainer", 0), ("autocast", 7)]


def test_a_weight_or_a_loss_of_another_bit_is_another_training():
    def run(loss, weight):
        probe = Probe(torch.nn.Identity())
        return real_steps.Run([loss], {"weight": torch.tensor(weight)}, 1.0, 1.0, probe, None, [])

    assert run(1.0, 2.0).same_as(run(1.0, 2.0))
    assert not run(1.0, 2.0).same_as(run(1.0, 2.0000002))
    assert not run(1.0, 2.0).same_as(run(1.0000001, 2.0))


def test_the_peak_of_a_step_is_absolute():
    model = torch.nn.Linear(1024, 8, bias=False)
    probe = Probe(model, peaks=True)
    batch = torch.ones(4, 1024)
    with probe.step(batch, 4):
        torch.empty(10_000)
    (record,) = probe.records
    assert record.resident_bytes == resident_bytes(model, batch) == 4 * (8 * 1024 + 4 * 1024)
    assert resident_bytes(model, gradients_to_come=True) == 4 * 2 * 8 * 1024
    assert record.peak_bytes == record.resident_bytes + 40_000
    assert record.phase == "plain"


def test_functions_that_call_each_other_are_timed_once(monkeypatch):
    clock = SimpleNamespace(perf_counter=iter(range(100)).__next__, thread_time=iter(range(100)).__next__)
    monkeypatch.setattr("step_probe.time", clock)
    watch = Stopwatch()
    inner = watch.around(lambda: None)
    watch.around(inner)()
    assert watch.cpu_s == 2  # the clock is read by outer, inner, outer
