"""``pytest --report-memory=MIB``: how far each process that runs tests has grown, and the tests at which it did."""

import os
import resource
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

_GROWTH = "growth of the process"
_KIB_OF_MIB = 1 << 10


class Growth(NamedTuple):
    """What one test did to the peaks of resident memory, MiB."""

    process: str
    test: str
    before_mib: int
    after_mib: int
    children_mib: int  # of the largest process that this one has waited for so far


def _peak_mib(who: int) -> int:
    return resource.getrusage(who).ru_maxrss // _KIB_OF_MIB


class MemoryGrowth:
    """A pytest plugin. Growth comes with the reports, from all processes that run tests (xdist's workers).

    A peak of a process never falls, so a test whose memory fits below it is not listed: what is listed first hides
    what comes later.

    Args:
        least_mib: Tests are listed from so much growth on.
    """

    def __init__(self, least_mib: int) -> None:
        self._least_mib = least_mib
        self._started_mib = _peak_mib(resource.RUSAGE_SELF)
        self._grown: dict[str, list[Growth]] = defaultdict(list)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[Any]:
        report = yield
        if call.when == "teardown":
            process = os.environ.get("PYTEST_XDIST_WORKER", "main")
            peak_mib, children_mib = _peak_mib(resource.RUSAGE_SELF), _peak_mib(resource.RUSAGE_CHILDREN)
            grown = Growth(process, item.nodeid, self._started_mib, peak_mib, children_mib)
            report.user_properties = [*report.user_properties, (_GROWTH, tuple(grown))]
            self._started_mib = peak_mib
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == _GROWTH:
                growth = Growth(*value)
                self._grown[growth.process].append(growth)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("memory")
        terminalreporter.write("\n".join(self.lines()) + "\n")

    def lines(self) -> list[str]:
        """For each process its peak, then the tests at which it grew, in the order in which they ran."""
        lines = []
        for process, tests in sorted(self._grown.items()):
            peak_mib, children_mib = (max(getattr(g, n) for g in tests) for n in ("after_mib", "children_mib"))
            lines.append(f"{process}: {peak_mib} MiB; its largest child {children_mib} MiB; {len(tests)} tests")
            grew = (g for g in tests if g.after_mib - g.before_mib >= self._least_mib)
            lines += [f"  +{g.after_mib - g.before_mib:4} to {g.after_mib:4}  {g.test}" for g in grew]
        return lines
