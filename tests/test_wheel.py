"""The wheel alone, without the checkout and with no more packages than it asks for, runs the README's example, every
verb and the demo; the source archive builds the same wheel."""

import doctest
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lowtide

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "src")

pytestmark = pytest.mark.slow


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(*command: str | Path) -> str:
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=600)
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


def needed(requirement: str) -> dict[str, Distribution]:
    """The installed packages that pip would bring for ``requirement``, by name."""
    found: dict[str, Distribution] = {}
    asked, todo = set(), [Requirement(requirement)]
    while todo:
        wanted = todo.pop()
        if str(wanted) in asked:
            continue
        asked.add(str(wanted))
        found[wanted.name] = package = distribution(wanted.name)
        for text in package.requires or ():
            further = Requirement(text)
            extras = wanted.extras or {""}
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(further)
    return found


def environment(place: Path, wheel: Path, requirement: str) -> Path:
    """The interpreter of an environment with the wheel, and of the packages installed here those it asks for."""
    run(sys.executable, "-m", "venv", "--without-pip", place)
    python = place / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (packages,) = place.glob("lib/python*/site-packages")
    others = needed(requirement)
    assert others.pop("lowtide") is not None
    for package in others.values():
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():  # several packages may share a folder
                (packages / top).symlink_to(Path(str(package.locate_file(top))))
    return python


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("core"), wheel, "lowtide")


@pytest.fixture(scope="module")
def demo_python(wheel, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("demo"), wheel, "lowtide[demo]")


def files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_alone_runs_the_readmes_example(python, tmp_path):
    readme = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    expected = "".join(f"{line}\n" for line in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE))
    assert expected
    script = tmp_path / "example.py"
    script.write_text(f"{block}\nprint(lowtide.__file__)\n")

    printed, _, place = run(python, script).rstrip().rpartition("\n")

    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, f"{printed}\n", flags), printed
    assert Path(place).is_relative_to(python.parents[1])


def test_no_other_package_is_there(python, demo_python):
    asked = "import importlib.util as u; print([bool(u.find_spec(n)) for n in ('torch', 'transformers', 'matplotlib')])"

    assert run(python, "-c", asked).strip() == "[True, False, False]"
    assert run(demo_python, "-c", asked).strip() == "[True, True, False]"


def test_the_installed_command_and_version_are_those_of_the_source(python):
    asked = "from importlib.metadata import version; print(version('lowtide'))"

    assert run(python, "-c", asked).strip() == lowtide.__version__
    assert run(python.parent / "lowtide", "--version") == f"lowtide {lowtide.__version__}\n"


def test_every_verb_has_its_help(python):
    verbs = re.findall(r"^    ([a-z]+) ", run(python.parent / "lowtide", "--help"), re.MULTILINE)

    assert {"demo", "fit", "plan", "doctor"} <= set(verbs)
    for verb in verbs:
        assert f"lowtide {verb} " in run(python.parent / "lowtide", verb, "--help")


MODEL = ("--model", "llama-2-7b", "--device", "h100")


@pytest.mark.parametrize(
    ("verb", "extra"),
    [
        (("demo", "--quick"), "demo"),
        (("plan", *MODEL), "transformers"),
        (("advise", *MODEL, "--gpus", "8", "--global-batch", "64"), "transformers"),
        (("kv", *MODEL, "--batch-size", "2", "--seq-len", "2048"), "transformers"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_an_extra_brings_is_asked_for_by_name(python, verb, extra):
    done = subprocess.run([python.parent / "lowtide", *verb], env=clean(), capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (2, "")
    assert f"pip install 'lowtide[{extra}]'" in done.stderr and "Traceback" not in done.stderr


SCRIPT = """
import torch


def setup():
    layers = [m for _ in range(4) for m in (torch.nn.Linear(32, 32), torch.nn.GELU())]
    return torch.nn.Sequential(*layers), torch.randn(64, 32)
"""


@pytest.mark.parametrize(
    "verb",
    [("fit", "--budget", "60%", "--verify", "--html", "fit.html"), ("bench",), ("doctor",)],
    ids=lambda verb: verb[0],
)
def test_a_verb_runs_a_script_without_any_extra(python, verb, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    name, *options = verb
    command = [python.parent / "lowtide", name, "train.py:setup", *options, "--json"]
    done = subprocess.run(command, env=clean(), cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "ok"


def test_the_demo_runs_with_its_extra(demo_python):
    body = json.loads(run(demo_python.parent / "lowtide", "demo", "--quick", "--json"))

    assert body["status"] == "ok" and body["bitwise_equal"]
    assert len(body["cases"]) == 1  # the other case's weights come without an extra


def test_importing_lowtide_takes_no_other_package(python):
    asked = (
        "import sys, lowtide.cli; print(sorted({'torch', 'numpy', 'rich', 'highspy', 'psutil'} & sys.modules.keys()))"
    )

    assert run(python, "-c", asked).strip() == "[]"


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


def test_a_wheel_with_the_c_plus_plus_built_needs_no_compiler(source, tmp_path, monkeypatch):
    unpacked = tmp_path / "source"
    shutil.copytree(source, unpacked)
    monkeypatch.setenv("LOWTIDE_BUILT_FOR", sys.executable)
    built = build("wheel", unpacked, tmp_path / "built")
    monkeypatch.delenv("LOWTIDE_BUILT_FOR")
    interpreter = environment(tmp_path / "there", built, "lowtide")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))

    assert built.stem.startswith("lowtide-") and "-py3-none-" in built.stem and not built.stem.endswith("-any")
    asked = "from lowtide.device import allocation_counter as c, planned_ops as o; c.prepare(); o.prepare(); "
    assert run(interpreter, "-c", asked + "print(c.is_there(), o.is_there(), c.why_missing())").strip() == "True True"
    assert not any("/built/" in name for name in files(build("wheel", unpacked, tmp_path / "plain")))  # none left over
