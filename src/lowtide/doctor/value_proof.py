"""The step as it is set up against the same step without checkpointing, bit by bit; and where they part.

Checkpointed calls are made plain where they all pass (``checkpoint_seam``), so flags, policies and wrappers stay as
they are. Both steps start from the same parameters, buffers and random state. The first divergence is looked for inside
the step as it is: the first op whose second run, in the recomputation, gave other bits than its first.

Where the plain step does not fit, each call is made plain alone, and where not even that fits the batch is cut down.

What it cannot see: compiled regions, checkpointing that does not go through ``torch.utils.checkpoint``, and steps that
differ from run to run by themselves.
"""

from dataclasses import dataclass

from lowtide.doctor.outcome import distance
from lowtide.doctor.step_listener import CheckpointCall, SeenOp
from lowtide.doctor.step_under_test import StepUnderTest


@dataclass(frozen=True)
class Divergence:
    """Where recomputing gave something else first."""

    call: CheckpointCall
    before: SeenOp
    after: SeenOp | None

    def __str__(self) -> str:
        what = f"{self.before.name} in {self.before.path or 'the model'} ({self.before.line})"
        if self.after is not None and self.after.name != self.before.name:
            return f"{what} ran in forward, {self.after.name} ({self.after.line}) when recomputed"
        if self.after is not None and self.after.shapes != self.before.shapes:
            return f"{what} made {_shapes(self.before)} in forward, {_shapes(self.after)} when recomputed"
        return f"{what} gave other bits when recomputed"


@dataclass(frozen=True)
class ValueProof:
    """What the comparison showed.

    Attributes:
        equal: Every bit of loss, gradients, buffers and generator is the plain step's, but for what differs from run to
            run by itself.
        differing: Names of what is not.
        distance: The largest relative distance of a gradient.
        worst: Name of the parameter it belongs to.
        missing: Parameters that have a gradient in the plain step and none as it is set up.
        divergence: The first one, None where none was seen.
        why_not: Why it could not look; "" where it could.
    """

    equal: bool
    differing: tuple[str, ...] = ()
    distance: float = 0.0
    worst: str = ""
    missing: tuple[str, ...] = ()
    divergence: Divergence | None = None
    why_not: str = ""


def prove(setup: StepUnderTest) -> ValueProof:
    """Compare the step with its plain twin. Restores everything it touches."""
    if setup.is_compiled:
        return ValueProof(
            equal=False, why_not="compiled code: its checkpointed regions cannot be made plain one by one"
        )
    if setup.failure is not None:
        return ValueProof(equal=False, divergence=first_divergence(setup), why_not=f"the step fails: {setup.failure}")
    if setup.unsteady:
        names = ", ".join(setup.differing_again[:3])
        return ValueProof(
            equal=False,
            why_not=f"the step differs from run to run by itself ({names}), so nothing can be compared",
        )
    differing = [name for name in setup.as_it_is.differing(setup.plain) if name not in setup.differing_again]
    far = {n: distance(setup.as_it_is.gradients[n], g) for n, g in setup.plain.gradients.items()}
    worst = max(far, key=far.__getitem__, default="")
    missing = [
        n for n, g in setup.plain.gradients.items() if g is not None and g.any() and setup.as_it_is.gradients[n] is None
    ]
    return ValueProof(
        equal=not differing, differing=tuple(differing), distance=far.get(worst, 0.0), worst=worst,
        missing=tuple(missing), divergence=first_divergence(setup) if differing else None,
    )  # fmt: skip


def first_divergence(setup: StepUnderTest) -> Divergence | None:
    """In the order of forward."""
    for call in setup.calls:
        if (found := call.divergence) is not None:
            return Divergence(call, *found)
    return None


def _shapes(op: SeenOp) -> str:
    return " and ".join(str(list(shape)) for shape in op.shapes)
