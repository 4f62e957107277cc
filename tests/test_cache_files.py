"""Files kept from run to run are whole, and the user's alone."""

import os
import stat
import threading

import pytest

from lowtide import cache_files
from lowtide.cache_files import cache_dir, read_file, write_file


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_directory_is_the_users_choice_then_the_standards(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", "/own")
    assert str(cache_dir()) == "/own"

    monkeypatch.setenv("LOWTIDE_CACHE_DIR", "~/own")
    assert str(cache_dir()) == "/somebody/own"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", "own")
    assert cache_dir() == tmp_path / "own"

    monkeypatch.setenv("LOWTIDE_CACHE_DIR", "")
    assert str(cache_dir()) == "/cache/lowtide"

    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert str(cache_dir()) == "/somebody/.cache/lowtide"


def test_what_was_written_is_read_and_nobody_else_can(tmp_path):
    path = tmp_path / "a" / "b" / "file.json"
    previous = os.umask(0)
    try:
        write_file(path, b"one")
        write_file(path, b"two")
    finally:
        os.umask(previous)

    assert read_file(path) == b"two"
    assert mode(path) == 0o600 and mode(path.parent) == mode(path.parent.parent) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_a_file_of_another_user_is_not_believed(tmp_path, monkeypatch):
    write_file(tmp_path / "file", b"data")
    monkeypatch.setattr(cache_files.os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(PermissionError, match=rf"belongs to user {os.getuid()}, not to {os.getuid() + 1}"):
        read_file(tmp_path / "file")


@pytest.mark.parametrize("bits", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_believed(tmp_path, bits):
    write_file(tmp_path / "file", b"data")
    os.chmod(tmp_path / "file", bits)

    with pytest.raises(PermissionError, match=f"has mode 0{bits:o}: others may write to it"):
        read_file(tmp_path / "file")


def test_a_link_is_not_followed(tmp_path):
    write_file(tmp_path / "file", b"data")
    (tmp_path / "link").symlink_to(tmp_path / "file")

    with pytest.raises(OSError, match="symbolic links"):
        read_file(tmp_path / "link")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_file(tmp_path / "file", b"old")

    def full(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(cache_files.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_file(tmp_path / "file", b"new")

    assert read_file(tmp_path / "file") == b"old" and len(list(tmp_path.iterdir())) == 1


def test_readers_beside_writers_see_whole_files(tmp_path):
    path, contents = tmp_path / "file", {b"a" * 300_000, b"b" * 200_000}
    write_file(path, b"a" * 300_000)
    writers = [threading.Thread(target=lambda c=c: [write_file(path, c) for _ in range(50)]) for c in contents]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        seen.append(read_file(path))

    assert seen and set(seen) <= contents
