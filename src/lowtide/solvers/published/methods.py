"""The published methods, by the name under which ``solve`` knows them: add a method to one of the tables here."""

from collections.abc import Callable
from dataclasses import replace

from lowtide.graph.facts import passes
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE
from lowtide.solvers import tuning
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.published.applying import applying, left_out_where_it_fails
from lowtide.solvers.published.every_n import every_n
from lowtide.solvers.published.full import full
from lowtide.solvers.published.knapsack import knapsack
from lowtide.solvers.published.lazy_candidates import LazyCandidate
from lowtide.solvers.published.revolve import revolve
from lowtide.solvers.published.rotor import rotor
from lowtide.solvers.published.selective import selective
from lowtide.solvers.published.sqrt_n import sqrt_n
from lowtide.solvers.search_context import Evaluated, SearchContext

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
    with applying(method):
        if method == "revolve":
            found = revolve(context, n)
        elif method == "rotor":
            found = rotor(context)
        elif method == "knapsack":
            found = knapsack(context, ratio)
        else:
            graph = context.graph
            actions = every_n(graph, n) if method == "every_n" and n is not None else FIXED[method](graph)
            found = [LazyCandidate(context.costs.plain_step_ms, graph.start_bytes, lambda: Candidate(actions))]
        return [replace(lazy, method=method) for lazy in found]


def fixed_plans(context: SearchContext) -> list[Evaluated]:
    """The plain step, then the plan of every method in ``FIXED`` that applies: starting points for a search.

    Where several backward passes need the same, some plans make it again in each.
    """
    graph, found = context.graph, [context.plain]
    again = sorted({*tuning.PASS_REPLAYS, passes(graph)}) if passes(graph) > 1 else ()
    for method, actions_of in FIXED.items():
        if method == "none":
            continue
        with left_out_where_it_fails(method):
            actions = actions_of(graph)
            recomputed = [s for s, action in actions.items() if action == RECOMPUTE]
            counts = [{}, *(dict.fromkeys(recomputed, n) for n in again)]
            found += [context.simulated(Candidate(actions, replays=count)) for count in counts]
    return found


def chain_schedules(context: SearchContext) -> list[LazyCandidate]:
    """Schedules of the chain methods, which may replay an op many times; none where they do not apply."""
    found: list[LazyCandidate] = []
    for method in ("rotor", "revolve"):
        with left_out_where_it_fails(method):
            found += lazy_candidates(context, method)
    return found
