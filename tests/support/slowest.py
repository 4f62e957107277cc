"""``pytest --report-slowest=CONTRIBUTING.md``: the slowest tests and the largest processes, written into a page."""

import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROWS = 50
BEGIN, END = "<!-- slowest tests -->\n", "<!-- /slowest tests -->\n"
_CPU_S, _PEAK = "processor seconds", "peak of the process"
MIB_OF_KIB = 1 << 10


def _processor_s() -> float:
    of = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in of)


def _peak_mib() -> int:
    """Of this process and of the largest that it has waited for."""
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(who).ru_maxrss for who in both) // MIB_OF_KIB


class SlowestTests:
    """A pytest plugin. Seconds are a test's with the fixtures that it was the first to ask for, all its cases together.

    They come with the reports, from all processes that run tests (xdist's workers). Wall time, so: on a quiet machine.
    """

    def __init__(self, page: str) -> None:
        self._page = Path(page)
        self._cases: Counter[str] = Counter()
        self._wall_s: Counter[str] = Counter()
        self._cpu_s: Counter[str] = Counter()
        self._peak_mib = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            report.user_properties = [*report.user_properties, (_PEAK, _peak_mib())]
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        item.user_properties.append((_CPU_S, -_processor_s()))
        return (yield)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        item.user_properties.append((_CPU_S, _processor_s()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("[")[0].removeprefix("tests/")
        self._wall_s[test] += report.duration
        if report.when == "teardown":
            self._cases[test] += 1
            self._cpu_s[test] += sum(value for name, value in report.user_properties if name == _CPU_S)
            self._peak_mib = max(self._peak_mib, dict(report.user_properties).get(_PEAK, 0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ and self._cases:
            self._page.write_text(replaced(self._page.read_text(), self.table()))

    def table(self) -> str:
        total_s = sum(self._wall_s.values())
        rows = ["| s | processor s | cases | test |", "|---:|---:|---:|---|"]
        rows += [
            f"| {wall_s:.1f} | {self._cpu_s[test]:.1f} | {self._cases[test]} | {test.replace('::', ' ')} |"
            for test, wall_s in self._wall_s.most_common(ROWS)
        ]
        listed_s = sum(wall_s for _, wall_s in self._wall_s.most_common(ROWS))
        return (
            f"{self._cases.total()} tests took {total_s / 60:.1f} minutes of one worker; the {ROWS} slowest took "
            f"{listed_s / max(total_s, 1e-9):.0%} of it. The largest process had {self._peak_mib} MiB.\n\n"
            + "\n".join(rows)
            + "\n"
        )


def replaced(page: str, table: str) -> str:
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise pytest.UsageError(f"--report-slowest: the page has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
