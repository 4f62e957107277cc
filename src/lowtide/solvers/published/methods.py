"""The published methods, by the name under which ``solve`` knows them: add a method to one of the tables here."""

from collections.abc import Callable
from contextlib import suppress

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
from lowtide.solvers.search_context import SearchContext

Actions = dict[int, str]

# Methods with one plan, whatever the budget.
FIXED: dict[str, Callable[[StepGraph], Actions]] = {
    "none": lambda graph: complete_actions(graph, ()),
    "full": full,
    "every_n": every_n,
    "sqrt_n": sqrt_n,
    "selective": selective,
}
# Methods with a plan for each budget; with the option named here one of their plans can be had without a budget.
BUDGETED = {"revolve": "n", "rotor": None, "knapsack": "ratio"}
PUBLISHED = (*FIXED, *BUDGETED)


def lazy_candidates(
    context: SearchContext, method: str, *, n: int | None = None, ratio: float | None = None
) -> list[LazyCandidate]:
    """Every plan that a published method has.

    Raises:
        ValueError: the graph has no repeated layers and the method needs them, or ``n`` or ``ratio`` makes no sense.
    """
    if method == "revolve":
        return revolve(context, n)
    if method == "rotor":
        return rotor(context)
    if method == "knapsack":
        return knapsack(context, ratio)
    graph = context.graph
    actions = every_n(graph, n) if method == "every_n" and n is not None else FIXED[method](graph)
    return [LazyCandidate(context.costs.plain_step_ms, graph.start_bytes, lambda: Candidate(actions))]


def fixed_actions(graph: StepGraph) -> list[Actions]:
    """The actions of every method in ``FIXED`` that applies to ``graph``: starting points for a search."""
    found = []
    for actions_of in FIXED.values():
        with suppress(ValueError):  # no layer repeats
            found.append(actions_of(graph))
    return found


def chain_schedules(context: SearchContext) -> list[LazyCandidate]:
    """Schedules of the chain methods, which may replay an op many times; none where no layer repeats."""
    try:
        return [c for method in ("rotor", "revolve") for c in lazy_candidates(context, method)]
    except ValueError:
        return []
