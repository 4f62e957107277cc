"""A published method with many plans lists them cheaply; few are worked out and simulated for any one budget."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.published.applying import applying, left_out_where_it_fails
from lowtide.solvers.search_context import Evaluated, SearchContext


@dataclass(frozen=True)
class LazyCandidate:
    """A candidate that is not worked out yet.

    Attributes:
        step_ms: Upper bound of its step time: every replay that the plan allows for takes place.
        floor_bytes: Lower bound of its peak: what is saved lives together when backward begins.
        candidate: Works it out.
        method: The published method that it is of.
    """

    step_ms: float
    floor_bytes: int
    candidate: Callable[[], Candidate]
    method: str = ""


def ops_that_make(graph: StepGraph, wanted: Iterable[int], free: frozenset[int]) -> frozenset[int]:
    """Ops that make ``wanted`` out of what is not in ``free``."""
    ops: set[int] = set()
    left = list(wanted)
    while left:
        maker = graph.storages[left.pop()].op
        if maker is not None and maker not in ops:
            ops.add(maker)
            left += free.intersection(graph.ops[maker].reads)
    return frozenset(ops)


def planned_ms(context: SearchContext, replay_ms: float, recorded: int) -> float:
    """Step time with ``replay_ms`` of replays and ``recorded`` ops that leave a recipe."""
    costs = context.costs
    if not recorded:
        return costs.plain_step_ms
    tape_us = costs.dispatch_us * len(context.graph.forward_ops) + costs.record_us * recorded
    return costs.plain_step_ms + replay_ms + tape_us / 1e3


def fastest_within(
    context: SearchContext, candidates: Sequence[LazyCandidate], budget_bytes: int | None, *, for_search: bool = False
) -> Candidate | None:
    """The fastest candidate whose simulated peak is within the budget; None where none is.

    Args:
        for_search: A search starts from it: what turns out not to apply when it is worked out is left out.

    Raises:
        ValueError: the method does not apply.
    """
    for lazy in sorted(candidates, key=lambda c: (c.step_ms, c.floor_bytes)):
        if budget_bytes is not None and lazy.floor_bytes > budget_bytes:
            continue
        evaluated = _worked_out(context, lazy, for_search)
        if evaluated is not None and (budget_bytes is None or evaluated.peak_bytes <= budget_bytes):
            return evaluated.candidate
    return None


def least_peak(
    context: SearchContext, candidates: Sequence[LazyCandidate], *, for_search: bool = False
) -> Candidate | None:
    """The candidate with the least simulated peak; None where there are no candidates. ``for_search``: as above."""
    least: Evaluated | None = None
    for lazy in sorted(candidates, key=lambda c: c.floor_bytes):
        if least is None or lazy.floor_bytes < least.peak_bytes:
            evaluated = _worked_out(context, lazy, for_search)
            if evaluated is not None and (least is None or evaluated.peak_bytes < least.peak_bytes):
                least = evaluated
    return None if least is None else least.candidate


def _worked_out(context: SearchContext, lazy: LazyCandidate, for_search: bool) -> Evaluated | None:
    """None: it fails, and a search goes on without it."""
    found: Evaluated | None = None
    with left_out_where_it_fails(lazy.method) if for_search else applying(lazy.method):
        found = context.simulated(lazy.candidate())
    return found
