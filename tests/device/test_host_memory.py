"""Available memory under control groups and limits of the address space."""

import platform
import resource
import subprocess
import sys
import textwrap

import pytest

from lowtide.device.host_memory import available_host_bytes, cgroup_available_bytes


def test_available_bytes_respects_an_address_space_limit():
    script = textwrap.dedent("""
        import resource, psutil
        from lowtide.device.host_memory import available_host_bytes, unused_heap_bytes
        room = 256 * 2**20
        limit = psutil.Process().memory_info().vms + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        left = available_host_bytes() - unused_heap_bytes()
        assert room - 64 * 2**20 < left <= room + 2**20, left
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_available_bytes_without_limits_is_at_most_the_free_ram():
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert 0 < available_host_bytes() < 2**50


def test_what_malloc_keeps_for_this_process_is_available(monkeypatch):
    monkeypatch.setattr("lowtide.device.host_memory.unused_heap_bytes", lambda: 2**50)
    assert available_host_bytes() > 2**50


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc tells")
def test_malloc_tells_what_it_keeps_after_a_step():
    script = textwrap.dedent("""
        import torch
        from lowtide.device.host_memory import unused_heap_bytes
        layers = [torch.nn.Linear(64, 64) for _ in range(32)]
        before = unused_heap_bytes()
        for _ in range(2):  # 8 MiB a tensor: on the heap from the second time on
            torch.nn.Sequential(*layers)(torch.randn(32768, 64)).sum().backward()
        assert unused_heap_bytes() - before > 64 * 2**20
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_group_around_the_process_counts(tmp_path):
    (tmp_path / "membership").write_text("0::/job/task\n")
    group(tmp_path, memory__max="max", memory__current=999)
    group(tmp_path / "job", memory__max=1000, memory__current=700, memory__stat="anon 600\ninactive_file 50")
    group(tmp_path / "job" / "task", memory__max=900, memory__current=100)

    assert cgroup_available_bytes(tmp_path / "membership", tmp_path) == 1000 - 700 + 50


def test_version_one_groups_are_read_too(tmp_path):
    (tmp_path / "membership").write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    group(tmp_path / "memory" / "job", memory__limit_in_bytes=1000, memory__usage_in_bytes=400)

    assert cgroup_available_bytes(tmp_path / "membership", tmp_path) == 600


def test_a_path_outside_the_mount_falls_back_to_the_mount(tmp_path):
    (tmp_path / "membership").write_text("0::/not/visible/here\n")
    group(tmp_path, memory__max=1000, memory__current=100)

    assert cgroup_available_bytes(tmp_path / "membership", tmp_path) == 900


def test_no_groups_means_no_limit(tmp_path):
    assert cgroup_available_bytes(tmp_path / "none", tmp_path) is None
