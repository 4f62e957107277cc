"""Plans of compiled layers on PyTorch's CUDA build: predicted peaks are what its allocator counts, bits are equal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import compiled_sharded, compiled_tensor_parallel
from support.ranks import on_every_rank
from torch import nn

import lowtide
from lowtide.compiled.compiled_model import check_devices

pytestmark = pytest.mark.usefixtures("compile_plans")
TESTS = Path(__file__).parents[1]


def lines_of(tmp_path, *arguments, grow=True, script="compiled_on_cuda.py"):
    """What a script of ``support`` prints, in a process whose stand-in has two devices."""
    pytest.importorskip("cuda_standin", reason="cuda_standin is not here: make test-cuda")
    environment = os.environ | {
        "STANDIN_DEVICES": "2", "PYTORCH_ALLOC_CONF": f"expandable_segments:{grow}",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "LOWTIDE_CACHE_DIR": str(tmp_path / "lowtide"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "OMP_NUM_THREADS": "1",  # two threads add up an embedding's gradient in one order or another
    }  # fmt: skip
    command = [sys.executable, str(TESTS / "support" / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("how", ["layers", "whole"])
def test_predicted_peaks_are_counted_and_bits_equal(tmp_path, dtype, how):
    lines = lines_of(tmp_path, dtype, how, "100%", "60%")

    for line in lines:
        assert line["counted_bytes"] == pytest.approx(line["predicted_bytes"], rel=1e-3), line
        assert line["equal"], line
    assert lines[1]["counted_bytes"] <= 0.6 * lines[1]["plain_bytes"] < lines[0]["counted_bytes"], lines


@pytest.mark.slow
def test_variants_add_up_in_the_block_sizes_of_the_plain_code_and_repeat_its_draws(tmp_path):
    (line,) = lines_of(tmp_path, "99.9%", script="blocks_on_cuda.py")

    assert {*line["variants"]} - {"plain"} and line["planned"] and line["equal"], line
    assert line["timed"] and all(line["alike"]), line


@pytest.mark.slow
def test_one_plan_serves_eight_lengths_within_its_budget(tmp_path):
    lengths = 256, 250, 200, 129, 128, 64, 33, 7
    lines = lines_of(tmp_path, "60%", *map(str, lengths), script="lengths_on_cuda.py")

    assert [line["length"] for line in lines] == list(lengths)
    for line in lines:
        assert line["equal"] and line["plans"] == 1 and line["reason"] == "", line
        assert line["variants"] == lines[0]["variants"] != ["plain"], line
    assert lines[0]["counted_bytes"] == pytest.approx(lines[0]["predicted_bytes"], rel=1e-3)
    counted = [line["counted_bytes"] for line in lines]
    assert counted == sorted(counted, reverse=True) and counted[0] <= 0.6 * lines[0]["plain_bytes"]


@pytest.mark.slow
def test_segments_that_do_not_grow_keep_the_budget_from_the_second_step_on(tmp_path):
    """Blocks of them are handed out whole, so the allocator counts more than the code asks for."""
    _, line = lines_of(tmp_path, "float32", "layers", "100%", "60%", grow=False)

    assert line["counted_bytes"] <= line["predicted_bytes"] <= 0.6 * line["plain_bytes"]
    assert line["equal"]


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch has no CUDA device: see make test-cuda")
def test_sharded_layers_of_two_ranks_are_planned_inside_and_gather_no_more(monkeypatch):
    monkeypatch.setenv("STANDIN_DEVICES", "2")  # the second one makes the values of compiled code
    with torch.device("cuda"):
        found = on_every_rank(compiled_sharded.training, "shard first")
    for told in found:
        assert told["found"] == told["expected"], "losses, gradients and collectives"
        assert set(told["plan"].values()) != {"plain"} and told["reason"] == ""
        assert told["measured"] == pytest.approx(told["predicted"], rel=1e-3) and told["predicted"] <= told["budget"]


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch has no CUDA device: see make test-cuda")
@pytest.mark.parametrize("style", ["columns and rows", "sequences"])
def test_layers_split_over_two_ranks_are_planned_inside_and_send_no_more(monkeypatch, style):
    monkeypatch.setenv("STANDIN_DEVICES", "2")
    with torch.device("cuda"):
        found = on_every_rank(compiled_tensor_parallel.training, style)
    for told in found:
        assert told["found"] == told["expected"], "losses, gradients, an evaluation and how often something was sent"
        assert set(told["plan"].values()) != {"plain"} and told["reason"] == ""
        assert told["predicted"] <= told["budget"]
        # The margin: an input of all layers goes with the first of them, and each one's code counts it as gone.
        exact = 1e-3 * told["predicted"]
        assert -exact <= told["predicted"] - told["measured"] <= told["margin"] + exact


@pytest.mark.slow
def test_a_step_that_a_cuda_graph_captures_runs_under_the_plan_that_is_there_and_else_is_refused(tmp_path):
    (line,) = lines_of(tmp_path, script="captured_on_cuda.py")

    assert len(line["refused"]) == 2, "before the first step, and of inputs that no step had"
    assert all("while a CUDA graph is captured" in told for told in line["refused"])
    assert line["steps_captured"] == 0, "nothing is watched, counted or planned in a capture"
    assert line["in_force"] and line["variants"] != ["plain"] and line["reason"] == ""
    assert line["later_planned_steps"] == 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).relu()


def test_cuda_graphs_are_refused_by_name_before_anything_runs(cuda):
    compiled = lowtide.compile(nn.Sequential(Layer(), Layer()).to(cuda), budget="50%")
    with (
        torch._inductor.config.patch({"triton.cudagraphs": True}),
        pytest.raises(lowtide.UnsupportedModelError, match=r"triton\.cudagraphs is on.*reduce-overhead"),
    ):
        compiled(torch.randn(4, 8, device=cuda))


def test_a_model_on_several_devices_is_refused(cuda):
    with pytest.raises(lowtide.UnsupportedModelError, match="lies on cuda:0, cuda:1"):
        check_devices([torch.device("cuda", index) for index in range(2)])
    check_devices([cuda, torch.device("cpu")])
