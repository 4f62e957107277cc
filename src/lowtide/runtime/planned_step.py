"""A plan at hand: what it was made from, the shapes it is for, and the tape that carries it out."""

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.runtime.call_shapes import CallShape, shape_of_signature
from lowtide.tape.program import TapedCall
from lowtide.tape.tape import Tape

_DRIFT = 0.02  # of the dropped tensors: so many ops that did not come as planned are worth another plan


@dataclass
class PlannedStep:
    """A plan at hand, and the tape that carries it out.

    Attributes:
        shapes: Of each call of the model in the step, in order.
        trace_s, measure_s: How long those took; None for a step that was watched.
        last_served: Shape of the first call of the step that ran under it last.
        mismatched: Ops that did not come as planned, when last looked at.
    """

    plan: Plan
    graph: StepGraph
    costs: Costs
    shapes: tuple[CallShape, ...]
    tape: Tape
    trace_s: float | None = None
    measure_s: float | None = None
    last_served: CallShape | None = None
    mismatched: int = 0

    @property
    def is_derived(self) -> bool:
        """Nobody has watched a step of its shape."""
        return "derived" in self.graph.provenance

    @property
    def calls(self) -> list[TapedCall]:
        return self.tape.program.root.children.get("", [])

    @property
    def keeps_everything(self) -> bool:
        return self.tape.program.keeps_everything

    def has_drifted(self) -> bool:
        """Many ops since the last look did not come as planned."""
        new = self.tape.counts.mismatched - self.mismatched
        self.mismatched = self.tape.counts.mismatched
        return new > _DRIFT * max(1, sum(bool(op.drops) for op in self.tape.program.ops))


def shapes_of_graph(calls: Sequence[str]) -> tuple[CallShape, ...]:
    """Shapes of a graph's ``calls``."""
    return tuple(map(shape_of_signature, calls))
