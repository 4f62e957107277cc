"""Rows of the lower bound for the least that offloading costs.

    o_{x,l}   1: x is offloaded by way of link l
    S_f, S_b  how long the step waits for transfers before and after backward first asks for something

What is offloaded is there whenever it is asked for, and costs no bytes meanwhile. All stores are over when backward
first asks for anything, and no fetch begins before. What computation cannot hide of them is waited for, whatever the
schedule:

    S_f >= sum store_ms o - forward_ms                     for each link; from when the first such storage is made
    S_b >= sum fetch_ms o - backward_ms - replays          for each link, and for what is needed by a moment
    sum m o <= capacity                                    for each link

Known weaknesses: no memory is charged for bytes in flight, a transfer may run at any time within its half of the step,
and all replays may hide fetches, later ones too.
"""

from collections.abc import Mapping

from lowtide.graph.costs import Costs
from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import RUN, StepGraph
from lowtide.solvers import tuning
from lowtide.solvers.milp.highs import INFINITY, LinearProgram


def add_link_rows(
    program: LinearProgram,
    graph: StepGraph,
    costs: Costs,
    capacities: Mapping[str, int | None],
    offloads: Mapping[int, Mapping[str, int]],
    replays: Mapping[int, float],
    ms_unit: float,
) -> None:
    """Charge the waits S_f and S_b.

    Args:
        capacities: Most bytes to offload, by tier; None: any number.
        offloads: The columns o, by storage and tier.
        replays: What replays take, in ``ms_unit``, by column.
    """
    if not offloads:
        return
    facts, at_ms = step_facts(graph), event_ms(graph, costs)
    first_ask_ms = at_ms[facts.unpack_events[0]]
    wait_forward, wait_backward = program.column(1.0, upper=INFINITY), program.column(1.0, upper=INFINITY)
    sizes = {x: graph.storages[x].bytes for x in offloads}
    by_need = sorted(offloads, key=lambda x: facts.first_use[x])
    parts = tuning.FETCH_MOMENTS
    for tier, capacity in capacities.items():
        link = costs.links[tier]
        columns = {x: of_tier[tier] for x, of_tier in offloads.items()}
        if capacity is not None:
            most = max(capacity, 1)
            program.row({columns[x]: size / most for x, size in sizes.items()}, upper=capacity / most)
        stores = {columns[x]: -link.store_ms(sizes[x]) / ms_unit for x in columns}
        record_ms = costs.record_us / 1e3 * (len(graph.forward_ops) + len(columns))
        # An op's outputs are complete when the next event begins; an op that finishes them comes later still.
        hidden_ms = first_ask_ms - min(at_ms[facts.birth[x] + 1] for x in columns) + record_ms
        program.row({wait_forward: 1.0, **stores}, lower=-hidden_ms / ms_unit)
        for number in {len(by_need) * (i + 1) // parts for i in range(parts)} - {0}:
            needed = by_need[:number]
            fetches = {columns[x]: -link.fetch_ms(sizes[x]) / ms_unit for x in needed}
            # To the last of them; a fetch that has come is noted, which takes a moment too.
            last_ms = at_ms[facts.first_use[needed[-1]]] - first_ask_ms + costs.replay_us / 1e3 * len(graph.saved)
            program.row({wait_backward: 1.0, **replays, **fetches}, lower=-last_ms / ms_unit)


def event_ms(graph: StepGraph, costs: Costs) -> list[float]:
    """When each event begins, and the last one ends: with all of the tape's dispatch and nothing else on top."""
    found = [0.0]
    for kind, number in graph.events:
        ms = 0.0
        if kind == RUN:
            ms = costs.op_ms[number] + (0.0 if graph.ops[number].backward else costs.dispatch_us / 1e3)
        found.append(found[-1] + ms)
    return found
