"""Planning beside training: a process of its own solves, and training never waits for it.

A thread sends requests to the process one after the other and reads the answers. Where there is no such process (it
cannot be started, was killed, or writes what is no answer) the thread solves itself, and a line says why. What travels
is JSON. The process imports neither torch nor the user's script, so the script needs no ``__main__`` guard, and no CUDA
context is inherited.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Self

from lowtide.errors import LowtideError, PlannerFailedError
from lowtide.plan import Plan
from lowtide.planning.plan_request import Answer, PlanRequest
from lowtide.planning.planner_child import READY
from lowtide.planning.worker import answers

START_LIMIT_S = 60.0  # For the process to report; importing takes half a second from a warm disk.
MOST_FAILURES = 3  # Processes that are lost before the thread solves everything itself.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_CHUNK_BYTES = 1 << 16


class PendingPlan:
    """The answer to one request, now or later. All methods may be called from any thread.

    Attributes:
        num_answers: So many have come.
        source: Where the newest answer comes from: ``process``, ``thread`` (of this process) or ``cache``; "" before.
        reason: What the user should know, one line: why the thread solved, why a cached plan was not used. Mostly "".
        is_abandoned: Nobody waits for it any more.
    """

    def __init__(self) -> None:
        self.num_answers = 0
        self.source = ""
        self.reason = ""
        self._submitted_s = time.perf_counter()
        self._planning_s: float | None = None
        self._first: Answer | None = None
        self._newest: Answer | None = None
        self._final: Answer | None = None
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None  # ends the work on it
        self.is_abandoned = False
        self._has_first, self._has_final = threading.Event(), threading.Event()

    def done(self) -> bool:
        """Whether ``plan`` returns or raises at once."""
        return self._has_final.is_set()

    def first_done(self) -> bool:
        """Whether ``first`` returns or raises at once."""
        return self._has_first.is_set()

    def plan(self, timeout_s: float | None = None) -> Plan:
        """The plan that ``lowtide.solve`` returns for the request; waits for it.

        Raises:
            BudgetInfeasibleError: as ``solve`` raises it.
            PlannerFailedError: planning itself failed, or the planner was closed; the message says how.
            TimeoutError: there is no answer after ``timeout_s``.
        """
        self._wait(self._has_final, timeout_s)
        return _plan_of(self._final)

    def first(self, timeout_s: float | None = None) -> Plan:
        """The first plan within the budget, to be used until ``plan`` is there; waits for it.

        Where the search finds no quick one, this is what ``plan`` returns. Raises as ``plan`` does.
        """
        self._wait(self._has_first, timeout_s)
        return _plan_of(self._first)

    def newest(self) -> Plan:
        """The best plan so far. Call it once ``num_answers`` is not 0. Raises as ``plan`` does."""
        return _plan_of(self._newest)

    @property
    def planning_s(self) -> float:
        """Seconds from ``submit`` to the final answer; to now where there is none yet."""
        return time.perf_counter() - self._submitted_s if self._planning_s is None else self._planning_s

    def abandon(self) -> None:
        """Nobody waits for it any more: what works on it ends, so that the next request need not wait either."""
        with self._lock:
            self.is_abandoned, interrupt = True, self._interrupt
        self.add(Answer(PlannerFailedError("planning was given up: other steps come now.")), "")
        if interrupt is not None:
            interrupt()

    def work_begins(self, interrupt: Callable[[], None]) -> bool:
        """Whether it is still wanted; ``interrupt`` ends the work if that changes."""
        with self._lock:
            self._interrupt = interrupt
            return not self.is_abandoned

    def work_ends(self) -> bool:
        """Whether it was interrupted, or may have been."""
        with self._lock:
            self._interrupt = None
            return self.is_abandoned

    def _wait(self, event: threading.Event, timeout_s: float | None) -> None:
        if not event.wait(timeout_s):
            raise TimeoutError(f"no plan after {timeout_s} s: planning has taken {self.planning_s:.1f} s so far.")

    def add_reason(self, reason: str) -> None:
        self.reason = "; ".join(filter(None, (self.reason, reason)))

    def add(self, answer: Answer, source: str) -> None:
        """Hand out ``answer``. Answers after the final one are dropped."""
        with self._lock:
            if self._final is not None:
                return
            self.add_reason(answer.reason)
            self.source = "cache" if answer.cached else source
            self._newest = answer
            self.num_answers += 1
            if self._first is None:
                self._first = answer
                self._has_first.set()
            if answer.final:
                self._planning_s = time.perf_counter() - self._submitted_s
                self._final = answer
                self._has_final.set()


def _plan_of(answer: Answer | None) -> Plan:
    assert answer is not None
    if isinstance(answer.result, LowtideError):
        # Each caller gets an error of its own: raising one adds the caller's frames to it.
        raise Answer.from_json(answer.to_json()).result  # type: ignore[misc]
    return answer.result


class PlannerProcess:
    """Solves requests beside training, one after the other. All methods may be called from any thread.

    The process starts with the first request (or ``start``), serves all that follow, and ends with ``close``, with this
    object, or with this process, however that ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._service: _Service | None = None

    def start(self) -> None:
        """Start the process now, so that the first request does not wait for it. Returns at once."""
        with self._lock:
            service = self._running()
            service.jobs.put(service.start)

    def submit(self, request: PlanRequest) -> PendingPlan:
        """Have ``request`` solved; returns at once and raises nothing."""
        pending = PendingPlan()
        with self._lock:
            service = self._running()
            service.jobs.put(partial(service.answer, request, pending))
        return pending

    def close(self) -> None:
        """End the process. A plan that is not there yet fails, unless the thread solves it. ``submit`` starts anew."""
        with self._lock:
            service, self._service = self._service, None
        if service is not None:
            service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _running(self) -> "_Service":
        # A process that was forked from this one has neither the thread nor a child.
        if self._service is None or self._service.pid != os.getpid():
            self._service = _Service()
            weakref.finalize(self, self._service.close)
        return self._service


class _Service:
    """The thread that does the jobs, and its child. Holds no ``PlannerProcess``, so that one can be collected."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # None: there will be no more
        self._child: _Child | None = None
        self._closed = False
        self._failures = 0
        self._last_failure = ""
        threading.Thread(target=self._work, name="lowtide-planner", daemon=True).start()

    def close(self) -> None:
        """End child and thread. Takes no lock: the garbage collector may call it anywhere."""
        self._closed = True  # before the look at the child, see start
        if self._child is not None:
            self._child.kill()  # the thread reads the end of its answers; in a fork this does nothing
        self.jobs.put(None)

    def is_closed(self) -> bool:
        return self._closed

    def _work(self) -> None:
        # Where a script has asked for SIGPIPE's default action, writing to a child that is gone would end the script.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        while (job := self.jobs.get()) is not None:
            job()
            del job  # a graph is large, and the next request may be hours away
        if self._child is not None:
            self._child.stop()

    def start(self) -> "_Child | None":
        """The child, started if there is none; None where it cannot be had."""
        if self._child is not None or self._failures >= MOST_FAILURES or self.is_closed():
            return self._child
        try:
            self._child = _Child()
        except Exception as error:
            # What is forbidden now will be forbidden later.
            self._failures, self._last_failure = MOST_FAILURES, f"the planner's process did not start: {error}"
            return None
        if self.is_closed():  # meanwhile
            self._child.kill()
        return self._child

    def answer(self, request: PlanRequest, pending: PendingPlan) -> None:
        """Solve ``request``, by the child or here."""
        if pending.is_abandoned:
            return
        try:
            if self._asked(request.to_json(), pending):
                return
        except TypeError as error:
            self._last_failure = f"the request cannot be written as JSON ({error})"
        except Exception as error:  # the thread goes on, and nobody waits for ever
            return _fail(pending, f"planning failed: {type(error).__name__}: {error}")
        if self.is_closed():
            return _fail(pending, "the planner was closed before it had a plan")
        pending.add_reason(f"planned in a thread of the training process: {self._last_failure}")
        try:
            for answer in answers(request):
                pending.add(answer, "thread")
        except Exception as error:
            _fail(pending, f"planning failed: {type(error).__name__}: {error}")

    def _asked(self, text: str, pending: PendingPlan) -> bool:
        """Whether the child gave the final answer."""
        child = self.start()
        if child is None:
            return False
        failure: Exception | None = None
        if pending.work_begins(child.kill):
            try:
                child.send(text)
                answer = None
                while answer is None or not answer.final:  # to the end: the next request's answers follow
                    answer = child.answer()
                    pending.add(answer, "process")
            except Exception as error:
                failure = error
        if pending.work_ends() or failure is not None:
            if failure is not None and not pending.is_abandoned:
                self._failures += 1
                self._last_failure = child.failure(failure)
            self._child = None
            child.stop()
        return pending.done()


def _fail(pending: PendingPlan, message: str) -> None:
    pending.add(Answer(PlannerFailedError(f"{message}.")), "thread")


class _Child:
    """The process. One thread talks to it; any thread may kill it.

    Raises:
        Exception: it cannot be started, or does not report in time.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - what it says is not for the user's terminal
        try:
            self._process = subprocess.Popen(
                _command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=_environment(),
                # Ctrl-C is for the training script alone. A session of its own would keep it away too, and would make
                # niceness void: Linux shares the processor among sessions first (sched_autogroup).
                process_group=0,
            )
        except BaseException:
            self._errors.close()
            raise
        try:
            line = self._read_line(START_LIMIT_S)
            if line != READY.encode():
                raise ValueError(repr(line[:60]))
        except Exception as error:
            reason = self.failure(error)
            self.stop()
            raise OSError(reason) from error

    def send(self, text: str) -> None:
        assert self._process.stdin is not None
        data = memoryview(text.encode() + b"\n")
        while data:
            data = data[os.write(self._process.stdin.fileno(), data) :]

    def answer(self) -> Answer:
        """Raises: OSError, EOFError: it is gone. ValueError, TypeError, KeyError: what it wrote is no answer."""
        return Answer.from_json(self._read_line())

    def failure(self, error: Exception) -> str:
        """What went wrong, in words, when ``error`` was raised by another method."""
        if isinstance(error, TimeoutError):
            return f"{error} from the planner's process"
        if not isinstance(error, (OSError, EOFError)):
            return f"the planner's process wrote what is no answer ({type(error).__name__}: {error})"
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"the planner's process cannot be reached ({error})"
        if code < 0:
            return f"the planner's process was ended by signal {-code}"
        written = os.pread(self._errors.fileno(), 4096, max(os.fstat(self._errors.fileno()).st_size - 4096, 0))
        last_line = written.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the planner's process ended with status {code}: {last_line or 'it said nothing'}"

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        """End it, and let go of all that belongs to it."""
        self.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            file.close()

    def _read_line(self, limit_s: float | None = None) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        parts = []
        while b"\n" not in self._rest:
            parts.append(self._rest)
            if not poll.poll(None if limit_s is None else 1e3 * limit_s):
                raise TimeoutError(f"nothing came in {limit_s:.0f} s")
            self._rest = os.read(fd, _CHUNK_BYTES)
            if not self._rest:
                raise EOFError("its answers end")
        end, _, self._rest = self._rest.partition(b"\n")
        return b"".join((*parts, end))


def _command() -> list[str]:
    """Raises: OSError: there is no interpreter to run."""
    if not sys.executable or getattr(sys, "frozen", False):  # frozen: it is the user's program
        raise OSError("this program has no Python interpreter of its own")
    # -P: not the modules of the working directory, but those of the path below, which is this process's own.
    return [sys.executable, "-P", "-m", "lowtide.planning.planner_child"]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path if isinstance(entry, str))
    return {**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), "PYTHONPATH": path}
