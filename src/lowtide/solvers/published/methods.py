"""The published methods, by the name under which ``solve`` knows them."""

from __future__ import annotations

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.published.every_n import every_n
from lowtide.solvers.published.full import full
from lowtide.solvers.published.knapsack import knapsack
from lowtide.solvers.published.lazy_candidates import LazyCandidate
from lowtide.solvers.published.revolve import revolve
from lowtide.solvers.published.rotor import rotor
from lowtide.solvers.published.selective import selective
from lowtide.solvers.published.sqrt_n import sqrt_n

CLASSICS = ("none", "full", "every_n", "sqrt_n", "selective", "revolve", "rotor", "knapsack")
# These have a plan for each budget; with the option named here one of their plans can be asked for without a budget.
BUDGETED = {"revolve": "n", "rotor": None, "knapsack": "ratio"}


def classic(graph: StepGraph, method: str, n: int | None = None) -> dict[int, str]:
    """Actions of a classic that has one plan, whatever the budget.

    Raises:
        ValueError: the graph has no repeated layers and the method needs them, or ``n`` makes no sense.
    """
    if method == "none":
        return complete_actions(graph, ())
    if method == "every_n":
        return every_n(graph, 2 if n is None else n)
    return {"full": full, "sqrt_n": sqrt_n, "selective": selective}[method](graph)


def lazy_candidates(
    graph: StepGraph, costs: Costs, method: str, *, n: int | None = None, ratio: float | None = None
) -> list[LazyCandidate]:
    """Every plan that a classic has to offer.

    Raises:
        ValueError: the graph has no repeated layers and the method needs them, or ``n`` or ``ratio`` makes no sense.
    """
    if method == "revolve":
        return revolve(graph, costs, n)
    if method == "rotor":
        return rotor(graph, costs)
    if method == "knapsack":
        return knapsack(graph, costs, ratio)
    actions = classic(graph, method, n)
    return [LazyCandidate(costs.plain_step_ms, graph.resident_bytes, lambda: Candidate(actions))]


def classic_actions(graph: StepGraph) -> list[dict[int, str]]:
    """The actions of every classic that has one plan and applies to ``graph``: starting points for a search."""
    found = []
    for method in CLASSICS:
        if method in BUDGETED:
            continue
        try:
            found.append(classic(graph, method))
        except ValueError:  # no layer repeats
            continue
    return found
