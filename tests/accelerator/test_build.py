"""The library is built once for each state of its sources, and its lack of a compiler has a name."""

from concurrent.futures import ThreadPoolExecutor

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
