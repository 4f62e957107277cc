"""What is made of a run: the verdict, the report as text, page and JSON. No torch, no process."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lowtide.pretending.command_run import CommandRun
from lowtide.pretending.environments import ScriptEnvironment
from lowtide.pretending.outcome import KINDS, outcome
from lowtide.pretending.outcome_facts import RankPeak
from lowtide.pretending.outcome_page import page
from lowtide.pretending.settings import NCCL_BYTES, PretendSettings

GIB = 2**30
ENVIRONMENT = ScriptEnvironment(Path("/env/bin/python"), "2.14.1")
STEP = {"allocated_bytes": 10 * GIB, "reserved_bytes": 12 * GIB, "seconds": 0.25, "launches": 1706, "waits": 2}
SEEN = {
    "steps": [{**STEP, "allocated_bytes": 8 * GIB}, STEP, STEP],
    "stages": [{"stage": "import torch", "seconds": 0.5}, {"stage": "forward", "seconds": 2.0}],
    "stops": [{"line": "train.py:1 " + "x" * 90, "operator": "_local_scalar_dense", "count": n} for n in range(15)],
    "by_kind": {"weights": 2 * GIB, "gradients": 0, "optimizer": 4 * GIB, "activations": 4 * GIB, "workspaces": 1 << 25,
                "other": 512},
    "by_part": [{"part": "optimizer", "kind": "optimizer", "bytes": 4 * GIB}],
    "by_module": [{"module": "LlamaMLP", "bytes": GIB}],
    "by_line": [{"line": "model.py:187 forward " + "y" * 120, "bytes": GIB}],
    "curve": {"by_kind": {kind: [GIB, 2 * GIB, 3 * GIB] for kind in KINDS}, "steps": [1, 3]},
    "stopped": True,
    "launches": 5000,
}  # fmt: skip
OUT = {"step": 2, "line": "model.py:187", "script_line": "train.py:12", "asked_bytes": 3 * GIB,
       "allocated_bytes": 77 * GIB, "reserved_bytes": 78 * GIB, "message": "CUDA out of memory."}  # fmt: skip


def of(settings=None, capacity=80 * GIB, code=0, **changes):
    settings = settings or PretendSettings()
    last_words, because = changes.pop("last_words", ""), changes.pop("ended_because", "")
    environment = replace(ENVIRONMENT, torch=changes.pop("torch", ENVIRONMENT.torch))
    facts, record = changes.pop("step_record", (None, None))
    seen = {**SEEN, **changes} | ({"step_record": facts} if facts else {})
    run = CommandRun(("python", "train.py"), seen, code, 7.0, last_words, because, GIB, record)
    return outcome(run, settings, environment, capacity)


@pytest.mark.parametrize(
    ("changes", "verdict", "fits"),
    [
        ({}, "fits", True),
        ({"capacity": int(12.6 * GIB)}, "fits tightly", True),
        ({"code": 1, "out_of_memory": [OUT]}, "does not fit", False),
        ({"out_of_memory": [OUT]}, "fits", True),  # caught
        ({"code": 1, "out_of_memory": [OUT], "error": "KeyError: 'mine'"}, "failed", False),
        ({"code": 1, "out_of_memory": [OUT], "error": "OutOfMemoryError: CUDA out of memory."}, "does not fit", False),
        ({"code": 3}, "failed", False),
        ({"steps": []}, "trained nothing", False),
        ({"ended_because": "there was no step for 900 s"}, "did not end", False),
    ],
)
def test_the_verdict_follows_from_what_ended_the_script(changes, verdict, fits):
    report = of(**changes)

    assert (report.verdict, report.fits) == (verdict, fits)
    assert str(report)


def test_weights_that_a_script_changes_by_itself_are_said_to_be_no_steps():
    said = "Backward ran: what changes weights without an optimizer of PyTorch's is not seen as a step."

    assert said in of(steps=[], stages=[{"stage": "backward"}]).notes
    assert said not in of(steps=[], stages=[{"stage": "forward"}]).notes and said not in of().notes


def test_the_peak_is_the_highest_step_and_what_came_after_the_last():
    assert (of().peak_allocated_bytes, of().peak_reserved_bytes) == (10 * GIB, 12 * GIB)
    later = of(after_last_step={"allocated_bytes": 11 * GIB, "reserved_bytes": 13 * GIB})
    assert (later.peak_allocated_bytes, later.peak_reserved_bytes) == (11 * GIB, 13 * GIB)
    assert of().host_ms_per_step == 250.0


def test_ranks_cost_the_buffers_of_nccl():
    alone, one_of_many = of(), of(ranks=8, rank=1)

    assert one_of_many.context_bytes - alone.context_bytes == NCCL_BYTES
    assert one_of_many.nvidia_smi_bytes == one_of_many.peak_reserved_bytes + one_of_many.context_bytes
    assert "Rank 1 of 8 ran; every other rank is taken to hold what it holds." in one_of_many.assumptions


def test_of_errors_that_were_caught_the_first_is_told_and_of_others_the_last():
    caught = of(out_of_memory=[OUT, {**OUT, "step": 3}])
    ended = of(
        code=1, out_of_memory=[OUT, {**OUT, "step": 3, "message": ""}], last_words="x\nCUDA out of memory. Tried\n"
    )

    assert (caught.out_of_memory.step, caught.out_of_memory.was_caught) == (2, True)
    assert (ended.out_of_memory.step, ended.out_of_memory.was_caught) == (3, False)
    assert ended.out_of_memory.message == "CUDA out of memory. Tried"


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("socket.gaierror: [Errno -2] Name or service not known", "The script asked for something from the network."),
        ("FileNotFoundError: /usr/local/cuda/bin/nvcc", "The script compiles CUDA code when it runs, with nvcc"),
        ("OSError: CUDA_HOME environment variable is not set.", "The script compiles CUDA code when it runs"),
        ("RuntimeError: Error building extension 'ext'", "The script compiles CUDA code when it runs, with nvcc"),
    ],
)
def test_what_cannot_work_here_is_said_in_a_sentence(words, note):
    assert any(line.startswith(note) for line in of(code=1, last_words=words).notes)
    assert not any(line.startswith(note) for line in of(last_words=words).notes)  # it came to its end all the same


def test_functions_that_are_not_there_and_operators_without_values_are_named():
    report = of(
        unsupported=["cudnnGetVersion (libcudnn)", "cusolverDnCreate (libcusolver)"],
        without_values={"aten::_cslt": [3, "no rule"]},
    )

    assert "CUDA functions that are not there were called: cusolverDnCreate (libcusolver)." in report.notes
    assert "No values for aten::_cslt (3 calls): no rule" in report.notes


def test_libraries_whose_kernels_look_at_values_are_named():
    report = of(foreign_libraries=["libbitsandbytes_cuda130.so", "flash_attn.so"])

    said = "Kernels of libbitsandbytes_cuda130.so, flash_attn.so ran as nothing: their results are zeros or what was"
    assert any(note.startswith(said) for note in report.notes)
    assert not any("ran as nothing" in note for note in of(foreign_libraries=[]).notes)


def test_a_gpu_that_is_there_is_said_not_to_be_used(monkeypatch, tmp_path):
    monkeypatch.setattr("lowtide.pretending.outcome._GPU", tmp_path)
    said = "This machine has a GPU: the script did not see it."

    assert said in of().assumptions
    monkeypatch.setattr("lowtide.pretending.outcome._GPU", tmp_path / "none")
    assert said not in of().assumptions


def test_attention_that_a_real_gpu_gives_to_cudnn_is_said():
    said = "Attention ran as FlashAttention; a real one takes cuDNN's, whose workspaces differ by some MiB."

    assert said in of().assumptions and said in of(PretendSettings(device="h200")).assumptions
    assert said not in of(PretendSettings(device="a100")).assumptions
    assert said not in of(torch="2.9.1").assumptions


@pytest.mark.parametrize("op", ["aten._scaled_dot_product_flash_attention.default", "aten.mm.default"])
def test_a_step_without_attention_says_nothing_of_it(op):
    four = {"t": [1, 2, 64, 64], "stride": [8192, 4096, 64, 1], "dtype": "bfloat16", "device": "cuda"}
    signature = {"op": op, "args": [four, four, four], "kwargs": {}}
    record = {"entries": [], "signatures": [signature], "graphs": {}, "took_ns": 1000}
    found = of(step_record=({"host_ns": [1000], "tf32": False}, record)).assumptions

    assert any("FlashAttention" in line for line in found) == ("attention" in op)


def test_the_report_says_where_the_script_was_at_the_peak():
    forward = of(peak_at={"line": "train.py:12", "inner_line": "model.py:187", "is_backward": False})
    backward = of(peak_at={"line": "train.py:13", "inner_line": "train.py:13", "is_backward": True})

    for shown in (str(forward), page(forward)):
        assert "at train.py:12, inside it model.py:187" in shown
    for shown in (str(backward), page(backward)):
        assert "in the backward of train.py:13" in shown
    assert forward.to_json()["peak_at"]["line"] == "train.py:12"
    assert "at the peak\n" in str(of(peak_at=None)) and "at the peak\n" in str(
        of(peak_at={**backward.peak_at, "line": ""})
    )


def test_what_is_reserved_beyond_the_peak_is_a_line_of_its_own():
    report = of()

    assert report.unused_bytes == report.to_json()["unused_bytes"] == 2 * GIB
    assert "2.00 GiB        reserved beyond it" in str(report) and "reserved beyond it" in page(report)


def test_a_run_that_did_not_come_to_its_end_says_how_far_it_came():
    assert "it reached: import torch (0 s), forward (2 s)" in str(of(code=1))
    assert "it reached" not in str(of()) and "forward" in page(of())


def test_the_text_fits_a_terminal_and_lists_ten_stops_at_most():
    text = str(of(code=1, out_of_memory=[OUT], lowtide={"in_force": True, "planned_steps": 3, "reasons": []}))

    assert max(map(len, text.splitlines())) <= 100
    assert text.count("_local_scalar_dense") == 10
    assert "out of memory in step 2, at train.py:12" in text and "inside it: model.py:187" in text


def test_the_json_has_what_was_promised_and_is_plain():
    body = of().to_json()

    assert json.loads(json.dumps(body)) == json.loads(json.dumps(body, default=None))
    assert body["peak_by_step"][0] == {"allocated_bytes": 8 * GIB, "reserved_bytes": 12 * GIB}
    assert body["launches_per_step"] == 1706 and body["waits_per_step"] == 2 and body["lowtide"] is None


def test_the_page_is_well_formed_and_shows_every_kind():
    class Tags(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "line", "rect", "circle", "path", "br"):
                self.open.append(tag)

        def handle_endtag(self, tag):
            if tag not in ("line", "rect", "circle", "path"):
                assert self.open.pop() == tag

    made = page(of(code=1, out_of_memory=[OUT], lowtide={"in_force": True, "reasons": ["<b>"]}))
    parser = Tags()
    parser.feed(made)

    assert [tag for tag in parser.open if tag != "path"] == []
    assert all(f'class="kind {kind}"' in made for kind in KINDS)
    assert "<b>&lt;b&gt;" not in made and "&lt;b&gt;" in made
    assert of()._repr_html_().startswith("<div")


def test_a_module_has_its_name_and_how_many_there_are():
    rows = [{"module": "LlamaMLP", "name": "model.layers.*.mlp", "count": 32, "bytes": GIB},
            {"module": "Linear", "name": "lm_head", "count": 1, "bytes": GIB}]  # fmt: skip

    report = of(by_module=rows)

    for shown in (str(report), page(report)):
        assert "model.layers.*.mlp (LlamaMLP, 32 of them)" in shown and "lm_head (Linear)" in shown
    assert report.to_json()["by_module"] == rows or report.to_json()["by_module"] == tuple(rows)


def test_memory_that_the_script_pins_is_said():
    report = of(pinned_peak_bytes=3 * GIB)

    assert "3.00 GiB pinned by the script" in str(report).splitlines()[1] and "3.00 GiB" in page(report)
    assert "pinned" not in str(of())


def test_of_several_ranks_each_has_a_line():
    largest = of(PretendSettings(ranks=4, rank=2))
    ranks = (RankPeak(0, "fits", GIB, 2 * GIB, 12.5), RankPeak(2, "does not fit", 70 * GIB, 78 * GIB, None))

    report = replace(largest, by_rank=ranks)

    assert "rank 2 takes most of those that ran" in str(report) and "12.5 ms a step" in str(report)
    assert report.to_json()["by_rank"][1]["verdict"] == "does not fit" and "does not fit" in page(report)
