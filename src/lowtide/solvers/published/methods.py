"""The published methods, by the name under which ``solve`` knows them: add a method to one of the tables here."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lowtide.errors import LowtideError
from lowtide.graph.facts import passes
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE
from lowtide.solvers import tuning
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

logger = logging.getLogger("lowtide")

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
    with _applying(method):
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
    for method, actions_of in FIXED.items():
        with suppress(ValueError), _applying(method):
            found.append(actions_of(graph))
    return found


def fixed_candidates(graph: StepGraph) -> list[Candidate]:
    """``fixed_actions`` as candidates. Where several backward passes need the same, some make it again in each."""
    again = sorted({*tuning.PASS_REPLAYS, passes(graph)}) if passes(graph) > 1 else ()
    every = fixed_actions(graph)
    return [
        *map(Candidate, every),
        *(Candidate(actions, replays=dict.fromkeys(_recomputed(actions), n)) for actions in every for n in again),
    ]


def _recomputed(actions: Actions) -> list[int]:
    return [s for s, action in actions.items() if action == RECOMPUTE]


def chain_schedules(context: SearchContext) -> list[LazyCandidate]:
    """Schedules of the chain methods, which may replay an op many times; none where they do not apply."""
    found: list[LazyCandidate] = []
    for method in ("rotor", "revolve"):
        with suppress(ValueError):
            found += lazy_candidates(context, method)
    return found


@contextmanager
def _applying(method: str) -> Iterator[None]:
    """A published method meets graphs that its authors did not think of. The exact search goes on without it.

    Raises:
        ValueError: it does not apply, as it says itself or as any error inside it shows.
    """
    try:
        yield
    except (ValueError, LowtideError):
        raise
    except Exception as error:
        logger.info("lowtide: method %s left out: %s: %s", method, type(error).__name__, error)
        raise ValueError(
            f"method={method!r} does not apply to this step: {type(error).__name__}: {error}.\n"
            'Use method="exact", which does.'
        ) from error
