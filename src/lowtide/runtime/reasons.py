"""What the user should know of a fitted model: one line each, told once."""

import logging

from lowtide.tape.program import TapedOp

logger = logging.getLogger("lowtide")


class Reasons:
    """Lines in the order in which they were told. It refers to nothing else, so whoever tells makes no cycle.

    Attributes:
        lines: So far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._latest: dict[str, str] = {}

    def say(self, reason: str) -> None:
        """Log it as a warning, the first time."""
        if reason not in self.lines:
            self.lines.append(reason)
            logger.warning("lowtide: %s", reason)

    def say_latest(self, subject: str, reason: str) -> None:
        """As ``say``; what was said of ``subject`` before is no longer so."""
        before = self._latest.get(subject)
        if before in self.lines:
            self.lines.remove(before)
        self._latest[subject] = reason
        self.say(reason)

    def withdraw(self, reason: str) -> None:
        """It is no longer so."""
        self.lines[:] = [line for line in self.lines if line != reason]

    def correct(self, before: str, reason: str) -> None:
        """The same with another number, which is not told again."""
        self.lines[:] = [reason if line == before else line for line in self.lines]

    def say_saved(self, op: TapedOp) -> None:
        """A replay of ``op`` gave other bits."""
        self.say(f"{op.name} in {op.where or 'the model'} gives other bits when it runs again: saved from now on")
