"""The activation memory budget of PyTorch's compiler: keep what is dearest to recompute within a share of the bytes.

``torch._functorch.config.activation_memory_budget`` and its solvers ``dp`` (the default), ``greedy`` and ``ilp``;
https://pytorch.org/blog/activation-checkpointing-techniques/, and ``torch/_functorch/partitioners.py`` and
``_activation_checkpointing/knapsack.py`` of PyTorch 2.13, from which the rules below are taken (not the code):

- the budget is a ratio: 1 keeps what the plain step stores, 0 keeps only what was there before the step;
- an item is an op, its weight the bytes of its outputs as a share of all, its value the time to run it again;
- ``dp`` rounds weights to 1/10000; items come largest first, and an item is taken if the value grows by it.

Differs: the items are the ops of which autograd stores an output; PyTorch first lets a minimum cut choose what to store
and passes only dear ops (matrix products, reductions, random ops) to the knapsack. The value is measured time, that of
the op and of what else must run while all other items are kept; PyTorch counts the op's own FLOPs. What may not be
replayed is kept and weighs nothing. PyTorch is given the ratio by hand; under a budget in bytes, ratios in steps of
0.01 (0.05 for ``ilp``) are tried with each strategy, and the fastest plan whose *simulated peak* fits is taken.

Known weaknesses: the kept bytes are bounded, not the peak, which may rise as the ratio falls; values are added up
although a dropped item makes its readers dearer; rounding fills the knapsack past its capacity, or not quite.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.solvers import tuning
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import complete_actions, recomputable, stored_at_backward_start
from lowtide.solvers.milp.highs import LinearProgram
from lowtide.solvers.published.lazy_candidates import LazyCandidate, ops_that_make, planned_ms
from lowtide.solvers.search_context import SearchContext


def greedy_knapsack(weights: Sequence[float], values: Sequence[float], capacity: float) -> list[int]:
    """Items to keep: by value per weight, each one that still fits."""
    kept, total = [], 0.0
    for i in sorted(range(len(values)), key=lambda i: -values[i] / weights[i]):
        if total + weights[i] <= capacity:
            total += weights[i]
            kept.append(i)
    return sorted(kept)


def dp_knapsack(weights: Sequence[float], values: Sequence[float], capacities: Sequence[float]) -> list[list[int]]:
    """Items to keep for each capacity: the most value within it, weights rounded to 1/10000."""
    units = max(round(capacity * tuning.KNAPSACK_UNITS) for capacity in capacities)
    rounded = [round(w * tuning.KNAPSACK_UNITS) for w in weights]
    best = np.zeros(units + 1)
    taken = np.zeros((len(values), units + 1), dtype=bool)
    for i, (weight, value) in enumerate(zip(rounded, values, strict=True)):
        if weight > units:
            continue
        with_it = best[: units + 1 - weight] + value
        taken[i, weight:] = with_it > best[weight:]
        best[weight:] = np.maximum(best[weight:], with_it)
    found = []
    for capacity in capacities:
        left, kept = round(capacity * tuning.KNAPSACK_UNITS), []
        for i in reversed(range(len(values))):
            if taken[i, left]:
                kept.append(i)
                left -= rounded[i]
        found.append(kept[::-1])
    return found


def ilp_knapsack(weights: Sequence[float], values: Sequence[float], capacity: float) -> list[int]:
    """Items to keep: the most value within ``capacity``, by integer programming."""
    program = LinearProgram()
    most = max(values, default=0.0) or 1.0
    columns = [program.column(-value / most, integer=True) for value in values]
    program.row(dict(zip(columns, weights, strict=True)), upper=capacity)
    answer = program.minimise(
        gap=tuning.KNAPSACK_ILP_GAP,
        slack=0.0,
        node_limit=tuning.KNAPSACK_ILP_NODES,
        time_limit_s=tuning.KNAPSACK_ILP_TIME_LIMIT_S,
    )
    return [i for i, value in enumerate(answer.values) if value > 0.5]


@dataclass(frozen=True)
class _Item:
    """An op of which autograd stores an output.

    Attributes:
        stored: Its stored outputs that may be recomputed.
        work: Ops that run again to make them, while all other items are kept.
    """

    stored: tuple[int, ...]
    work: frozenset[int]
    bytes: int


def knapsack(context: SearchContext, ratio: float | None = None) -> list[LazyCandidate]:
    """The plan for one ratio (strategy ``dp``), or those for many ratios and every strategy.

    Args:
        ratio: Share of the bytes stored by the plain step that may stay, 0 to 1.

    Raises:
        ValueError: ``ratio`` is not a number from 0 to 1.
    """
    if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1):
        raise ValueError(f"ratio={ratio!r} is not a share. Write ratio=0.5 to keep half of the stored bytes.")
    items = _items(context.graph)
    total = sum(item.bytes for item in items) or 1
    weights = [item.bytes / total for item in items]
    values = [sum(context.costs.op_ms[op] for op in item.work) for item in items]
    ratios = tuning.KNAPSACK_RATIOS if ratio is None else (float(ratio),)
    choices = list(zip(ratios, dp_knapsack(weights, values, ratios)))
    if ratio is None:
        choices += [(share, greedy_knapsack(weights, values, share)) for share in ratios]
        choices += [(share, ilp_knapsack(weights, values, share)) for share in tuning.KNAPSACK_ILP_RATIOS]
    found: dict[frozenset[int], LazyCandidate] = {}
    for share, kept in choices:
        # Rounding may leave something out although all is allowed.
        dropped = frozenset(range(len(items))).difference(kept) if share < 1 else frozenset[int]()
        if dropped not in found:
            found[dropped] = _lazy_candidate(context, [items[i] for i in sorted(dropped)], share)
    return list(found.values())


def _lazy_candidate(context: SearchContext, dropped: list[_Item], share: float) -> LazyCandidate:
    graph, costs = context.graph, context.costs
    gone = {s for item in dropped for s in item.stored}
    work = frozenset[int]().union(*(item.work for item in dropped))
    replay_ms = sum(costs.op_ms[op] + costs.replay_us / 1e3 for op in sorted(work))
    return LazyCandidate(
        planned_ms(context, replay_ms, len(work)),
        graph.start_bytes + sum(graph.storages[s].bytes for s in stored_at_backward_start(graph) - gone),
        lambda: Candidate(complete_actions(graph, sorted(gone)), provenance={"ratio": f"{share:g}"}),
    )


def _items(graph: StepGraph) -> list[_Item]:
    """Largest first, as in PyTorch."""
    free = recomputable(graph)
    items = []
    for op in graph.forward_ops:
        stored = tuple(s for s in op.makes if s in graph.stored and s in free)
        size = sum(graph.storages[s].bytes for s in stored)
        if size:  # what takes no memory is not worth a replay
            items.append(_Item(stored, ops_that_make(graph, stored, free - graph.stored), size))
    return sorted(items, key=lambda item: -item.bytes)
