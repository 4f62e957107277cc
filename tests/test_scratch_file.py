"""Where the disk tier lives, and how fast it is found to be."""

import os
import warnings

import pytest
import torch

import lowtide
from lowtide.errors import TierError
from lowtide.measurement.links import measured_link
from lowtide.scratch_file import ScratchInMemoryWarning, file_system, open_scratch, read_all, write_all


def test_a_scratch_file_has_no_name_and_gives_back_what_was_written(tmp_path):
    fd = open_scratch(tmp_path)
    data, back = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)

    write_all(fd, memoryview(data.view(torch.uint8).numpy()), 4096)
    read_all(fd, memoryview(back.view(torch.uint8).numpy()), 4096)

    assert torch.equal(data, back) and list(tmp_path.iterdir()) == []
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def test_reading_beyond_the_end_is_an_error_with_the_place(tmp_path):
    fd, back = open_scratch(tmp_path), torch.zeros(10, dtype=torch.uint8)

    with pytest.raises(OSError, match="the file ends at byte 4, 10 bytes too early"):
        read_all(fd, memoryview(back.numpy()), 4)
    os.close(fd)


def test_transfers_that_the_system_cuts_short_are_finished(tmp_path, monkeypatch):
    fd = open_scratch(tmp_path)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: preadv(fd, [into[0][:5]], offset))
    data, back = torch.arange(40, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)

    write_all(fd, memoryview(data.numpy()), 0)
    read_all(fd, memoryview(back.numpy()), 0)

    assert torch.equal(data, back)
    os.close(fd)


def test_a_directory_that_is_missing_or_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    for name, reason in (("missing", "No such file or directory"), ("file", "Not a directory")):
        with pytest.raises(TierError) as caught:
            open_scratch(tmp_path / name)
        assert str(caught.value) == (
            f"scratch_dir='{tmp_path / name}' cannot hold a scratch file: {reason}.\n"
            "Pass a directory that exists and can be written, with scratch_dir=."
        )


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    # Root may write anywhere but in what the kernel itself makes up.
    where = locked if os.geteuid() else "/proc/self"

    with pytest.raises(TierError, match="cannot hold a scratch file: (Permission denied|No such file|Read-only)"):
        open_scratch(where)


def test_a_directory_with_too_little_room_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(TierError, match=r"has .* free, the plan moves 1024.00 TiB there\.\nMake room"):
        open_scratch(tmp_path, 2**50)


def test_a_scratch_directory_in_memory_is_warned_about(tmp_path, monkeypatch):
    monkeypatch.setattr("lowtide.scratch_file.file_system", lambda path: "tmpfs")
    with pytest.warns(ScratchInMemoryWarning, match="is on tmpfs, which is memory"):
        os.close(open_scratch(tmp_path))

    monkeypatch.setattr("lowtide.scratch_file.file_system", lambda path: "ext4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        os.close(open_scratch(tmp_path))


def test_the_innermost_mount_tells_the_file_system(tmp_path):
    inner = tmp_path / "in side"
    inner.mkdir()
    mounts = tmp_path / "mounts"
    written = str(inner).replace(" ", "\\040")
    mounts.write_text(f"/dev/x / ext4 rw 0 0\ntmpfs {written} tmpfs rw 0 0\n/dev/y {tmp_path}/other xfs rw 0 0\n")

    assert file_system(inner, mounts) == "tmpfs"
    assert file_system(tmp_path, mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "missing") == ""


def test_a_link_is_measured_once_and_belongs_to_the_costs(tmp_path, monkeypatch):
    link = measured_link("disk", "cpu", tmp_path)
    monkeypatch.setattr("lowtide.measurement.links.open_scratch", lambda *a: pytest.fail("measured again"))

    assert link.store_bytes_per_s > 0 and link.fetch_bytes_per_s > 0 and link.latency_ms > 0
    assert measured_link("disk", "cpu", tmp_path) is link


def test_measure_asks_for_the_links_it_is_told_to():
    graph = lowtide.trace(torch.nn.Linear(4, 4), torch.ones(2, 4))

    assert lowtide.measure(graph).links == {}
    assert set(lowtide.measure(graph, tiers=("disk",)).links) == {"disk"}


def test_a_tier_that_is_not_here_is_refused_by_name():
    with pytest.raises(TierError, match="there is no host tier beside a model on cpu"):
        measured_link("host", "cpu")
    with pytest.raises(TierError, match="the disk tier holds storages of models on cpu, this one is on cuda"):
        measured_link("disk", "cuda")
    with pytest.raises(ValueError, match="tier 'tape' is not known. Use 'host' or 'disk'."):
        measured_link("tape", "cpu")
