"""The wheel alone, without the checkout, runs the README's example; the source archive builds the same wheel."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import lowtide

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "src")

pytestmark = pytest.mark.slow


def run(*command: str | Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", into, source)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the package is built from: building writes beside it."""
    copy = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment that holds the wheel and sees the packages installed here.

    A directory that a .pth file names joins sys.path, but its own .pth files are not read: the editable lowtide among
    these packages stays invisible.
    """
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place)
    python = place / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_alone_runs_the_readmes_example(python, tmp_path):
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    script = tmp_path / "example.py"
    script.write_text(f"{block}\nprint(lowtide.__file__)\n")

    *printed, place = run(python, script).splitlines()

    assert expected and printed == expected
    assert Path(place).is_relative_to(python.parents[1])


def test_the_installed_command_and_version_are_those_of_the_source(python):
    asked = "from importlib.metadata import version; print(version('lowtide'))"

    assert run(python, "-c", asked).strip() == lowtide.__version__
    assert "fit" in run(python.parent / "lowtide", "--help")


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    package = ROOT / "src"
    there = {p.relative_to(package).as_posix() for p in (package / "lowtide").rglob("*") if p.is_file()}
    there = {name for name in there if "__pycache__" not in name}

    assert {name for name in files(wheel) if ".dist-info/" not in name} == there
    assert {"lowtide/py.typed", "lowtide/__init__.pyi"} <= there


def test_the_source_archive_builds_the_same_wheel(source, wheel, tmp_path):
    archive = build("sdist", source, tmp_path / "archive")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()

    assert files(build("wheel", unpacked, tmp_path / "again")) == files(wheel)
