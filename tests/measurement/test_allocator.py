"""The meters against allocations whose size is a formula."""

import gc
import resource
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lowtide.errors import LowtideError
from lowtide.measurement import allocator

MIB = 2**20


def floats(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB // 4)


def test_the_peak_of_making_and_dropping_is_the_formula():
    def fn():
        a = floats(8)
        b = floats(4)  # 12 live
        del a  # 4
        c = floats(6)  # 10
        del b, c

    assert allocator.peak_bytes(fn) == 12 * MIB


def test_what_was_live_before_the_start_does_not_count():
    held = floats(16)

    assert allocator.peak_bytes(lambda: held + held) == 16 * MIB


def test_cpu_memory_from_before_that_is_freed_inside_goes_unseen_so_the_peak_errs_high():
    held = [floats(16)]

    def fn():
        held.clear()  # 16 below the start: the allocator has no size for it and reports nothing
        held.append(floats(20))  # truly 4 above the start

    # Not 4. A little less than 20 where a thread of an earlier test lets something go meanwhile.
    assert 16 * MIB < allocator.peak_bytes(fn) <= 20 * MIB


def test_the_peak_of_a_training_step_agrees_with_the_torch_profiler():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(4))
    batch = torch.randn(4, 3, 16, 16)

    def step():
        model(batch).square().mean().backward()

    step()
    mine = allocator.peak_bytes(step)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)

    assert mine == peak > 0


def test_a_peak_inside_a_profiler_is_refused():
    with torch.autograd.profiler.profile(), pytest.raises(LowtideError, match="already active"):
        allocator.peak_bytes(lambda: None)


def test_the_profiler_is_off_again_after_an_error():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        allocator.run_with_workspace(fail)

    assert allocator.peak_bytes(lambda: floats(1)) == MIB


def test_conv2d_has_workspace_and_makes_its_output():
    x, w = torch.randn(2, 8, 32, 32), torch.randn(16, 8, 3, 3)

    run = allocator.run_with_workspace(lambda: torch.conv2d(x, w))

    assert run.made_bytes == run.result.nbytes == 2 * 16 * 30 * 30 * 4
    assert run.workspace_bytes > 0


def test_a_plain_add_has_no_workspace():
    x = torch.randn(1024)

    run = allocator.run_with_workspace(lambda: x + x)

    assert (run.workspace_bytes, run.made_bytes) == (0, 4096)


def test_workspace_is_the_peak_less_what_is_left():
    run = allocator.run_with_workspace(lambda: [floats(1), (floats(4), floats(2))[1]])

    assert (run.workspace_bytes, run.made_bytes) == (4 * MIB, 3 * MIB)


def test_inside_another_measurement_the_call_runs_unmeasured():
    runs = []

    peak = allocator.peak_bytes(lambda: runs.append(allocator.run_with_workspace(lambda: floats(1))))

    assert peak == MIB
    assert runs[0].result.nbytes == MIB
    assert (runs[0].workspace_bytes, runs[0].made_bytes) == (None, None)


def test_methods_take_turns_in_an_order_that_the_seed_fixes():
    def order(seed):
        calls = []
        methods = {name: (lambda name=name: calls.append(name)) for name in "abc"}
        times = allocator.compare_times(methods, rounds=4, warmup=1, seed=seed)
        assert all(len(t.samples_ms) == 4 for t in times.values())
        return calls

    calls = order(seed=1)

    assert [sorted(calls[i : i + 3]) for i in range(0, 15, 3)] == [["a", "b", "c"]] * 5
    assert calls == order(seed=1) != order(seed=2)


def test_a_baseline_runs_before_and_after_every_two_methods():
    calls = []
    methods = {name: (lambda name=name: calls.append(name)) for name in "abc"}

    plain, times, ratios = allocator.compare_with(lambda: calls.append("p"), methods, rounds=4, seed=1)

    rounds = [calls[i : i + 6] for i in range(0, 30, 6)]
    assert all("".join("p" if c == "p" else "m" for c in run) == "pmmpmp" for run in rounds)
    assert all(sorted(run) == ["a", "b", "c", "p", "p", "p"] for run in rounds)
    assert len(plain.samples_ms) == 8
    assert all(len(t.samples_ms) == 4 for t in (*times.values(), *ratios.values()))


def test_a_machine_that_slows_down_does_not_change_a_ratio(monkeypatch):
    """Every call takes a tenth longer than the one before; a ratio of medians would say otherwise."""
    spent = iter(1.1**i for i in range(1000))
    monkeypatch.setattr(allocator, "time_ms", lambda fn, device: fn() * next(spent))

    _, times, ratios = allocator.compare_with(lambda: 1.0, {"double": lambda: 2.0}, rounds=5)

    assert all(abs(r - 2) < 0.02 for r in ratios["double"].samples_ms)
    assert max(times["double"].samples_ms) > 3 * min(times["double"].samples_ms)


@pytest.fixture
def one_thread():
    """Threads that wait for each other count as work where the machine has other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_more_work_takes_longer_and_the_quartiles_enclose_the_median(one_thread):
    x = torch.randn(64, 64)
    work = {"one": lambda: [x @ x for _ in range(50)], "ten": lambda: [x @ x for _ in range(500)]}
    seen = []

    times = allocator.compare_times(work, rounds=3, on_round=lambda done, total: seen.append((done, total)))

    assert times["ten"].median_ms > 3 * times["one"].median_ms > 0
    for t in times.values():
        assert t.quartiles[0] <= t.median_ms <= t.quartiles[1]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_sample_runs_without_garbage_collection_and_leaves_it_on():
    enabled = []

    allocator.compare_times({"a": lambda: enabled.append(gc.isenabled())}, rounds=2)

    assert enabled == [False] * 3
    assert gc.isenabled()


def test_no_rounds_is_an_error():
    with pytest.raises(ValueError, match="rounds=0"):
        allocator.compare_times({"a": lambda: None}, rounds=0)


def test_available_bytes_respects_an_address_space_limit():
    script = textwrap.dedent("""
        import resource, psutil
        from lowtide.measurement import allocator
        room = 256 * 2**20
        limit = psutil.Process().memory_info().vms + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        left = meters.available_bytes("cpu")
        assert room - 64 * 2**20 < left <= room, left
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_available_bytes_without_limits_is_at_most_the_free_ram():
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert 0 < allocator.available_bytes("cpu") < 2**50


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_group_around_the_process_counts(tmp_path):
    (tmp_path / "membership").write_text("0::/job/task\n")
    group(tmp_path, memory__max="max", memory__current=999)
    group(tmp_path / "job", memory__max=1000, memory__current=700, memory__stat="anon 600\ninactive_file 50")
    group(tmp_path / "job" / "task", memory__max=900, memory__current=100)

    assert allocator.cgroup_available_bytes(tmp_path / "membership", tmp_path) == 1000 - 700 + 50


def test_version_one_groups_are_read_too(tmp_path):
    (tmp_path / "membership").write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    group(tmp_path / "memory" / "job", memory__limit_in_bytes=1000, memory__usage_in_bytes=400)

    assert allocator.cgroup_available_bytes(tmp_path / "membership", tmp_path) == 600


def test_a_path_outside_the_mount_falls_back_to_the_mount(tmp_path):
    (tmp_path / "membership").write_text("0::/not/visible/here\n")
    group(tmp_path, memory__max=1000, memory__current=100)

    assert allocator.cgroup_available_bytes(tmp_path / "membership", tmp_path) == 900


def test_no_groups_means_no_limit(tmp_path):
    assert allocator.cgroup_available_bytes(tmp_path / "none", tmp_path) is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_peak_is_the_formula_and_inner_measurements_step_aside():
    def fn():
        inner = allocator.run_with_workspace(lambda: torch.empty(MIB, device="cuda"), "cuda")
        assert inner.workspace_bytes is None
        return torch.empty(2 * MIB, device="cuda", dtype=torch.uint8)

    assert allocator.peak_bytes(fn, "cuda") == 6 * MIB
    assert allocator.available_bytes("cuda") > 0
