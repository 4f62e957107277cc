"""What is refused before anything runs, each with its way out."""

import sys
from pathlib import Path

import pytest

from lowtide.estimation.device_table import UnknownDeviceError, device_named
from lowtide.pretending import environments
from lowtide.pretending.command_run import resolved
from lowtide.pretending.environments import EnvironmentMissingError, ScriptEnvironment
from lowtide.pretending.settings import PretendError, PretendSettings, amount
from lowtide.pretending.standin_package import standin_gpus

HERE = ScriptEnvironment(Path(sys.executable), "2.14.1")


def test_every_gpu_of_the_stand_in_is_in_lowtides_table():
    assert all(device_named(name).kind == "cuda" for name in standin_gpus())


def test_a_device_may_have_any_spelling_that_the_table_knows():
    assert PretendSettings("NVIDIA H100").facts.name == "h100"
    assert PretendSettings("a100").facts.name == "a100-80gb"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "mi300x"}, "only be run on NVIDIA GPUs whose properties are known"),
        ({"memory_bytes": 0}, "memory_bytes=0 is not positive"),
        ({"ranks": 0}, "ranks=0 is not positive"),
        ({"ranks": 8, "rank": 8}, "ranks go from 0 to 7"),
        ({"steps": -1}, "steps=-1 is negative"),
        ({"values": "some"}, "pass 'small', 'all' or 'none'"),
        ({"routing": "good"}, "pass 'balanced' or 'worst'"),
        ({"torch": "2.6"}, "not a version"),
        ({"torch": "1.13.1"}, "scripts run on PyTorch from 2.0.1 on"),
        ({"patience_s": 0}, "not positive"),
        ({"budget": "3 apples"}, "not a unit of memory"),
        ({"budget": "banana"}, "not an amount of memory"),
        ({"budget": "500%"}, "more activation memory than the plain step's"),
    ],
)
def test_settings_without_a_meaning_are_refused(options, says):
    with pytest.raises(PretendError, match=says):
        PretendSettings(**options)


def test_an_unknown_device_has_its_nearest_names():
    with pytest.raises(UnknownDeviceError, match="Nearest: h100"):
        PretendSettings("h101")


def test_steps_are_three_and_six_where_lowtide_watches_before_it_plans():
    assert PretendSettings().last_step == 3
    assert PretendSettings(budget="auto").last_step == 6
    assert PretendSettings(steps=0, budget="auto").last_step == 0


def test_amounts_are_bytes():
    assert amount("40GiB", "memory") == 40 * 2**30 and amount("1000", "memory") == 1000
    for wrong in ("40%", "auto", "much", "40XB", "-3GiB"):
        with pytest.raises(PretendError, match='memory=.* Write "40GiB", "40GB" or bytes'):
            amount(wrong, "memory")


def test_a_pytorch_without_cuda_is_refused_with_the_command_that_brings_one(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "own_torch", lambda: ("2.13.0", None))
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))

    with pytest.raises(EnvironmentMissingError, match=r"2\.13\.0 is here as a build without CUDA.* --prepare$"):
        environments.find()
    with pytest.raises(EnvironmentMissingError, match=r"2\.6\.0 is not here.* --prepare --torch 2\.6\.0$"):
        environments.find("2.6.0")


def test_an_environment_that_was_made_is_found_and_sees_the_packages_of_here(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "own_torch", lambda: ("2.13.0", None))
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    folder = environments.folder_for("2.6.0")
    folder.mkdir(parents=True)
    (folder / "ready").touch()

    found = environments.find("2.6.0")
    variables = environments.entering({"PATH": "/bin", "PYTHONPATH": "/mine"}, found)

    assert found.python == folder / "bin" / "python" and found.packages == environments.own_packages()
    entry, *rest = variables["PYTHONPATH"].split(":")
    assert Path(entry, "sitecustomize.py").is_file() and rest == ["/mine"]
    assert variables["PATH"] == f"{folder / 'bin'}:/bin"


def test_a_pytorch_with_cuda_that_is_here_is_used_as_it_is(monkeypatch):
    monkeypatch.setattr(environments, "own_torch", lambda: ("2.14.1", "13.0"))

    assert environments.find() == ScriptEnvironment(Path(sys.executable), "2.14.1")
    assert environments.find("2.14.1").packages == ()


def test_a_command_is_run_by_the_environments_python(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    other = tmp_path / "tool"
    other.write_text("#!/other/bin/python3.11\n")
    other.chmod(0o755)

    assert resolved(["python", "x.py", "-v"], HERE) == [sys.executable, "x.py", "-v"]
    assert resolved(["python3", "-m", "x"], HERE)[0] == sys.executable
    assert resolved([str(script), "1"], HERE) == [sys.executable, str(script), "1"]
    assert resolved([str(other), "a"], HERE) == [sys.executable, str(other), "a"]  # of another environment's Python
    assert resolved(["sh", "-c", "true"], HERE)[0].endswith("/sh")


def test_a_command_that_is_not_there_is_refused():
    with pytest.raises(PretendError, match="there is no command"):
        resolved([], HERE)
    with pytest.raises(PretendError, match="'no-such-thing' is no program"):
        resolved(["no-such-thing"], HERE)
