"""The library is built once for each state of its sources, and its lack of a compiler has a name."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accelerator import build

pytestmark = pytest.mark.accelerator  # beside the tests of what it builds


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A compiler that writes down that it was called; the number of calls."""
    log, fake = tmp_path / "calls", tmp_path / "fake-g++"
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho >> {log}\nsleep 0.1\n'
        'while [ "$1" != -o ]; do shift; done\necho built > $2\n'
    )
    fake.chmod(0o755)
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "standin.cpp").write_text("int one;")
    monkeypatch.setattr(build, "_SOURCES", sources)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("LOWTIDE_TEST_CACHE_DIR", str(tmp_path / "cache"))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def test_it_is_built_once_also_by_two_at_a_time(compiler):
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(lambda _: build.library(), range(2))

    assert first == second and first.read_text() == "built\n"
    assert compiler() == 1


def test_it_is_built_again_when_a_source_changes(compiler):
    first = build.library()
    (build._SOURCES / "standin.cpp").write_text("int two;")

    assert build.library() != first
    assert compiler() == 2


def test_without_a_compiler_there_is_a_named_error(compiler, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.NoCompilerError, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        build.library()


def test_an_error_of_the_compiler_is_told_and_nothing_is_left(compiler, monkeypatch, tmp_path):
    (tmp_path / "fake-g++").write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "bad line" >&2\nexit 1\n')
    with pytest.raises(RuntimeError, match="does not build:\nbad line"):
        build.library()
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["lock"]


@pytest.mark.parametrize(
    "where, options, told",
    [
        pytest.param({}, [], "SKIPPED", marks=pytest.mark.thorough),
        ({"CI": "true"}, [], "NoCompilerError"),
        pytest.param(
            {}, ["--device", "standin"], "ERROR: --device standin: no C++ compiler", marks=pytest.mark.thorough
        ),
    ],
    ids=["here", "where CI is set", "with the default device switched"],
)
@pytest.mark.skipif("cuda_standin" in sys.modules, reason="cuda_standin needs the compiler to load this PyTorch")
def test_without_a_compiler_its_tests_are_left_out_by_that_reason_and_fail_where_ci_is_set(
    tmp_path, where, options, told
):
    tests = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_XDIST_WORKER")}
    environment |= {"CXX": "no-such-compiler", "LOWTIDE_TEST_CACHE_DIR": str(tmp_path)} | where
    one = "accelerator/test_devices.py" if not options else "test_gc_control.py"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *options, str(tests / one)],
        cwd=tests.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told in run.stdout + run.stderr and "no C++ compiler (no-such-compiler)" in run.stdout + run.stderr
    assert (run.returncode == 0) is (told == "SKIPPED")
