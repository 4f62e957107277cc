"""``lowtide pretend`` as it is typed."""

import json
from pathlib import Path

import pytest
from pretending.test_outcome import of

from lowtide import cli
from lowtide.pretending import calls


@pytest.fixture
def asked(monkeypatch):
    """What a command line asks for; nothing is run."""
    found = {}

    def run(command, settings, output=None, each=()):
        found.update(command=list(command), settings=settings)
        return of()

    monkeypatch.setattr(calls, "run_pretended", run)
    return found


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--device l4", "device", "l4"),
        ("--memory 40GiB", "memory_bytes", 40 * 2**30),
        ("--devices 4", "devices", 4),
        ("--ranks 64", "ranks", 64),
        ("--ranks 64 --rank 3", "rank", 3),
        ("--ranks-per-node 4", "ranks_per_node", 4),
        ("--steps 5", "steps", 5),
        ("--budget 20GiB", "budget", "20GiB"),
        ("--budget auto --host-budget 0", "host_budget", "0"),
        ("--values none", "values", "none"),
        ("--routing worst", "routing", "worst"),
        ("--torch 2.6.0", "torch", "2.6.0"),
        ("--no-weights", "no_weights", True),
        ("--no-history", "history", False),
        ("--no-time", "time", False),
        ("--tokens 4096", "tokens", 4096),
        ("--measured 10643tokens/s", "measured", "10643tokens/s"),
        ("--network 50", "network_gbit", 50.0),
        ("--clock", "clock", True),
        ("--snapshot run.pickle", "snapshot", Path("run.pickle")),
        ("--patience 2", "patience_s", 120.0),
    ],
)
def test_every_option_reaches_its_setting(asked, capsys, words, name, value):
    assert cli.main(["pretend", *words.split(), "--json", "--", "python", "train.py", "--steps", "9"]) == 0

    assert getattr(asked["settings"], name) == value
    assert asked["command"] == ["python", "train.py", "--steps", "9"]  # its own arguments stay its own
    assert json.loads(capsys.readouterr().out)["fits"]


@pytest.mark.parametrize("words", ["--budget banana", "--memory 40XB", "--torch 1.13.1", "--device h1000"])
def test_what_has_no_meaning_ends_in_one_sentence_and_with_two(asked, capsys, words):
    assert cli.main(["pretend", *words.split(), "--", "python", "train.py"]) == 2

    said = capsys.readouterr().err.strip()
    assert said.startswith("lowtide: ") and "Traceback" not in said and len(said.splitlines()) == 1
    assert not asked


def test_no_environment_is_made_for_a_pytorch_on_which_nothing_runs(capsys):
    assert cli.main(["pretend", "--prepare", "--torch", "1.13.1"]) == 2
    assert "scripts run on PyTorch from 2.0.1 on" in capsys.readouterr().err


def test_preparing_runs_no_command(capsys):
    assert cli.main(["pretend", "--prepare", "--", "python", "train.py"]) == 2
    assert "--prepare runs no command" in capsys.readouterr().err


def test_a_page_goes_into_a_folder_that_is_there(asked, capsys, tmp_path):
    assert cli.main(["pretend", "--report", str(tmp_path / "r.html"), "--", "python", "x.py"]) == 0
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert cli.main(["pretend", "--report", str(tmp_path / "no" / "r.html"), "--", "python", "x.py"]) == 2
