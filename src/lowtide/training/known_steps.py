"""What watched steps have shown that their graphs do not say, for the plans made of these graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lowtide.graph.step_graph import StepGraph
from lowtide.tape.tape import Tape
from lowtide.training.plan_queue import Shapes
from lowtide.training.planned_step import PlannedStep


@dataclass(frozen=True)
class KnownStep:
    """Of steps whose calls have the same shapes.

    Attributes:
        num_nodes: How many autograd nodes each call made.
        kind: See ``RunningStep.kind``.
        graph: The last that was watched; None: its proofs are not known.
        flags: That step's global ones.
        proven_ops: Those of the graph that need no other proof under these ``flags``.
    """

    num_nodes: Mapping[int, int]
    kind: int | None = None
    graph: StepGraph | None = None
    flags: tuple | None = None
    proven_ops: frozenset[int] = frozenset()

    def tell(self, tape: Tape, graph: StepGraph) -> None:
        """``tape`` carries out a plan of ``graph``: what is proven of its ops."""
        if graph is self.graph and self.flags is not None:
            tape.program.note_proven(self.flags, self.proven_ops)


_UNKNOWN = KnownStep({})


class KnownSteps:
    """Of one model, by the shapes of a step's calls."""

    def __init__(self) -> None:
        self._by_shapes: dict[Shapes, KnownStep] = {}

    def of(self, shapes: Shapes) -> KnownStep:
        """What is known; nothing, where no step was watched."""
        return self._by_shapes.get(shapes, _UNKNOWN)

    def note(self, shapes: Shapes, known: KnownStep) -> None:
        """A step was watched.

        Its own proofs are few, since a step proves no op again that an earlier one has. So what was proven in a step
        that differs in that it had gradients before, or had none, counts as well.
        """
        adds = shapes[0].has_gradients
        twin = self.of(tuple(s.without_gradients() if adds else s.with_gradients() for s in shapes))
        if twin.flags == known.flags and _forward_of(twin.graph) == _forward_of(known.graph):
            known = replace(known, proven_ops=known.proven_ops | twin.proven_ops)
        self._by_shapes[shapes] = known

    def follow(self, planned: PlannedStep, shapes: Shapes, graph: StepGraph) -> None:
        """Steps of these ``shapes`` run the ops of ``planned``, and ``graph`` is theirs: what is known of it is so."""
        program = planned.tape.program
        known = replace(self.of(shapes), num_nodes=planned.num_nodes, kind=self.of(planned.shapes).kind)
        if program.flags is not None:
            known = replace(known, graph=graph, flags=program.flags, proven_ops=frozenset(program.proven_ops))
        self._by_shapes[shapes] = known

    def change_graphs(self, changed: Callable[[str, StepGraph], StepGraph]) -> None:
        """As ``PlanQueue`` does; the ops of all graphs are the same."""
        for shapes, known in self._by_shapes.items():
            if known.graph is not None:
                self._by_shapes[shapes] = replace(known, graph=changed(shapes[0].pattern, known.graph))

    def clear(self) -> None:
        self._by_shapes.clear()


def _forward_of(graph: StepGraph | None) -> list[tuple[str, dict]] | None:
    """Operators and arguments of a step's forward ops."""
    return None if graph is None else [(op.name, graph.signatures[op.signature]) for op in graph.forward_ops]
