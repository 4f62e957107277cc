"""How the planner's process lives beside training, and that it ends with it."""

import gc
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support.plan_requests import decoder_request
from support.planner_children import (
    FAILS_AT_WORK,
    LIMIT_S,
    NEVER_ENDS,
    STOPS_AT_FIRST,
    child_of,
    use_script,
    wait_for_end,
)

from lowtide.errors import PlannerFailedError
from lowtide.planning.planner_child import NICENESS
from lowtide.planning.planner_process import PlannerProcess


@pytest.fixture
def planner():
    with PlannerProcess() as planner:
        yield planner


def test_the_process_is_small_and_apart(planner):
    planner.submit(decoder_request()).plan(LIMIT_S)
    child = child_of(planner)

    if sys.platform != "linux":
        assert child.nice() > psutil.Process().nice()
    assert {child.environ()[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} == {"1"}
    mapped = [m.path.rpartition("site-packages")[2] for m in child.memory_maps()]
    assert not [path for path in mapped if "torch" in path or "cuda" in path]
    # Ctrl-C in a terminal goes to the group, and shares of the processor go to sessions.
    assert os.getpgid(child.pid) == child.pid and os.getsid(child.pid) == os.getsid(0)
    child.send_signal(signal.SIGINT)
    assert planner.submit(decoder_request("60%")).plan(LIMIT_S) and child_of(planner) == child


@pytest.mark.skipif(sys.platform != "linux", reason="only there threads have a niceness of their own")
def test_what_improves_a_plan_gives_way_to_training_and_what_makes_the_first_one_does_not(planner, monkeypatch):
    """Each step until the first plan takes two to three times as long, which is more than a share of a core."""
    ours, politely = os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS

    def niceness() -> set[int]:
        return {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in child_of(planner).threads()}

    use_script(monkeypatch, STOPS_AT_FIRST)
    planner.start()
    planner.submit(decoder_request()).first(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while niceness() != {ours, politely} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert niceness() == {ours, politely}
    monkeypatch.undo()
    planner.close()


def test_a_process_whose_work_fails_ends_and_is_stood_in_for(planner, monkeypatch):
    use_script(monkeypatch, FAILS_AT_WORK)
    pending = planner.submit(decoder_request())

    assert pending.plan(LIMIT_S) and pending.source == "thread"
    assert "MemoryError: too little" in pending.reason


def test_start_starts_the_process_before_the_first_request(planner):
    planner.start()
    deadline = time.monotonic() + LIMIT_S
    while planner._service._child is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child = child_of(planner)

    assert planner.submit(decoder_request()).plan(LIMIT_S) and child_of(planner) == child


def test_close_ends_the_process_and_fails_what_waits(planner, monkeypatch):
    with monkeypatch.context() as patch:
        use_script(patch, NEVER_ENDS)
        pendings = [planner.submit(decoder_request(f"{percent}%")) for percent in (60, 50)]
        pendings[0].first(LIMIT_S)
    child = child_of(planner)

    planner.close()

    for pending in pendings:
        with pytest.raises(PlannerFailedError, match="the planner was closed before it had a plan"):
            pending.plan(LIMIT_S)
    wait_for_end(child)
    assert planner.submit(decoder_request()).plan(LIMIT_S)  # another one starts


def test_a_planner_that_nobody_holds_ends_its_process():
    planner = PlannerProcess()
    pending = planner.submit(decoder_request())
    pending.plan(LIMIT_S)
    child = child_of(planner)

    del planner
    gc.collect()

    wait_for_end(child)
    assert pending.plan()


SCRIPT = """
import os, signal, sys, time
sys.path[:0] = {path!r}
from support.plan_requests import decoder_request
from lowtide.planning import planner_process
planner = planner_process.PlannerProcess()
"""


def run_script(tmp_path, body, *, stdin=subprocess.DEVNULL, **options) -> subprocess.CompletedProcess:
    """Run a user's script, without a ``__main__`` guard, on this process's path."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=[p for p in sys.path if p]) + body)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, stdin=stdin, capture_output=True, text=True,
        timeout=LIMIT_S, **options,
    )  # fmt: skip


@pytest.mark.parametrize("stdin", ["null", "closed"])
def test_a_script_without_a_guard_in_a_folder_of_strange_modules_gets_its_plan(tmp_path, stdin):
    work = tmp_path / "work"
    work.mkdir()
    for name in ("json", "numpy", "lowtide"):
        (work / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    body = f"""
os.chdir({str(work)!r})
pending = planner.submit(decoder_request())
print(pending.plan(100).method, pending.source, pending.reason)
"""
    run = run_script(tmp_path, body, preexec_fn=(lambda: os.close(0)) if stdin == "closed" else None)

    assert (run.stdout, run.stderr, run.returncode) == ("exact process \n", "", 0)


def test_a_script_that_ends_while_its_plan_is_made_ends_at_once_and_in_silence(tmp_path):
    body = f"""
planner_process._command = lambda: [sys.executable, "-c", {NEVER_ENDS!r}]
planner.submit(decoder_request("60%")).first(100)
print(planner._service._child._process.pid)
"""
    run = run_script(tmp_path, body)

    assert (run.stderr, run.returncode) == ("", 0)
    assert_gone(int(run.stdout))


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a fork that lives on"])
def test_the_process_ends_with_a_script_that_is_killed(tmp_path, forks):
    """A fork holds the other end of the child's standard input."""
    body = f"""
planner_process._command = lambda: [sys.executable, "-c", {NEVER_ENDS!r}]
planner.submit(decoder_request("60%")).first(100)
print(planner._service._child._process.pid, flush=True)
if {forks} and os.fork() == 0:
    os.close(1), os.close(2)
    time.sleep(30)
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = run_script(tmp_path, body)

    assert run.returncode == -signal.SIGKILL
    assert_gone(int(run.stdout))


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 20.0  # the fork of the script lives for 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.05)


def test_a_broken_pipe_does_not_end_a_script_that_wants_to_end_on_one(tmp_path):
    body = """
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
planner.submit(decoder_request()).plan(100)
planner._service._child._process.kill()
planner._service._child._process.wait()
pending = planner.submit(decoder_request("60%"))
print(pending.plan(100).method, pending.source)
"""
    run = run_script(tmp_path, body)

    assert (run.stdout, run.stderr, run.returncode) == ("exact thread\n", "", 0)


def test_a_fork_of_the_script_has_a_planner_of_its_own(tmp_path):
    body = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 says that a fork of several threads may hang
planner.submit(decoder_request()).plan(100)
mine = planner._service._child._process.pid
fork = os.fork()
if fork == 0:
    planner.close()  # that of the script stays
    pending = planner.submit(decoder_request("60%"))
    good = pending.plan(100).method == "exact" and planner._service._child._process.pid != mine
    planner.close()
    os._exit(0 if good else 1)
code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
print(code, planner.submit(decoder_request("60%")).plan(100).method, planner._service._child._process.pid == mine)
"""
    run = run_script(tmp_path, body)

    assert (run.stdout, run.stderr, run.returncode) == ("0 exact True\n", "", 0)
