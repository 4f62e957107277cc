"""Memory over one step, the plain step beside the planned one, ready to be drawn."""

from dataclasses import dataclass, replace

from lowtide.graph.costs import Costs, Link
from lowtide.graph.facts import StepFacts, step_facts
from lowtide.graph.step_graph import RUN, StepGraph
from lowtide.plan import ACTIONS, SAVE, Plan
from lowtide.simulation.simulator import simulate


@dataclass(frozen=True)
class Curves:
    """Two curves over the same moments of the step.

    Attributes:
        at: Moments: milliseconds of the plain step, or ops run so far where no costs are at hand.
        axis: What ``at`` counts.
        plain_bytes, planned_bytes: Most live bytes from each moment to the next, absolute.
        backward_at: Where backward begins, on the same axis.
        lanes: By action, bytes of the stored tensors that it is taken for, by slice of the step: in forward where they
            are made, in backward where what is not saved is first brought back.
    """

    at: tuple[float, ...]
    axis: str
    plain_bytes: tuple[int, ...]
    planned_bytes: tuple[int, ...]
    backward_at: float
    lanes: dict[str, tuple[int, ...]]


_LANE_SLICES = 160


def memory_curves(graph: StepGraph, plan: Plan, costs: Costs | None = None, *, points: int = 900) -> Curves:
    """Simulate both steps and return their memory, thinned to ``points`` without losing a peak.

    Raises:
        PlanMismatchError: ``plan`` was made for another graph.
    """
    op_ms = costs or Costs(op_ms=(0.0,) * len(graph.ops))
    # Which bytes live when does not depend on how fast a link is.
    op_ms = replace(op_ms, links={**dict.fromkeys(plan.tiers, Link(1.0, 1.0)), **op_ms.links})
    planned, plain = simulate(graph, op_ms, plan), simulate(graph, op_ms, {})
    at = [0.0]  # when each event begins, and the end: an op takes its memory when it starts
    for kind, number in graph.events:
        ms = 0.0 if kind != RUN else 1.0 if costs is None else costs.op_ms[number]
        at.append(at[-1] + ms)
    facts = step_facts(graph)
    size = max(1, -(-len(graph.events) // points))
    starts = range(0, len(graph.events), size)
    return Curves(
        at=(*(at[i] for i in starts), at[-1]),
        axis="operators run" if costs is None else "milliseconds of the plain step",
        plain_bytes=(*(max(plain.event_peak_bytes[i : i + size]) for i in starts), plain.live_bytes[-1]),
        planned_bytes=(*(max(planned.event_peak_bytes[i : i + size]) for i in starts), planned.live_bytes[-1]),
        backward_at=at[facts.first_backward_run],
        lanes=_lanes(plan, facts, at),
    )


def _lanes(plan: Plan, facts: StepFacts, at: list[float]) -> dict[str, tuple[int, ...]]:
    end = at[-1] or 1.0
    lanes: dict[str, list[int]] = {}
    for d in plan.decisions:
        if not d.stored:
            continue
        lane = lanes.setdefault(d.action, [0] * _LANE_SLICES)
        events = [facts.birth.get(d.storage), None if d.action == SAVE else facts.first_use.get(d.storage)]
        for event in (e for e in events if e is not None):
            lane[min(int(at[event] / end * _LANE_SLICES), _LANE_SLICES - 1)] += d.bytes
    return {action: tuple(lanes[action]) for action in ACTIONS if action in lanes}
