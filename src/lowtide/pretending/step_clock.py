"""How long a step takes, from what the host asked of the device and how long each of it takes (plain data, no torch).

The host goes through its calls in order, as fast as it went through them without a device. A stream runs what it was
given in order: not before the host gave it, nor before events that it was told to wait for. The host goes on at once
but where it waits, and where the device is as many launches behind as its queue holds. Collectives of one communicator
run one after the other. Kernels of several streams share the device; beside a collective they are slower, because it
holds some of its processors. Several steps are played, so that the last one begins as steps of a training do.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LAUNCH_US = 2.5  # the driver's part of a launch, which the stand-in's does not take; from memory of profiles
GRAPH_LAUNCH_US = 10.0  # of a whole graph
WAIT_US = 10.0  # a wait of the host that finds the work done
QUEUED = 1024  # launches that may be outstanding
# What kernels lose while a collective runs: NCCL holds 16 to 24 of 108 to 132 processors.
SLOWER_BESIDE_COLLECTIVE = 0.12
_STEPS = 4
_SHORT_US = 20.0  # kernels up to here are not slowed by what runs beside them: they are latency


class Task(NamedTuple):
    """One call of the host.

    Attributes:
        kind: ``kernel``, ``copy`` (to or from the host), ``collective``; ``event`` (recorded on the stream), ``wait``
            (of the stream for an event), ``host_event``, ``host_stream``, ``host_device`` (the host waits).
        at_us: When the host comes to it, where it never waits: since the step began.
        us: On the device.
        launches: Of the host; 0 for a part of what was launched already.
        which: An event, or a communicator.
        name: What is said of it.
        waits: The host waits for its end.
    """

    kind: str
    at_us: float
    stream: int = 0
    us: float = 0.0
    launches: int = 1
    which: int = 0
    name: str = ""
    waits: bool = False


@dataclass(frozen=True)
class PlayedStep:
    """The last step that was played; microseconds.

    Attributes:
        busy_us: Kernels and copies within the device, as long as they take alone.
        host_us: The host's own time, with launches and without waits.
        waited_us: The host waited for the device.
        communication_us: Collectives, whether anything waits for them or not.
        lost_us: The main stream stood still, by reason: ``communication``, ``host`` (it had not launched yet),
            ``waits`` (the same, because it had waited for the device), ``copies``, ``other streams``.
        slowed_us: What kernels took more beside others.
        by_name_us: What kernels, copies and collectives took, by name.
    """

    step_us: float
    busy_us: float
    host_us: float
    waited_us: float
    communication_us: float
    lost_us: dict[str, float]
    slowed_us: float
    by_name_us: dict[str, float]


class _Spans:
    """When a stream ran something, in order."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []

    def add(self, begin: float, end: float) -> None:
        if end > begin:
            self.begins.append(begin)
            self.ends.append(end)

    def forget(self, before: float) -> None:
        i = bisect.bisect_right(self.ends, before)
        del self.begins[:i], self.ends[:i]

    def beside(self, begin: float, end: float) -> float:
        """How much of them lies between ``begin`` and ``end``."""
        found, i = 0.0, bisect.bisect_right(self.ends, begin)
        while i < len(self.begins) and self.begins[i] < end:
            found += min(end, self.ends[i]) - max(begin, self.begins[i])
            i += 1
        return found


@dataclass
class _Stream:
    ends: float = 0.0
    ready: float = 0.0  # what it was told to wait for
    ready_because: str = ""
    last_kind: str = ""
    spans: _Spans = field(default_factory=_Spans)


class _Player:
    def __init__(self, main: int) -> None:
        self.main = main
        self.host = 0.0
        self.streams: dict[int, _Stream] = defaultdict(_Stream)
        self.events: dict[int, tuple[float, str]] = {}
        self.communicators: dict[int, float] = defaultdict(float)
        self.queue: deque[float] = deque()
        self.last_wait = -1.0  # when the host's last wait ended
        self.expected = _Spans()  # collectives, as they were in the step before
        self.begin_step()

    def begin_step(self) -> None:
        self.lost: dict[str, float] = defaultdict(float)
        self.by_name: dict[str, float] = defaultdict(float)
        self.busy = self.waited = self.host_own = self.communication = self.slowed = 0.0
        self.collectives: list[tuple[float, float]] = []

    def wait_of_host(self, until: float) -> None:
        self.waited += max(0.0, until - self.host)
        self.host = max(self.host, until) + WAIT_US
        self.last_wait = self.host

    def play(self, task: Task, launch_us: float) -> None:
        stream = self.streams[task.stream]
        if task.kind == "event":
            because = "communication" if stream.last_kind == "collective" else "copies" if (
                stream.last_kind == "copy") else "other streams"  # fmt: skip
            at, inherited = max((stream.ends, because), (stream.ready, stream.ready_because))
            self.events[task.which] = (at, inherited or because)
        elif task.kind == "wait":
            at, because = self.events.get(task.which, (0.0, ""))
            if at > stream.ready:
                stream.ready, stream.ready_because = at, because
        elif task.kind == "host_event":
            self.wait_of_host(self.events.get(task.which, (0.0, ""))[0])
        elif task.kind == "host_stream":
            self.wait_of_host(max(stream.ends, stream.ready))
        elif task.kind == "host_device":
            self.wait_of_host(max(s.ends for s in self.streams.values()))
        else:
            self._work(task, stream, launch_us)

    def _work(self, task: Task, stream: _Stream, launch_us: float) -> None:
        issuing = launch_us * task.launches
        self.host += issuing
        self.host_own += issuing
        while len(self.queue) >= QUEUED:
            self.host = max(self.host, self.queue.popleft())
        begin, because = max(
            (self.host, "waits" if self.last_wait > stream.ends else "host"),
            (stream.ready, stream.ready_because),
            (self.communicators[task.which], "communication") if task.kind == "collective" else (0.0, ""),
        )
        if task.stream == self.main and begin > stream.ends > 0.0:
            self.lost[because] += begin - stream.ends
        begin = max(begin, stream.ends)
        us = task.us
        if task.kind == "kernel" and us > _SHORT_US:
            others = sum(s.spans.beside(begin, begin + us) for n, s in self.streams.items() if n != task.stream)
            us += others + SLOWER_BESIDE_COLLECTIVE * self.expected.beside(begin, begin + us)
            self.slowed += us - task.us
        end = begin + us
        stream.ends, stream.last_kind = end, task.kind
        self.by_name[task.name] += us
        if task.kind == "collective":
            self.communicators[task.which] = end
            self.communication += us
            self.collectives.append((begin, end))
            if task.stream == self.main:
                self.lost["communication"] += us
        elif task.kind == "kernel":
            self.busy += task.us
            stream.spans.add(begin, end)
        elif task.stream == self.main:
            self.lost["copies"] += us
        self.queue.append(end)
        if task.waits:
            self.wait_of_host(end)


def play(tasks: Sequence[Task], host_us: float, *, launch_us: float = LAUNCH_US, steps: int = _STEPS) -> PlayedStep:
    """Play some steps, and return the last.

    Args:
        tasks: In the order of the host.
        host_us: The host's own time from the begin of the step to its end, without launches and waits.
        steps: How many; what no event ties to the step before may begin while that still runs.
    """
    main = main_stream(tasks)
    player = _Player(main)
    began = 0.0
    for _ in range(steps):
        began = max(player.streams[main].ends, 0.0)
        player.begin_step()
        before = 0.0
        for task in tasks:
            player.host += task.at_us - before
            before = task.at_us
            player.play(task, launch_us)
        player.host += host_us - before
        step = player.streams[main].ends - began
        for s in player.streams.values():
            s.spans.forget(before=began)
        player.expected = _Spans()
        for begin, end in sorted(player.collectives):
            player.expected.add(begin + step, end + step)
    return PlayedStep(
        step_us=step or host_us,
        busy_us=player.busy,
        host_us=player.host_own + host_us,
        waited_us=player.waited,
        communication_us=player.communication,
        lost_us=dict(player.lost),
        slowed_us=player.slowed,
        by_name_us=dict(sorted(player.by_name.items(), key=lambda item: -item[1])),
    )


def main_stream(tasks: Sequence[Task]) -> int:
    """The one that kernels take most of; copies count where there are no kernels."""
    for kind in ("kernel", "copy"):
        work: Counter[int] = Counter()
        for task in tasks:
            if task.kind == kind:
                work[task.stream] += 1 + int(1e3 * task.us)
        if work:
            return work.most_common(1)[0][0]
    return 0
