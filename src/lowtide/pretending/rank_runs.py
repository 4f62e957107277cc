"""Ranks that run one after another, each of which finds what those before it have sent."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from lowtide.pretending.command_run import CommandRun, SentObjects
from lowtide.pretending.settings import PretendError, PretendSettings

Run = Callable[[PretendSettings, SentObjects], CommandRun]


@dataclass
class RankRuns:
    """Runs ranks, and before them, as far as they are needed, those that tell them what they send.

    A stage of a pipeline asks the one before it what its inputs look like.
    """

    run: Run
    ran_before: set[int] = field(default_factory=set)

    def __enter__(self) -> RankRuns:
        self._made = tempfile.TemporaryDirectory(prefix="lowtide-ranks-")
        self._folder = Path(self._made.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._made.cleanup()

    @property
    def sent(self) -> SentObjects:
        """For a run that goes on to its end."""
        return SentObjects(self._folder)

    def of(self, settings: PretendSettings) -> CommandRun:
        """The run of ``settings.rank``."""
        while True:
            found = self.run(settings, self.sent)
            needs = found.seen.get("needs")
            if needs is None or not self._fetched(settings, needs["rank"], settings.rank, needs["count"], frozenset()):
                return found

    def _fetched(
        self, settings: PretendSettings, source: int, to: int, count: int, asked: frozenset[tuple[int, int, int]]
    ) -> bool:
        """Whether ``source`` has sent its ``count``-th list to ``to``, if need be in a run of its own."""
        message = self._folder / f"{source}-{to}-{count}"
        if message.is_file():
            return True
        if (source, to, count) in asked:
            return False
        print(f"lowtide: rank {source} runs first, for what it sends to rank {to}", file=sys.stderr, flush=True)
        self.ran_before.add(source)
        earlier = replace(
            settings, rank=source, time=False, clock=False, measured=None, history=False, snapshot=None, budget=None
        )
        while not message.is_file():
            needs = self.run(earlier, SentObjects(self._folder, (to, count))).seen.get("needs")
            if message.is_file():
                break
            if needs is None or not self._fetched(
                settings, needs["rank"], source, needs["count"], asked | {(source, to, count)}
            ):
                return False
        return True


def ranks_of(text: str) -> tuple[int, ...]:
    """``"3"``, ``"0,4,8"``, ``"0-7"``. Raises: PretendError: it is none of them."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        found = []
    if not found:
        raise PretendError(f"--rank {text!r}: write a rank, several as 0,4,8, or a range as 0-7.")
    return tuple(dict.fromkeys(found))
