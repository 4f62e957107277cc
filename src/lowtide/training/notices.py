"""What the user should know of a fitted model: one line each, told once."""

import logging

from lowtide.errors import TierError
from lowtide.graph.function_ops import function_groups
from lowtide.graph.step_graph import StepGraph
from lowtide.step.kinds_of_calls import ANEW
from lowtide.tape.program import TapedOp
from lowtide.units import format_bytes

logger = logging.getLogger("lowtide")
_TOLD_SHARE = 0.01  # of what a Function's calls store; a loss outside the model, for example, is less


class Notices:
    """Lines in the order in which they were told. It refers to nothing else, so whoever tells makes no cycle.

    Attributes:
        lines: So far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._latest: dict[str, str] = {}
        self._withdrawn: set[str] = set()
        self._checkpointed = ""  # what was told of

    def say(self, reason: str) -> None:
        """Log it as a warning, the first time; not again where it is so again after ``withdraw``."""
        if reason not in self.lines:
            self.lines.append(reason)
            if reason not in self._withdrawn:
                logger.warning("lowtide: %s", reason)

    def note(self, reason: str) -> None:
        """For those who ask; it is logged nowhere."""
        if reason not in self.lines:
            self.lines.append(reason)

    def say_latest(self, subject: str, reason: str) -> None:
        """As ``say``; what was said of ``subject`` before is no longer so."""
        before = self._latest.get(subject)
        if before in self.lines:
            self.lines.remove(before)
        self._latest[subject] = reason
        self.say(reason)

    def say_first(self, subject: str, reason: str) -> None:
        """As ``say`` for the first of ``subject``; a later one takes its place among the lines, and is not logged."""
        before, self._latest[subject] = self._latest.get(subject), reason
        if before in self.lines:
            self.correct(before, reason)
        else:
            self.say(reason)

    def withdraw(self, reason: str) -> None:
        """It is no longer so."""
        self._withdrawn.update(line for line in self.lines if line == reason)
        self.lines[:] = [line for line in self.lines if line != reason]

    def correct(self, before: str, reason: str) -> None:
        """The same with another number, which is not told again."""
        self.lines[:] = [reason if line == before else line for line in self.lines]

    def say_saved(self, op: TapedOp) -> None:
        """A replay of ``op`` gave other bits, or its proof found something else."""
        why = next(op.calls.reasons(), "gives other bits when it runs again")
        self.say(f"{op.name} in {op.where or 'the model'} {why}: saved from now on")

    def say_proven_anew(self, op: TapedOp) -> None:
        """Calls at the place of ``op`` are given other numbers in each step."""
        self.say(f"{op.name} in {op.where or 'the model'} {ANEW}")

    def say_not_moved(self, refusal: TierError) -> None:
        """A tensor that was to move stays, since its tier has no room."""
        what, _, way_out = str(refusal).rstrip(".").partition("\n")
        self.say_latest("refusal", f"a tensor that was to move stayed on the device: {what} {way_out}".rstrip())

    def say_checkpointed(self, module: str, share_of_time: float) -> None:
        """Code of the model's own checkpoints: what that costs, of the step that was watched first."""
        if self._checkpointed:
            return
        self._checkpointed = module
        self.say(
            f"{module} is checkpointed without a switch (torch.utils.checkpoint): nothing inside such calls is "
            f"planned, and what backward runs again took {share_of_time:.0%} of the step that was watched. Leave that "
            "out, and a plan can recompute less"
        )

    def say_other_hooks(self, name: str) -> None:
        """What autograd stores in calls of the model, or in parts of them, goes to hooks of others; "": it does not."""
        if name:
            self.say(
                f"{name} is around the model or a part of it: its saved-tensor hooks take what autograd stores there, "
                "so no plan drops or moves that, and its memory and time are as without lowtide. Leave it out: a plan "
                "keeps the budget, and offload= moves tensors"
            )

    def say_of(self, graph: StepGraph) -> None:
        """What plans of ``graph`` lack: the optimizer's state, calls of autograd Functions that may run again."""
        if unknown := graph.provenance.get("optimizer"):
            self.say(unknown)
        for group in function_groups(graph):
            if group.why_kept and group.kept_bytes >= _TOLD_SHARE * group.stored_bytes:
                self.say(
                    f"{group.name} {group.why_kept}: the {format_bytes(group.kept_bytes)} that its calls store stay"
                )
