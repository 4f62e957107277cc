"""What trying plans one by one finds: every plan of a small graph, or random ones of a larger graph."""

import itertools

from hypothesis import strategies as st

from lowtide.plan import RECOMPUTE
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers.graph_queries import complete_actions, recomputable


def oracle(graph, costs, most_replays=1):
    """(step_ms, peak_bytes) of every set of actions there is, each op replayed up to so many times."""
    free = sorted(recomputable(graph))
    found = set()
    for chosen in itertools.product((False, True), repeat=len(free)):
        picked = [s for s, yes in zip(free, chosen) if yes]
        recomputed = [s for s in picked if s in graph.stored]
        actions = complete_actions(graph, recomputed, set(picked) - set(recomputed))
        again = [s for s, action in actions.items() if action == RECOMPUTE]
        ops = sorted({graph.storages[s].op for s in again})
        for counts in itertools.product(range(1, most_replays + 1), repeat=len(ops)):
            often = dict(zip(ops, counts))
            line = simulate_actions(graph, costs, actions, {s: often[graph.storages[s].op] for s in again})
            found.add((line.step_ms, line.peak_bytes))
    return found


def random_plans(graph, costs, data):
    """Time and peak of random actions, each op replayed up to three times."""
    free = sorted(recomputable(graph))
    found = set()
    for _ in range(5):
        picked = {s for s in free if data.draw(st.booleans())}
        actions = complete_actions(graph, picked & graph.stored, picked - graph.stored)
        replays = {s: data.draw(st.integers(1, 3)) for s, action in actions.items() if action == RECOMPUTE}
        line = simulate_actions(graph, costs, actions, replays)
        found.add((line.step_ms, line.peak_bytes))
    return found
