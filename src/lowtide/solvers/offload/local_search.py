"""Local search over joint plans: change the action of some storages, and keep the change if the plan gets faster.

The search tries groups of storages: what one op makes in all layers, then in every second layer, then each storage
alone; the largest groups first, with each action they do not have. It finds what choosing offloads before replays
misses (``benchmarks/LOG.md``). The number of tries is limited by their size.
"""

from collections.abc import Callable, Mapping

from lowtide.explanation import collapse_path
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, SAVE, TIER_OF
from lowtide.solvers import tuning
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import choices, complete_actions
from lowtide.solvers.offload.transfer_schedule import Scheduled, schedule_transfers


def improve_by_local_search(
    graph: StepGraph,
    costs: Costs,
    candidate: Candidate,
    budget_bytes: int,
    moves: Mapping[int, str],
    fits: Callable[[Mapping[int, str]], bool],
    rank: Callable[[Scheduled], tuple[float, int]],
) -> Candidate:
    """The best candidate that changes lead to from ``candidate``, which is within the budget.

    Args:
        moves: Storages that may be offloaded, and the action that does it.
        fits: Whether the tiers have room for what these actions offload.
        rank: Lower is better.
    """
    tries = tuning.OFFLOAD_SWAP_EVENTS // max(len(graph.events), 1)
    best = candidate
    best_rank = rank(schedule_transfers(graph, costs, candidate.actions, candidate.replays, budget_bytes))
    groups = _groups(graph, moves)
    better = True
    while better and tries > 0:
        better = False
        for group in groups:
            for action in (SAVE, moves[group[0]], RECOMPUTE):
                if tries <= 0 or all(action == best.actions.get(s, SAVE) for s in group):
                    continue
                actions = _changed(graph, best.actions, {s: moves[s] if action in TIER_OF else action for s in group})
                if any(actions.get(s) != action for s in group) or not fits(actions):
                    continue
                tries -= 1
                replays = {s: n for s, n in best.replays.items() if actions.get(s) == RECOMPUTE}
                schedule = schedule_transfers(graph, costs, actions, replays, budget_bytes)
                if schedule.peak_bytes <= budget_bytes and rank(schedule) < best_rank:
                    best = Candidate(actions, "feasible", None, candidate.provenance, replays, schedule.moves)
                    best_rank, better = rank(schedule), True
    return best


def _groups(graph: StepGraph, moves: Mapping[int, str]) -> list[tuple[int, ...]]:
    """Storages to change together: of one op in all layers, in every second layer, and each alone; largest first."""
    groups: dict[tuple[str, str, int, str], list[int]] = {}
    for s in sorted(moves):
        op = graph.ops[graph.storages[s].op or 0]
        key = collapse_path(graph.scope(op)), op.name, graph.storages[s].output, moves[s]
        groups.setdefault(key, []).append(s)
    found = {tuple(group) for group in groups.values()}
    found |= {tuple(group[half::2]) for group in groups.values() for half in (0, 1) if group[half:]}
    found |= {(s,) for s in moves}
    return sorted(found, key=lambda group: (-sum(graph.storages[s].bytes for s in group), group))


def _changed(graph: StepGraph, actions: Mapping[int, str], others: Mapping[int, str]) -> dict[int, str]:
    """``actions`` with ``others`` put in, completed so that every replay finds its inputs."""
    wanted = {**actions, **others}
    recomputed, saved = choices(graph, wanted)
    offloaded = {s: a for s, a in wanted.items() if a in TIER_OF}
    return {**complete_actions(graph, recomputed, saved), **offloaded}
