"""What a look leaves behind, what it says where it cannot look, and how it is asked."""

import functools
import json
import os
import random
import subprocess
import sys

import numpy
import pytest
import torch
from support.compiled_layers import IDS, decoder, equal, reference, step_of
from support.sick_setups import ROWS, Case, Jitter, Recorder, Stack, batch_norm, jitter, mlp, plain
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import checkpoint as torch_checkpoint

import lowtide
from lowtide.cli import main
from lowtide.doctor.registry import all_checks
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.doctor.value_proof import prove
from lowtide.errors import StepError
from lowtide.integrations.pytest_doctor import assert_healthy


def state_of(model):
    tensors = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    generators = [m.generator.get_state() for m in model.modules() if isinstance(m, Jitter)]
    return tensors, [torch.get_rng_state(), *generators], (random.getstate(), repr(numpy.random.get_state()))


@pytest.mark.parametrize("case", [lambda: batch_norm(True), lambda: jitter("own"), lambda: Case(Recorder(False))])
def test_a_look_leaves_everything_as_it_was(case):
    case = case()
    case.model(ROWS).square().mean().backward()
    gradients = [p.grad for p in case.model.parameters()]
    copies = [g.clone() for g in gradients]
    outputs = list(getattr(case.model, "outputs", []))
    seam = torch_checkpoint._checkpoint_without_reentrant_generator, torch_checkpoint.CheckpointFunction
    hooks = len(torch_module._global_forward_hooks), len(torch_module._global_forward_pre_hooks)
    before = state_of(case.model)

    assert lowtide.diagnose(case.model, case.batch)

    after = state_of(case.model)
    assert all(torch.equal(before[0][n], after[0][n]) for n in before[0])
    assert all(map(torch.equal, before[1], after[1])) and before[2] == after[2]
    assert all(p.grad is g for p, g in zip(case.model.parameters(), gradients))
    assert all(map(torch.equal, gradients, copies))
    assert getattr(case.model, "outputs", []) == outputs
    assert seam == (torch_checkpoint._checkpoint_without_reentrant_generator, torch_checkpoint.CheckpointFunction)
    assert hooks == (len(torch_module._global_forward_hooks), len(torch_module._global_forward_pre_hooks))


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread", "compile_plans")
def test_a_model_of_lowtide_compile_is_looked_at_as_it_runs_and_keeps_its_plan():
    torch._dynamo.reset()
    model = decoder(layers=2)
    compiled = lowtide.compile(model, budget="60%")
    step_of(compiled, model)
    (found,) = lowtide.diagnose(model, IDS, lambda model, ids: model(ids), only=["LT303"])
    assert found.evidence.startswith("0 of 1 steps ran under a plan; the last one did not: the last step was watched")
    assert found.gain == "not measured: lowtide.compile plans from steps that it has watched"
    step_of(compiled, model)
    for given in (model, compiled):
        diagnosis = lowtide.diagnose(given, IDS, lambda model, ids: model(ids))
        assert not diagnosis and len(diagnosis.checked) == len(all_checks()), diagnosis.notes
    expected = step_of(compiled, model)
    status = compiled.status()
    assert (status.steps, status.planned_steps, status.in_force, compiled.reason) == (3, 2, True, "")
    assert equal(expected, reference(layers=2))
    with pytest.raises(lowtide.LowtideError, match="is already fitted"):
        lowtide.fit(compiled, budget="60%")
    compiled.remove()


def test_compiled_code_runs_compiled_after_a_look():
    """PyTorch 2.13 leaves code alone for good that it met under a dispatch mode."""
    torch._dynamo.reset()
    runs = []

    def backend(graph, inputs):
        def run(*args):
            runs.append(1)
            return graph(*args)

        return run

    model = decoder(layers=1)
    model.blocks[0].compile(backend=backend)
    lowtide.diagnose(model, IDS, lambda model, ids: model(ids))
    runs.clear()
    model(IDS).backward()
    assert runs


def test_the_proof_names_the_first_operator_that_gave_other_bits_and_its_line():
    case = jitter("python")

    proof = prove(StepUnderTest(case.model, case.batch))

    assert not proof.equal and proof.distance > 1e-3
    assert proof.divergence.call.path == "layers.0"
    assert proof.divergence.before.name == "aten::mul"
    assert proof.divergence.before.line.startswith("sick_setups.py:")


def from_a_library(source):
    made = {"nn": nn}
    exec(compile(source, "/lib/site-packages/library.py", "exec"), made)
    return made


def test_what_outlives_a_step_is_named_by_the_users_line_and_not_by_the_librarys():
    double, kept = from_a_library("def double(x):\n    return x * 2")["double"], []

    def step(model, rows):
        out = model(rows)
        kept.append(double(out).detach())
        return out.mean()

    (found,) = lowtide.diagnose(nn.Linear(64, 64), ROWS, step, only=["LT207"])

    assert f"made at test_diagnosis.py:{step.__code__.co_firstlineno + 2}" in found.evidence


def test_what_a_library_keeps_by_itself_is_named_by_its_own_line():
    source = """
class Keeps(nn.Linear):
    kept = []
    def forward(self, x):
        self.kept.append(x.detach() * 2)
        return super().forward(x)
"""
    model = from_a_library(source)["Keeps"](64, 64)

    (found,) = lowtide.diagnose(model, ROWS, only=["LT207"])

    assert "made at library.py:5" in found.evidence  # not the line above, which calls the doctor


def test_the_proof_of_a_healthy_step_is_equal_to_the_last_bit():
    case = Case(Stack(lambda: mlp(0.3)))

    proof = prove(StepUnderTest(case.model, case.batch))

    assert proof.equal and proof.distance == 0 and proof.divergence is None


class Clock(nn.Module):
    """Differs from run to run: its random numbers come from outside of what can be put back."""

    numbers = numpy.random.default_rng(0)

    def __init__(self, by=1.0):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x * (1 + self.by * float(self.numbers.random()))


def test_a_step_that_differs_by_itself_is_told_and_not_reported():
    found = lowtide.diagnose(Stack(lambda: nn.Sequential(mlp(), Clock())), ROWS)

    assert "LT001" not in found.codes and "LT004" not in found.codes
    assert any("differs from run to run" in note for note in found.notes)


@pytest.mark.parametrize("preserve", [True, False])
def test_small_noise_from_run_to_run_is_no_finding_and_hides_none(preserve):
    how = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False, preserve_rng_state=preserve)
    model = Stack(lambda: nn.Sequential(mlp(0.2), Clock(1e-5)), how)

    found = lowtide.diagnose(model, ROWS, only=["LT001", "LT003"])

    assert found.codes == (() if preserve else ("LT001", "LT003")) and not found.notes


def test_an_error_of_a_check_is_a_note(monkeypatch):
    check, _ = all_checks()["LT101"]
    broken = {"LT101": (check, lambda setup: 1 / 0)}
    monkeypatch.setattr("lowtide.doctor.diagnosis.checks_named", lambda only, skip: broken)

    found = lowtide.diagnose(nn.Linear(64, 64), ROWS)

    assert not found and found.notes == ("LT101: ZeroDivisionError: division by zero",)


def test_a_step_that_fails_anyway_is_the_users_error():
    with pytest.raises(StepError, match="the step failed on this batch"):
        lowtide.diagnose(nn.Linear(3, 3), ROWS)


def test_an_unknown_code_is_refused():
    with pytest.raises(ValueError, match="there is no check 'LT999'"):
        lowtide.diagnose(nn.Linear(64, 64), ROWS, only=["LT999"])


RANKS = """
import os, torch
from torch.nn.parallel import DistributedDataParallel
from support.sick_setups import batch_norm

def setup():
    torch.distributed.init_process_group("gloo", rank=int(os.environ["R"]), world_size=2)
    case = batch_norm(True)
    return DistributedDataParallel(case.model), case.batch
"""
SCRIPT = """
from support.sick_setups import batch_norm, llama, TOKENS

def sick():
    case = batch_norm(True)
    return case.model, case.batch

def healthy():
    return llama(), TOKENS
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_command_line_exits_with_1_where_numbers_are_wrong(script, capsys):
    assert main(["doctor", f"{script}:sick", "--json"]) == 1

    body = json.loads(capsys.readouterr().out)
    assert body["status"] == "finding" and body["findings"][0]["code"] == "LT002"


def test_the_command_line_exits_with_0_where_nothing_is(script, capsys):
    assert main(["doctor", f"{script}:healthy", "--only", "lt001,LT101"]) == 0
    assert capsys.readouterr().out.startswith("0 findings; 2 checks looked")


def test_the_command_line_prints_changed_settings(script, capsys):
    assert main(["doctor", f"{script}:sick", "--only", "LT002", "--fix"]) == 1
    assert "changed settings:\n# LT002" in capsys.readouterr().out


def test_the_command_line_refuses_an_unknown_code_before_the_script_runs(tmp_path, capsys):
    assert main(["doctor", f"{tmp_path}/none.py:setup", "--only", "LT999"]) == 2
    assert "there is no check 'LT999'" in capsys.readouterr().err


def test_the_command_line_leaves_out_what_is_skipped(script, capsys):
    assert main(["doctor", f"{script}:sick", "--only", "LT002,LT101", "--skip", "lt002"]) == 0
    assert capsys.readouterr().out.startswith("0 findings; 1 check looked")


def test_the_command_line_exits_with_2_where_there_is_no_such_function(script, capsys):
    assert main(["doctor", f"{script}:absent"]) == 2
    assert "absent" in capsys.readouterr().err


def test_the_printed_page_fits_a_terminal_and_keeps_names_whole():
    case = jitter("python")

    page = str(lowtide.diagnose(case.model, case.batch, only=["LT001", "LT004"]))

    assert max(map(len, page.splitlines())) <= 100 and "gradient-checkpointing#35" in page


@pytest.mark.parametrize("options", [[], ["--json"], ["--fix"]], ids=str)
def test_the_command_line_is_silent_on_other_ranks(options, script, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")

    assert main(["doctor", f"{script}:sick", "--only", "LT002", *options]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_of_two_ranks_one_speaks(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(RANKS)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29_600 + os.getpid() % 300),
    }  # fmt: skip
    command = [sys.executable, "-m", "lowtide.cli", "doctor", f"{path}:setup", "--only", "LT002", "--json"]

    ranks = [subprocess.Popen(command, env=environment | {"R": str(r)}, stdout=subprocess.PIPE) for r in range(2)]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [1, 1]
    assert json.loads(outputs[0])["findings"][0]["code"] == "LT002" and outputs[1] == b""


def test_a_test_of_a_users_own_fails_with_the_diagnosis():
    assert_healthy(Stack(mlp, plain), ROWS)
    case = batch_norm(True)

    with pytest.raises(AssertionError, match="WRONG LT002"):
        assert_healthy(case.model, case.batch)
