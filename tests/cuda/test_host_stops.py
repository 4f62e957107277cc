"""A planned step asks nothing of the device that the host would wait for, and copies nothing to the host."""

import json

import pytest
import torch
from support.training_steps import mlp

import lowtide
from lowtide.step import storage_bits

control = pytest.importorskip("cuda_standin.control")
NO_HOST = lowtide.Offload(host_budget=None)
TO_THE_HOST = {"to_host", "host_event", "host_stream", "host_device"}


def fitted(cuda, depth=24):
    torch.manual_seed(0)
    model, batch = mlp(depth, 64).to(cuda), torch.randn(512, 64, device=cuda)
    step = lambda: model(batch).square().mean().backward()  # noqa: E731
    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    activations = torch.cuda.max_memory_allocated() - before
    return lowtide.fit(model, budget=before + 6 * activations // 10, offload=NO_HOST), step


def entries(path, step):
    """What the stand-in logs of a step."""
    control.begin_step_record()
    step()
    control.end_step_record(path)
    return [kind for kind, *_ in json.loads(path.read_text())["entries"]]


def test_a_planned_step_copies_nothing_to_the_host_and_does_not_wait(cuda, tmp_path):
    if not control.is_loaded():
        pytest.skip("a GPU keeps no log")
    fit, step = fitted(cuda)
    with fit:
        step()
        fit.wait()
        for _ in range(2):
            step()
        seals = fit._lifecycle.latest.tape.seals
        waits = control.counters().waits
        found = [kind for _ in range(8) for kind in entries(tmp_path / "step.json", step)]
        status = fit.status()

    assert status.in_force and status.reasons == () and seals is not None
    assert "op" in found and not TO_THE_HOST & set(found)
    assert control.counters().waits - waits <= 1  # of ``status``, which asks for the flags


@pytest.mark.parametrize("is_known_at_once", [False, True])
def test_sums_that_the_host_reads_would_show(cuda, tmp_path, monkeypatch, is_known_at_once):
    """The log tells, and a round of sixteen steps asks for the flags once, without waiting."""
    if not control.is_loaded():
        pytest.skip("a GPU keeps no log")
    if is_known_at_once:
        monkeypatch.setattr("lowtide.tape.tape.seals_on", lambda device: None)
    fit, step = fitted(cuda)
    with fit:
        step()
        fit.wait()
        found = [entries(tmp_path / "step.json", step) for _ in range(storage_bits._ROUND + 4)]

    copies = [kinds.count("to_host") for kinds in found[2:]]
    stops = sum(kind in TO_THE_HOST - {"to_host"} for kinds in found[2:] for kind in kinds)
    assert (sum(copies) > storage_bits._ROUND and stops > storage_bits._ROUND) == is_known_at_once
    assert is_known_at_once or (sum(copies) == 1 and stops == 0)
