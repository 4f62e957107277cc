"""A second run of a script searches, reads and times no variants again, and believes neither bytes nor bits."""

import json
import os
import subprocess
import sys

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
    read, prove, measure = CapturedLayer.variant, proof.why_not_equal, step_plan.measure_ms

    def variant(self, name, saved, *, kernels=True):
        done.append("compile" if kernels else "read")
        return read(self, name, saved, kernels=kernels)

    monkeypatch.setattr(CapturedLayer, "variant", variant)

    def timed(*args):
        done.append("time")
        return measure(*args)

    def proven(captured, variants, plain):
        done.extend(["prove"] * len(variants))
        return prove(captured, variants, plain)

    monkeypatch.setattr(step_plan, "measure_ms", timed)
    monkeypatch.setattr(step_plan, "why_not_equal", proven)
    return done


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


SCRIPT = """
import json, sys, torch
from support.compiled_layers import decoder, step_of
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import CppBuilder
import lowtide
from lowtide.compiled import saved_sets
torch.set_num_threads(1)
done = {"built": 0, "solved": 0}
build, solve = CppBuilder.build, saved_sets.solve
def building(builder):
    done["built"] += builder.get_target_file_path().endswith(".so")  # each process looks at PyTorch's headers again
    return build(builder)
def solving(*args, **kwargs):
    done["solved"] += 1
    return solve(*args, **kwargs)
CppBuilder.build, saved_sets.solve = building, solving
model = decoder(width=40)
compiled = lowtide.compile(model, budget="60%", layers=json.loads(sys.argv[1]))
step_of(compiled, model)
plan = compiled.plan
done |= {"graphs": counters["inductor"]["fxgraph_cache_miss"], "peak": plan.predicted_peak_bytes, "plan": plan.layers}
print("DONE" + json.dumps(done))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [None, ["*"]], ids=["layers", "whole"])
def test_a_second_process_compiles_no_kernel_and_no_graph_anew(layers, tmp_path):
    """What it needs lies in the caches: PyTorch's has the kernels, alone and together, and the graphs."""
    environment = {**os.environ, "LOWTIDE_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    told = []
    for _ in range(2):
        command = [sys.executable, "-c", SCRIPT, json.dumps(layers)]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
        assert found.returncode == 0, found.stderr[-3000:]
        told.append(json.loads(found.stdout.split("DONE")[1]))
    first, second = told
    assert first["built"] > 0 and first["graphs"] > 0 and first["solved"] > 0
    assert second["plan"] == first["plan"] and second["peak"] == first["peak"]
    assert (second["built"], second["graphs"], second["solved"]) == (0, 0, 0)
    assert set(first["plan"].values()) - {"plain", "run again", "least"}, "a set was searched for"


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
