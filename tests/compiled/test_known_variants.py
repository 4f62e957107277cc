"""A second run of a script searches, reads and times no variants again, and believes neither bytes nor bits."""

import json

import pytest
import torch
from support.compiled_layers import IDS, decoder, equal, reference, step_of

import lowtide
from lowtide.compiled import proof, step_plan
from lowtide.compiled.captured_layer import CapturedLayer
from lowtide.measurement.allocator import peak_bytes


@pytest.fixture
def effort(monkeypatch, tmp_path):
    """What planning does, by name; the cache is empty at first."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    done = []
    read, prove = CapturedLayer.variant, proof.why_not_equal

    def variant(self, name, saved, *, kernels=True):
        done.append("compile" if kernels else "read")
        return read(self, name, saved, kernels=kernels)

    monkeypatch.setattr(CapturedLayer, "variant", variant)
    monkeypatch.setattr(step_plan, "measure_ms", counted(done, "time", step_plan.measure_ms))
    monkeypatch.setattr(step_plan, "why_not_equal", counted(done, "prove", prove))
    return done


def counted(done, name, function):
    def run(*args):
        done.append(name)
        return function(*args)

    return run


def planned(budget="60%"):
    """A run of the script: the plan and its step."""
    torch._dynamo.reset()
    model = decoder()
    compiled = lowtide.compile(model, budget=budget)
    step_of(compiled, model)
    plan = compiled.plan
    return plan, step_of(compiled, model)


@pytest.mark.slow
def test_a_second_run_compiles_what_it_runs_and_proves_it_and_searches_nothing(effort, tmp_path):
    first, steps = planned()
    searched = effort.count("read")
    effort.clear()
    second, again = planned()

    assert searched > 0 and "read" not in effort and "time" not in effort
    used = [v.name for v in second.variants if v.name not in ("plain", "run again")]
    assert effort.count("prove") == len(used) and effort.count("compile") == 1 + len(used)
    assert (second.layers, second.predicted_peak_bytes) == (first.layers, first.predicted_peak_bytes)
    assert equal(again, reference()) and equal(steps, again)


@pytest.mark.slow
def test_what_a_file_says_of_bytes_is_not_believed(effort, tmp_path):
    planned()
    (file,) = (tmp_path / "compiled").iterdir()
    entry = json.loads(file.read_text())
    for variant in entry["variants"].values():
        variant["memory"]["stored_bytes"] //= 2
    file.write_text(json.dumps(entry))
    torch._dynamo.reset()
    model = decoder()
    compiled = lowtide.compile(model, budget="60%")
    step_of(compiled, model)
    plan = compiled.plan
    measured = plan.resident_bytes + peak_bytes(lambda: compiled(IDS).backward())

    assert measured == pytest.approx(plan.predicted_peak_bytes, rel=0.005)
    assert measured <= plan.predicted_peak_bytes <= plan.budget_bytes
    assert any("took other bytes" in reason for reason in plan.refused)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{", "{}", '{"version": 1, "variants": {"x": {}}, "searched": []}'])
def test_a_damaged_file_is_ignored(effort, tmp_path, text):
    planned()
    (file,) = (tmp_path / "compiled").iterdir()
    file.write_text(text)
    effort.clear()
    planned()

    assert "read" in effort and "time" in effort
