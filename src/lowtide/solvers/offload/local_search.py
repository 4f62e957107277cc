"""Local search over joint plans: some storages are saved, recomputed or moved instead, where the judge likes it better.

What one op makes in all layers is traded at once, then in half of them, then each storage by itself; the most bytes
first, in every way that the plan has not got them. What is faster within the budget stays. That finds what planning
moves and replays one after the other misses (``benchmarks/LOG.md``); the number of tries is what bounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lowtide.explanation import collapse_path
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, SAVE, TIER_OF
from lowtide.solvers import tuning
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import complete_actions, recomputable
from lowtide.solvers.offload.transfer_schedule import Scheduled, schedule_transfers


def trade_offloads(
    graph: StepGraph,
    costs: Costs,
    candidate: Candidate,
    budget_bytes: int,
    moves: Mapping[int, str],
    fits: Callable[[Mapping[int, str]], bool],
    rank: Callable[[Scheduled], tuple[float, int]],
) -> Candidate:
    """The best that trades lead to from ``draft``, which is within the budget.

    Args:
        moves: Storages that may be moved, and how.
        fits: Whether tiers have room for what actions move.
        rank: Lower is better.
    """
    tries = tuning.OFFLOAD_SWAP_EVENTS // max(len(graph.events), 1)
    best, best_rank = (
        candidate,
        rank(schedule_transfers(graph, costs, candidate.actions, candidate.replays, budget_bytes)),
    )
    order = _alike(graph, moves)
    better = True
    while better and tries > 0:
        better = False
        for some in order:
            for action in (SAVE, moves[some[0]], RECOMPUTE):
                if tries <= 0 or all(action == best.actions.get(s, SAVE) for s in some):
                    continue
                actions = _with(graph, best.actions, {s: moves[s] if action in TIER_OF else action for s in some})
                if any(actions.get(s) != action for s in some) or not fits(actions):
                    continue
                tries -= 1
                replays = {s: n for s, n in best.replays.items() if actions.get(s) == RECOMPUTE}
                found = schedule_transfers(graph, costs, actions, replays, budget_bytes)
                if found.peak_bytes <= budget_bytes and rank(found) < best_rank:
                    best = Candidate(actions, "feasible", None, candidate.provenance, replays, found.moves)
                    best_rank, better = rank(found), True
    return best


def _alike(graph: StepGraph, moves: Mapping[int, str]) -> list[tuple[int, ...]]:
    """What is traded at once: what one op makes in all layers, then in half of them, then each storage by itself."""
    groups: dict[tuple[str, str, int, str], list[int]] = {}
    for s in sorted(moves):
        op = graph.ops[graph.storages[s].op or 0]
        alike = collapse_path(graph.scope(op)), op.name, graph.storages[s].output, moves[s]
        groups.setdefault(alike, []).append(s)
    found = {tuple(group) for group in groups.values()}
    found |= {tuple(group[half::2]) for group in groups.values() for half in (0, 1) if group[half:]}
    found |= {(s,) for s in moves}
    return sorted(found, key=lambda some: (-sum(graph.storages[s].bytes for s in some), some))


def _with(graph: StepGraph, actions: Mapping[int, str], others: Mapping[int, str]) -> dict[int, str]:
    """``actions`` with ``others`` in their place, and whatever those ask of the rest."""
    wanted = {**actions, **others}
    recomputed = [s for s, a in wanted.items() if a == RECOMPUTE and s in graph.stored and s in recomputable(graph)]
    kept = [s for s, a in wanted.items() if a == SAVE and s not in graph.stored]
    moved = {s: a for s, a in wanted.items() if a in TIER_OF}
    return {**complete_actions(graph, recomputed, kept), **moved}
