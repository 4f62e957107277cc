"""Progress on stderr, so that stdout stays for results; silent where nobody watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Stages:
    """Names of a job's stages, shown as they pass."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._at = 0
        console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(), TextColumn("lowtide: {task.description}"), TimeElapsedColumn(),
            console=console, transient=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip

    def __enter__(self) -> Self:
        self._progress.__enter__()
        self._task = self._progress.add_task(self._names[0], total=len(self._names))
        return self

    def next(self) -> None:
        self._at += 1
        self._progress.update(self._task, description=self._names[self._at], completed=self._at)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar; inside, call what you get with how many are done and how many there are."""
    bar = Progress(
        TextColumn("lowtide: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
