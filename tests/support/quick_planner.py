"""Plans for ``make test`` of what is no test of plans: searched for with less effort, by a process that is kept.

A fit that watches real steps starts a process that plans for it. That takes half a second and each such test did it;
here the next test's fit gets the process of the last one. A planner that trades quality for time is as right as any:
the simulator evaluates every plan. Tests of the search itself, and of the process, run as they are (``AS_IT_IS``), and
``make test-all`` runs all of them so.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from lowtide.planning import planner_process
from lowtide.planning.plan_request import Answer
from lowtide.solvers import tuning

LESS_EFFORT = {"TIGHTEN_ROUNDS": 0, "GAP": 0.05, "STEP_GAP": 0.01, "LEAST_PEAK_EVENTS": 800_000}
AS_IT_IS = (
    "tests/solvers/",
    "tests/benchmarks/",
    "tests/docs/",
    "tests/planning/test_planner_life.py",
    "tests/planning/test_planner_process.py",
)
_CHILD = f"""
from lowtide.planning.planner_child import main
from lowtide.solvers import tuning
for name, value in {LESS_EFFORT!r}.items():
    setattr(tuning, name, value)
main()
"""
_NOT_ITS_OWN = ("PYTEST_CURRENT_TEST", "XDG_CACHE_HOME", "LOWTIDE_CACHE_DIR")  # a request names its cache


def _command() -> list[str]:
    executable, *_ = _real_command()
    return [executable, "-P", "-c", _CHILD]


_real_command, _RealChild = planner_process._command, planner_process._Child
_idle: list["KeptChild"] = []


class KeptChild(_RealChild):
    """Outlives its fit, and waits for the next one with the same environment. A request of a fit that is gone ends."""

    def __init__(self) -> None:
        self._lost, self.environment = True, _told()
        super().__init__()
        self._lost = False

    def send(self, text: str) -> None:
        self._lost = True
        super().send(text)
        self._lost = False

    def answer(self) -> Answer:
        self._lost = True
        answer = super().answer()
        self._lost = False
        return answer

    def kill(self) -> None:
        """Its fit is gone: the thread that waits for the answer hands the process on when it has come."""

    def stop(self) -> None:
        if self._lost:
            self.end()
        else:
            _idle.append(self)

    def end(self) -> None:
        super().kill()
        super().stop()

    def is_alive(self) -> bool:
        return self._process.poll() is None


def _told() -> dict[str, str]:
    return {name: value for name, value in planner_process._environment().items() if name not in _NOT_ITS_OWN}


def kept_child() -> _RealChild:
    for child in [*_idle]:
        if child.environment == _told():
            _idle.remove(child)
            if child.is_alive():
                return child
            child.end()
    return KeptChild()


def take_less_effort() -> None:
    """For the rest of this process."""
    for name, value in LESS_EFFORT.items():
        setattr(tuning, name, value)
    planner_process._command = _command


class QuickPlanner:
    """A pytest plugin."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        if item.nodeid.startswith(AS_IT_IS):
            return (yield)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in LESS_EFFORT.items():
                patch.setattr(tuning, name, value)
            patch.setattr(planner_process, "_command", _command)
            patch.setattr(planner_process, "_Child", kept_child)
            return (yield)

    def pytest_sessionfinish(self) -> None:
        while _idle:
            _idle.pop().end()
