"""Progress on stderr, so that stdout stays for results; silent where nobody watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console


@contextmanager
def stages(*names: str) -> Iterator[Callable[[], None]]:
    """Names of a job's stages, shown as they pass; inside, call what you get when the next one begins."""
    with _bar(progress.SpinnerColumn(), progress.TextColumn("lowtide: {task.description}")) as bar:
        task, rest = bar.add_task(names[0], total=len(names)), iter(names[1:])
        yield lambda: bar.update(task, description=next(rest), advance=1)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar; inside, call what you get with how many are done and how many there are."""
    columns = progress.TextColumn("lowtide: {task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()
    with _bar(*columns) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar(*columns: progress.ProgressColumn) -> progress.Progress:
    hidden = not sys.stderr.isatty()
    elapsed = progress.TimeElapsedColumn()
    return progress.Progress(*columns, elapsed, console=Console(stderr=True), transient=True, disable=hidden)
