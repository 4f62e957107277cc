"""A budget reaches a training whose code stays as it is: by one variable, or ``lowtide run``."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lowtide import cli
from lowtide.attaching import variables
from lowtide.commands import run as run_verb

ROOT = Path(__file__).parents[2]
LOOP = """
import torch
torch.manual_seed(0)
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 2)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss = model(torch.randn(4, 32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item().hex())
"""
TRAINER = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
config = LlamaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=4)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 96, (16, 32))]
args = TrainingArguments(sys.argv[1], max_steps=3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
"""
LIGHTNING = """
import lightning, torch
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    def training_step(self, batch, i):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
trainer = lightning.Trainer(max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(96, 32), batch_size=32))
"""


@pytest.fixture
def started(tmp_path):
    """Run a script with these variables and lowtide's way into a process."""

    def start(source, *words, entry=True, code=0, **given):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(source))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("LOWTIDE_", "STANDIN_", "RANK"))}
        environment |= {"LOWTIDE_CACHE_DIR": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        folders = [str(variables.ENTRY)] if entry else []
        environment["PYTHONPATH"] = os.pathsep.join([*folders, str(ROOT / "src")])
        done = subprocess.run(
            [sys.executable, *words, str(path), str(tmp_path)], text=True, capture_output=True,
            env={**environment, **given}, timeout=300,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        done.lines = [line for line in done.stderr.splitlines() if line.startswith("lowtide: ")]
        return done

    return start


def test_a_loop_is_attached_to_and_told_in_one_line_with_the_same_numbers(started):
    plain = started(LOOP)
    ours = started(LOOP, LOWTIDE_BUDGET="1GiB")

    assert ours.stdout == plain.stdout and not plain.lines
    first, *_, last = ours.lines
    assert first.startswith(
        "lowtide: LOWTIDE_BUDGET=1GiB is attached to TransformerEncoder, the first module called in training ("
    )
    assert first.endswith(" of parameters, stepped by AdamW).")
    assert "of 4 steps ran under a plan" in last and "budget: 1.00 GiB" in last


def test_nothing_of_it_is_loaded_without_the_variable(started):
    source = """
    import sys, torch
    print(sorted(name for name in sys.modules if name.startswith("lowtide") and name != "lowtide"))
    print(torch.nn.Module.__call__.__qualname__, torch.optim.Optimizer.__init__.__qualname__)
    print(any(type(finder).__module__.startswith("lowtide.") for finder in sys.meta_path))
    """
    loaded, patched, finder = started(source).stdout.splitlines()
    assert loaded == str([f"lowtide.attaching{part}" for part in ("", ".entering", ".imports", ".variables")])
    assert (patched, finder) == ("Module._wrapped_call_impl Optimizer.__init__", "False")


@pytest.mark.thorough
def test_calls_of_modules_are_pytorchs_own_once_it_is_attached(started):
    ours = started(LOOP + "print(torch.nn.Module.__call__.__qualname__)", LOWTIDE_BUDGET="1GiB")
    assert ours.stdout.splitlines()[-1] == "Module._wrapped_call_impl"


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ("1KiB", "BudgetInfeasibleError: no plan fits budget=1.00 KiB: the model's parameters"),
        ("20Gob", "ValueError: budget='20Gob': 'Gob' is not a unit of memory."),
    ],
)
def test_a_budget_that_cannot_be_ends_the_program_by_name(started, budget, told):
    done = started(LOOP, LOWTIDE_BUDGET=budget, code=1)
    assert told in done.stderr and not done.stdout
    assert f"(lowtide was asked for by LOWTIDE_BUDGET={budget}; without it the program runs.)" in done.stderr


@pytest.mark.thorough
def test_the_transformers_trainer_gets_its_callback(started):
    train = TRAINER + "Trainer(LlamaForCausalLM(config), args, train_dataset=data).train()"
    done = started(train, LOWTIDE_BUDGET="1GiB")
    assert done.lines[0] == "lowtide: LOWTIDE_BUDGET=1GiB is attached to transformers' Trainer of LlamaForCausalLM."
    assert "of 3 steps ran under a plan: budget 1.00 GiB" in done.stderr
    assert "lowtide_budget_bytes" in done.stdout


@pytest.mark.thorough
def test_a_trainer_with_a_callback_of_its_own_keeps_that_one(started):
    source = (
        TRAINER
        + """
from lowtide.integrations.transformers import LowtideCallback
callback = LowtideCallback("2GiB")
Trainer(LlamaForCausalLM(config), args, train_dataset=data, callbacks=[callback]).train()
print(callback.fit.status().budget_bytes >> 30, callback.fit.status().steps)
"""
    )
    done = started(source, LOWTIDE_BUDGET="1GiB")
    assert done.lines[0] == (
        "lowtide: LOWTIDE_BUDGET=1GiB is not used: the script's LowtideCallback has a budget of its own, which holds."
    )
    assert done.stdout.splitlines()[-1] == "2 3"


@pytest.mark.thorough
def test_a_library_of_an_untried_version_is_left_alone_and_its_model_attached_to(started):
    source = (
        """
from lowtide.integrations import versions
versions.SUPPORTED["transformers"] = ("7", "8")
"""
        + TRAINER
        + "Trainer(LlamaForCausalLM(config), args, train_dataset=data).train()"
    )
    done = started(source, LOWTIDE_BUDGET="1GiB")
    assert (
        "was never tried: lowtide's seams are those of 7 up to, not including, 8: it is attached to the module"
        in (done.lines[0])
    )
    assert "is attached to LlamaForCausalLM, the first module called in training" in done.lines[1]
    assert "of 3 steps ran under a plan" in done.lines[-1]


@pytest.mark.thorough
def test_a_trl_of_an_untried_version_is_left_alone_and_its_model_attached_to(started):
    """Its configuration is enough: transformers' Trainer below it would refuse the version and end the program."""
    pytest.importorskip("trl")
    source = (
        """
from lowtide.integrations import versions
versions.SUPPORTED["trl"] = ("7", "8")
"""
        + TRAINER.replace("TrainingArguments(sys", "SFTConfig(sys")
        + "Trainer(LlamaForCausalLM(config), args, train_dataset=data).train()"
    ).replace("import sys, torch", "import sys, torch\nfrom trl import SFTConfig")
    source = source.replace("use_cpu=True", "use_cpu=True, bf16=False, gradient_checkpointing=False")
    done = started(source, LOWTIDE_BUDGET="1GiB")
    assert done.lines[0].startswith("lowtide: trl ") and "never tried" in done.lines[0]
    assert "is attached to LlamaForCausalLM, the first module called in training" in done.lines[1]
    assert "of 3 steps ran under a plan" in done.lines[-1]


@pytest.mark.thorough
def test_lightnings_trainer_gets_its_callback(started):
    pytest.importorskip("lightning")
    done = started(LIGHTNING, LOWTIDE_BUDGET="1GiB")
    assert done.lines[0] == "lowtide: LOWTIDE_BUDGET=1GiB is attached to Lightning's Trainer."
    assert "of 3 steps ran under a plan" in done.stderr


@pytest.mark.thorough
def test_a_script_that_fits_its_model_itself_keeps_that_budget(started):
    source = LOOP.replace("for _", "import lowtide\nfit = lowtide.fit(model, budget='2GiB')\nfor _")
    done = started(source + "print(fit.status().budget_bytes >> 30)", LOWTIDE_BUDGET="1GiB")
    assert done.stdout.splitlines()[-1] == "2"
    assert done.lines[0] == (
        "lowtide: LOWTIDE_BUDGET=1GiB is not used: lowtide in the script's own code has a budget of its own, which "
        "holds."
    )


@pytest.mark.thorough
def test_what_the_optimizer_trains_beside_the_module_is_told(started):
    source = """
    import torch
    body, head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 256)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    head(body(torch.randn(4, 64))).sum().backward()
    """
    first = started(source, LOWTIDE_BUDGET="1GiB").lines[0]
    assert (
        "; 65.00 KiB of parameters that the optimizer trains are not in it, and their steps are not planned." in first
    )


@pytest.mark.thorough
def test_ten_steps_of_an_optimizer_with_nothing_attached_are_told(started):
    source = """
    import torch
    weight = torch.nn.Parameter(torch.randn(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(12):
        weight.square().sum().backward()
        optimizer.step()
    """
    assert started(source, LOWTIDE_BUDGET="1GiB").lines == [
        "lowtide: 10 steps of an optimizer, and nothing is attached: no module was called in training whose parameters "
        "an optimizer holds."
    ]


@pytest.mark.thorough
def test_a_program_that_spawns_workers_is_attached_to_once(started):
    source = """
    import torch
    from torch.utils.data import DataLoader
    def main():
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(torch.randn(8, 8), batch_size=4, num_workers=2, multiprocessing_context="spawn"):
            model(batch).sum().backward()
            optimizer.step()
    if __name__ == "__main__":
        main()
    """
    done = started(source, LOWTIDE_BUDGET="1GiB")
    assert sum("is attached to" in line for line in done.lines) == 1
    assert sum("steps ran under a plan" in line for line in done.lines) == 1


@pytest.mark.thorough
def test_every_rank_has_the_budget_and_one_speaks(started):
    source = LOOP.replace("optimizer =", """
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer =""") + """
from lowtide.attaching import attachment
print("steps", attachment.current.find_fit().status().steps)
torch.distributed.destroy_process_group()
"""  # fmt: skip
    done = started(source, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                   LOWTIDE_BUDGET="1GiB")  # fmt: skip
    assert done.stdout.count("steps 4") == 2
    assert sum("is attached to DistributedDataParallel" in line for line in done.lines) == 1
    assert sum("steps ran under a plan" in line for line in done.lines) == 1


@pytest.mark.thorough
def test_an_excess_ends_the_program_where_that_was_asked_for(started):
    from lowtide.units import parse_budget

    parameters = 2 * (4 * 64 * 64 + 4 * 64 + 2 * 64 * 256 + 256 + 64 + 4 * 64) * 4
    budget = parameters + parse_budget("512KiB")
    done = started(LOOP, LOWTIDE_BUDGET=str(budget), LOWTIDE_ON_EXCESS="raise", code=1)
    assert "lowtide.errors.BudgetExceededError: a step that ran online took " in done.stderr


# -- lowtide run ----------------------------------------------------------------------------------------------


def run(monkeypatch, *words):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.delenv("LOWTIDE_BUDGET", raising=False)
    return cli.main(["run", *words])


def test_run_attaches_and_says_what_came_of_it_in_json_and_a_page(tmp_path, monkeypatch, capfd):
    script, page = tmp_path / "train.py", tmp_path / "plan.html"
    script.write_text(
        LOOP.replace("    optimizer.zero", "    time.sleep(1)\n    optimizer.zero").replace("import", "import time,", 1)
    )
    code = run(monkeypatch, "--budget", "1GiB", "--report", str(page), "--json", "--", sys.executable, str(script))
    printed = capfd.readouterr()
    body = json.loads(printed.out)
    assert code == 0, printed.err
    assert (body["status"], body["exit_code"]) == ("ok", 0)
    assert body["attached_to"].startswith("TransformerEncoder, the first module called in training")
    assert body["lowtide"]["steps"] == 4 and body["lowtide"]["budget_bytes"] == 2**30
    assert "peak" in page.read_text()


@pytest.mark.thorough
def test_the_commands_exit_code_is_run_s_own(tmp_path, monkeypatch, capfd):
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(7)")
    assert run(monkeypatch, "--budget", "1GiB", "--", sys.executable, str(script)) == 7
    assert "nothing was attached" not in capfd.readouterr().err


def test_a_command_that_trains_nothing_is_a_finding(tmp_path, monkeypatch, capfd):
    script = tmp_path / "train.py"
    script.write_text("import torch")
    assert run(monkeypatch, "--budget", "1GiB", "--", sys.executable, str(script)) == 1
    assert capfd.readouterr().err == (
        "lowtide: nothing was attached: no process of the command trained a module with an optimizer of torch.optim.\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--budget", "1GiB"], "there is no command. Write it after two dashes: lowtide run --budget 20GiB -- python"),
        (["--", "python", "x.py"], "there is no budget. Write one: lowtide run --budget 20GiB -- ..."),
        (["--budget", "20Gob", "--", "python"], "'Gob' is not a unit of memory"),
        (["--budget", "1GiB", "--", "no-such-program"], "'no-such-program' is no program on the path"),
        (["--enable", "--", "python"], "--enable and --disable stand alone"),
    ],
)
def test_bad_usage_is_refused_before_anything_runs(words, told, monkeypatch, capsys):
    assert run(monkeypatch, *words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.thorough
def test_enable_has_the_variable_work_in_an_environment_and_disable_undoes_it(tmp_path, monkeypatch, capsys, started):
    monkeypatch.setattr(run_verb.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    assert run(monkeypatch, "--enable") == 0
    (hook,) = tmp_path.glob("*.pth")
    enabled = f"import site; site.addsitedir({str(tmp_path)!r})\n" + LOOP
    assert "is attached to TransformerEncoder" in started(enabled, entry=False, LOWTIDE_BUDGET="1GiB").stderr
    assert not started(enabled, entry=False).lines
    assert run(monkeypatch, "--disable") == 0
    assert not hook.exists() and "does nothing by itself now" in capsys.readouterr().out


@pytest.mark.thorough
def test_what_follows_an_excess_reaches_the_process(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, lowtide.attaching.attachment as a\n"
        "model = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(model.parameters())\n"
        "model(torch.randn(4, 8)).sum().backward()\n"
        "print(a.current.options['on_excess'])\n"
    )
    for words, told in (([], "warn"), (["--on-excess", "raise"], "raise")):
        assert cli.main(["run", "--budget", "1GiB", *words, "--", sys.executable, str(script)]) == 0
        assert capfd.readouterr().out.splitlines()[-1] == told
