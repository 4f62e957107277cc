"""Storages elsewhere, for the bound: columns for what a plan may move, and what that costs at least.

    o_{x,l}   1: x is away by way of l, a link
    S_f, S_b  how long the step stands still for transfers before and after backward first asks for something

What is away is there whenever somebody asks, and costs no bytes meanwhile. All transfers off are over when backward
first asks for anything, and none back begins before, so what of them computation cannot hide is waited for, whatever
the schedule:

    S_f >= sum store_ms o - forward_ms                     for each link; from when the first such storage is made
    S_b >= sum fetch_ms o - backward_ms - replays          for each link, and likewise for what is needed by a moment
    sum m o <= capacity                                    for each link

Known weaknesses: a transfer is charged for nothing in between, no memory is charged for what is on its way, and all
replays may hide fetches, later ones too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import RUN, UNPACK, StepGraph
from lowtide.solvers import tuning
from lowtide.solvers.milp.highs import INFINITY, LinearProgram

Terms = dict[int, float]


class OffloadColumns:
    """The columns of one program; see the page's head.

    Args:
        capacities: Most bytes to move, by tier; None: any number.
        timed: Time is what is minimised; else moves cost nothing.

    Attributes:
        columns: By storage and tier.
    """

    def __init__(
        self, program: LinearProgram, graph: StepGraph, costs: Costs, capacities: Mapping[str, int | None],
        movable: Iterable[int], ms_unit: float, *, timed: bool,
    ) -> None:  # fmt: skip
        self.program, self.graph, self.costs, self.capacities = program, graph, costs, capacities
        self.unit = ms_unit
        touched_ms = (costs.record_us + costs.replay_us) / 1e3  # noted when it leaves, and when it comes back
        self.columns = {
            x: {tier: program.column(touched_ms / ms_unit * timed) for tier in capacities} for x in sorted(movable)
        }

    def terms(self, storage: int, factor: float) -> Terms:
        """``storage`` is away."""
        return dict.fromkeys(self.columns.get(storage, {}).values(), factor)

    def carried(self, replays: Terms) -> None:
        """The rows of the links. ``replays``: what replays take, in the program's unit, by column."""
        graph, costs, program = self.graph, self.costs, self.program
        made, needed, asked_ms, at_ms = self._moments()
        waits = [program.column(1.0, upper=INFINITY) for _ in range(2)] if self.columns else []
        for tier, capacity in self.capacities.items():
            link = costs.links[tier]
            columns = {x: mine[tier] for x, mine in self.columns.items()}
            if not columns:
                continue
            sizes = {x: graph.storages[x].bytes for x in columns}
            if capacity is not None:
                most = max(capacity, 1)
                program.row({columns[x]: size / most for x, size in sizes.items()}, upper=capacity / most)
            stores = {columns[x]: -link.store_ms(sizes[x]) / self.unit for x in columns}
            notes_ms = costs.record_us / 1e3 * (len(graph.forward_ops) + len(columns))
            hidden_ms = asked_ms - min(made[x] for x in columns) + notes_ms
            program.row({waits[0]: 1.0, **stores}, lower=-hidden_ms / self.unit)
            by_need = sorted(columns, key=lambda x: needed[x])
            for number in {len(by_need) * (i + 1) // tuning.FETCH_MOMENTS for i in range(tuning.FETCH_MOMENTS)} - {0}:
                some = by_need[:number]
                fetches = {columns[x]: -link.fetch_ms(sizes[x]) / self.unit for x in some}
                # To the last of them; a fetch that has come is noted, which takes a moment too.
                end_ms = at_ms[needed[some[-1]]] - asked_ms + costs.replay_us / 1e3 * len(graph.saved)
                program.row({waits[1]: 1.0, **replays, **fetches}, lower=-end_ms / self.unit)

    def _moments(self) -> tuple[dict[int, float], dict[int, int], float, list[float]]:
        """When each storage is complete, the event at which it is first asked for, when the first is, and all times.

        Of the plain step with all of the tape's watching: what is recorded, replayed or waited for comes on top.
        """
        graph, costs = self.graph, self.costs
        now, at_ms = 0.0, []
        made: dict[int, float] = {}
        needed: dict[int, int] = {}
        asked_ms = -1.0
        for event, (kind, number) in enumerate(graph.events):
            at_ms.append(now)
            if kind == RUN:
                now += costs.op_ms[number] + (0.0 if graph.ops[number].backward else costs.dispatch_us / 1e3)
                # An op that finishes it comes later still.
                made.update(dict.fromkeys(graph.ops[number].makes, now))
            elif kind == UNPACK:
                asked_ms = at_ms[event] if asked_ms < 0 else asked_ms
                needed.setdefault(graph.saved[number], event)
        return made, needed, max(asked_ms, 0.0), at_ms
