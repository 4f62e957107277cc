"""A method with many plans lists them cheaply; they are worked out and judged only as far as a budget asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import PACK, RELEASE, RUN, StepGraph, once_per_graph
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers.candidate import Candidate


@dataclass(frozen=True)
class LazyCandidate:
    """One plan of a method.

    Attributes:
        step_ms: At most so long: every replay that the plan allows for takes place.
        floor_bytes: The peak is no less: what is saved lives together when backward begins.
    """

    step_ms: float
    floor_bytes: int
    candidate: Callable[[], Candidate]


def planned_ms(graph: StepGraph, costs: Costs, replay_ms: float, recorded: int) -> float:
    """Step time with ``replay_ms`` of replays and ``recorded`` ops that leave a recipe."""
    if not recorded:
        return costs.plain_step_ms
    tape_us = costs.dispatch_us * len(graph.forward_ops) + costs.record_us * recorded
    return costs.plain_step_ms + replay_ms + tape_us / 1e3


@once_per_graph
def stored_at_backward_start(graph: StepGraph) -> frozenset[int]:
    """Storages made in forward that autograd has stored when backward begins."""
    held: set[int] = set()
    for kind, number in graph.events:
        if kind == RUN and graph.ops[number].backward:
            break
        if kind == PACK:
            held.add(number)
        elif kind == RELEASE:
            held.discard(number)
    return frozenset(graph.saved[h] for h in held) & graph.stored


def fastest_within(
    graph: StepGraph, costs: Costs, offers: Sequence[LazyCandidate], budget_bytes: int | None
) -> Candidate | None:
    """The fastest offer whose simulated peak fits, if one does."""
    for offer in sorted(offers, key=lambda o: (o.step_ms, o.floor_bytes)):
        if budget_bytes is None:
            return offer.candidate()
        if offer.floor_bytes <= budget_bytes:
            candidate = offer.candidate()
            if _peak_bytes(graph, costs, candidate) <= budget_bytes:
                return candidate
    return None


def least_peak(graph: StepGraph, costs: Costs, offers: Sequence[LazyCandidate]) -> Candidate | None:
    """The candidate with the least simulated peak; None where ``offers`` is empty."""
    least: tuple[int, Candidate] | None = None
    for offer in sorted(offers, key=lambda o: o.floor_bytes):
        if least is None or offer.floor_bytes < least[0]:
            candidate = offer.candidate()
            peak_bytes = _peak_bytes(graph, costs, candidate)
            if least is None or peak_bytes < least[0]:
                least = peak_bytes, candidate
    return None if least is None else least[1]


def _peak_bytes(graph: StepGraph, costs: Costs, candidate: Candidate) -> int:
    return simulate_actions(graph, costs, candidate.actions, candidate.replays).peak_bytes
