"""A plan at hand for steps of some shapes, its tape, and a check by autograd nodes whether a step ran other ops."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from lowtide.graph.costs import Costs
from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import RUN, StepGraph
from lowtide.plan import Plan
from lowtide.shapes.call_shapes import CallShape, shape_of_signature
from lowtide.simulation.allocator_peaks import counted_from
from lowtide.simulation.caching_allocator import Segment
from lowtide.simulation.simulator import simulate
from lowtide.tape.planned_bytes import PlannedBytes
from lowtide.tape.program import TapedCall
from lowtide.tape.tape import Tape

_OTHER_NODES = 0.02  # of a call's autograd nodes: fewer more or less hold little


@dataclass(eq=False)
class PlannedStep:
    """A plan at hand, and the tape that carries it out.

    Attributes:
        shapes: Of each call of the model in the step, in order.
        trace_s, measure_s: How long those took; None for a step that was watched.
        last_served: Shape of the first call of the step that ran under it last.
        diverged: That step ran other ops than planned.
        begun: A step has begun under it.
        counted_peak_bytes: Of its first step, by the device's allocator; None: not counted, or no step has run.
        state_checks: How often the optimizer's state was found to be what the plan knows.
        saw_segments: Its counted peak was foreseen from what the allocator held before its first step.
        fits_beside_bytes: So much was on the device before a step with gradients, and the plan fitted beside it.
        num_nodes: Of autograd, by each call: what the watched step made, else the first real step that matched.
        kind: Of the watched step; None: there was none, or later steps took more than the plan is worth.
        told_peak_bytes: What was said of the plan when it was made. What is foreseen later, nobody was told.
    """

    plan: Plan
    graph: StepGraph
    costs: Costs
    shapes: tuple[CallShape, ...]
    tape: Tape
    trace_s: float | None = None
    measure_s: float | None = None
    last_served: CallShape | None = None
    diverged: bool = False
    begun: bool = False
    counted_peak_bytes: int | None = None
    state_checks: int = 0
    saw_segments: bool = False
    fits_beside_bytes: int = 0
    num_nodes: Mapping[int, int] = field(default_factory=dict)
    kind: int | None = None
    told_peak_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.told_peak_bytes = self.plan.measurable_peak_bytes

    @property
    def is_derived(self) -> bool:
        """Nobody has watched a step of its shape."""
        return "derived" in self.graph.provenance

    @property
    def is_known(self) -> bool:
        """A real step ran the ops of the plan."""
        return bool(self.num_nodes)

    @property
    def calls(self) -> list[TapedCall]:
        return self.tape.program.root.children.get("", [])

    @property
    def keeps_everything(self) -> bool:
        return self.tape.program.keeps_everything

    @cached_property
    def needs_whole_step(self) -> bool:
        """The tape has something to do outside the model's calls.

        A drop, or a backward that saves tensors again; where tensors move, it counts unpacks of the loss.
        """
        facts = step_facts(self.graph)
        saved = (at for at in facts.packed.values() if at < facts.first_backward_run)
        saves_again = max(saved, default=-1) > facts.backward_start and not self.keeps_everything
        return self.tape.program.root.has_actions or saves_again or bool(self.plan.tiers)

    @cached_property
    def planned_bytes(self) -> PlannedBytes:
        """What lives before and after each forward op."""
        before_bytes = self.graph.before_bytes  # gradients that go in the step are among it before the first op
        live_bytes = simulate(self.graph, self.costs, self.plan).live_bytes
        made = [0, *(max(0, live - before_bytes) for live in live_bytes)]
        at = {number: event for event, (kind, number) in enumerate(self.graph.events) if kind == RUN}
        events = [at[op.id] for op in self.graph.forward_ops]
        peak = self.plan.measurable_peak_bytes - before_bytes
        return PlannedBytes([made[event] for event in events], [made[event + 1] for event in events], peak)

    def foresee_from(self, segments: Iterable[Segment]) -> None:
        """The first step begins with these in the allocator: which blocks are free decides what it counts.

        The planner's allocator holds what is resident and nothing else.
        """
        plan = self.plan
        if plan.predicted_counted_peak_bytes is not None:
            counted = counted_from(segments, self.graph, plan.action_of(), plan.replays_of(), plan.moves)
            self.plan = replace(plan, predicted_counted_peak_bytes=counted)

    def made_bytes_after(self, op: int) -> int:
        """What a step as planned has made and still holds after forward op ``op``; 0 before the first."""
        return self.planned_bytes.after[op] if op >= 0 else 0

    def serves(self, at: int, shape: CallShape) -> bool:
        """Whether the step's call at place ``at`` may be one of ``shape``: the step itself was found to fit."""
        return self.shapes[at].with_gradients().covers(shape)

    def last_op_before(self, position: int) -> int:
        """The last planned op before the step's call at ``position``; -1: there is none."""
        at = position % len(self.shapes)  # calls whose backward never came may be among them
        return max((call.last_op for call in self.calls[:at]), default=-1)

    def makes_other_nodes(self, made: dict[int, int]) -> bool:
        """Whether calls of a step made more or fewer autograd nodes than in the step that was watched.

        Where a plan has nothing to do the tape sees no ops, and this shows that they were others.
        """
        if not self.num_nodes or made == self.num_nodes:
            return False
        return any(abs(n - self.num_nodes.get(at, n)) > _OTHER_NODES * n for at, n in made.items())


def shapes_of_graph(graph: StepGraph) -> tuple[CallShape, ...]:
    """Shapes of a graph's ``calls``."""
    shapes = map(shape_of_signature, graph.calls)
    has_gradients = graph.before["gradients"] or graph.gone_bytes
    return tuple(shape.with_gradients() if has_gradients else shape for shape in shapes)
