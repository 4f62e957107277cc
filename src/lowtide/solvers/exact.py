"""The exact method: the least recomputation whose *simulated* peak stays within the budget.

A MILP (``peak_model.py``) chooses, the simulator judges, and each moment at which the judge finds more memory than the
model becomes a cut, until they agree. What comes back never exceeds the budget by the simulator.

The bound is that of the first, uncut model. It holds for all plans of that model: every plan on a graph small enough
to be modelled op by op; on larger ones those that replay each group of ops as a whole, at most once, and reach back no
further than ``reach`` segments.

Known weaknesses: never replays an op twice; least peak is the best found, not proven.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import highspy

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.simulator import Timeline, simulate_actions
from lowtide.solvers.classics import classic_actions
from lowtide.solvers.draft import Draft, infeasible
from lowtide.solvers.groups import Sketch
from lowtide.solvers.highs import Answer
from lowtide.solvers.peak_model import PeakModel
from lowtide.solvers.structure import close

_ROUNDS = 12
_FULL_REACH = 5000  # replay moments (groups x triggers) up to which replays may reach back over the whole step
_LARGE_GAP = 0.01  # tolerated on the recompute time of graphs that are not modelled op by op
_CUTS_A_ROUND = 40


@dataclass(frozen=True)
class Limits:
    """How long to search. ``gap`` is relative to the recompute time; None: 0 on tiny graphs, 1 % on others."""

    time_limit_s: float = 120.0
    node_limit: int = 4000
    gap: float | None = None


@dataclass(frozen=True)
class _Found:
    actions: dict[int, str]
    timeline: Timeline

    @property
    def rank(self) -> tuple[float, int]:
        return self.timeline.step_ms, self.timeline.peak_bytes


def exact(graph: StepGraph, costs: Costs, budget_bytes: int, limits: Limits) -> Draft:
    """Return the fastest actions within ``budget_bytes``.

    Raises:
        BudgetInfeasibleError: no actions were found that need so little.
    """
    search = _Search(graph, costs, limits)
    plain = search.judge(close(graph, ()))
    if plain.timeline.peak_bytes <= budget_bytes:
        return search.draft(plain, "optimal", costs.plain_step_ms)
    found, status, bound_ms = search.fastest(budget_bytes)
    classics = [search.judge(a) for a in classic_actions(graph)]
    fitting = [f for f in (*found, *classics) if f.timeline.peak_bytes <= budget_bytes]
    if not fitting:
        least = search.leanest((*classics, plain))
        if least.timeline.peak_bytes > budget_bytes:
            raise infeasible(graph, costs, budget_bytes, least.actions, method="exact")
        fitting, status = [least], "feasible"
    best = search.save_what_fits(min(fitting, key=lambda f: f.rank), budget_bytes)
    return search.draft(best, status, bound_ms)


class _Search:
    def __init__(self, graph: StepGraph, costs: Costs, limits: Limits) -> None:
        self.graph, self.costs, self.limits = graph, costs, limits
        self.deadline = time.perf_counter() + limits.time_limit_s
        # Whatever is recomputed, the tape's watching of forward is paid in full.
        self.floor_ms = costs.plain_step_ms + costs.mode_us / 1e3 * len(graph.forward_ops)

    def judge(self, actions: dict[int, str]) -> _Found:
        return _Found(actions, simulate_actions(self.graph, self.costs, actions))

    def draft(self, found: _Found, status: str, bound_ms: float) -> Draft:
        provenance = {"solver": f"HiGHS {highspy.Highs().version()}"}
        return Draft(found.actions, status, bound_ms, provenance)

    def sketch(self) -> Sketch:
        sketch = Sketch(self.graph, self.costs)
        if sum(len(g.triggers) for g in sketch.groups) > _FULL_REACH:
            sketch = Sketch(self.graph, self.costs, reach=0)
        return sketch

    def answer(self, model: PeakModel, start=None) -> Answer:
        gap = self.limits.gap
        if gap is None:
            gap = 0.0 if model.sketch.fine else _LARGE_GAP
        left_s = max(self.deadline - time.perf_counter(), 0.1)
        return model.program.minimise(gap=gap, node_limit=self.limits.node_limit, time_limit_s=left_s, start=start)

    def fastest(self, budget_bytes: int) -> tuple[list[_Found], str, float]:
        """What was found (the last one fits if any does), ``optimal`` or ``feasible``, and the bound in ms."""
        model = PeakModel(self.sketch(), budget_bytes)
        found: list[_Found] = []
        bound_ms, status = self.floor_ms, "optimal"
        for round_ in range(_ROUNDS):
            answer = self.answer(model)
            if round_ == 0 and answer.status != "infeasible":
                bound = max(answer.bound - model.objective_slack, 0.0)
                bound_ms += bound * model.ms_unit
            if answer.status != "optimal":
                status = "feasible"
            if not len(answer.values):
                break
            found.append(self.judge(close(self.graph, *model.choice(answer.values))))
            if found[-1].timeline.peak_bytes <= budget_bytes or time.perf_counter() > self.deadline:
                break
            if not model.sketch.fine:
                status = "feasible"  # a cut may have removed better plans
            self.cut(model, found[-1].timeline, budget_bytes)
        return found, status, bound_ms

    def cut(self, model: PeakModel, timeline: Timeline, budget_bytes: int) -> None:
        """Forbid every moment above the budget, the worst of each burst only."""
        worst: dict[int, tuple[int, int | None]] = {}
        for event, peak in enumerate(timeline.event_peak_bytes):
            if peak > budget_bytes:
                worst[event] = (peak, None)
        for replay in timeline.replays:
            if replay.event in worst and replay.peak_bytes == worst[replay.event][0]:
                worst[replay.event] = (replay.peak_bytes, replay.op)
        ranked = sorted(worst.items(), key=lambda item: -item[1][0])
        for event, (peak, op) in ranked[:_CUTS_A_ROUND]:
            model.forbid(event, op, peak - budget_bytes)

    def leanest(self, known: Iterable[_Found]) -> _Found:
        """The least peak that is found; the same whatever the budget was, so that asking for it succeeds."""
        model = PeakModel(self.sketch(), None)
        best: list[_Found] = [f for f in known]
        for _ in range(3):
            answer = self.answer(model)
            if not len(answer.values):
                break
            best.append(self.judge(close(self.graph, *model.choice(answer.values))))
            claimed = answer.objective * model.byte_unit
            if best[-1].timeline.peak_bytes <= claimed * (1 + 1e-9) + 1:
                break
            self.cut(model, best[-1].timeline, int(claimed))
        return min(best, key=lambda f: (f.timeline.peak_bytes, f.timeline.step_ms))

    def save_what_fits(self, found: _Found, budget_bytes: int) -> _Found:
        """Save every storage whose replay the budget does not need, the dearest first."""
        graph = self.graph
        dropped = [s for s, a in found.actions.items() if a == RECOMPUTE and s in graph.stored]
        kept = [s for s, a in found.actions.items() if a == SAVE and s not in graph.stored]
        spare = budget_bytes - min(found.timeline.peak_bytes, budget_bytes)
        ops = self.graph.storages
        dropped.sort(key=lambda s: (-self.costs.op_ms[ops[s].op or 0], s))
        tries = 0
        for storage in list(dropped):
            if ops[storage].bytes > spare and self._room(found, storage, budget_bytes) < ops[storage].bytes:
                continue
            tries += 1
            if tries > 200:
                break
            rest = [s for s in dropped if s != storage]
            trial = self.judge(close(graph, rest, kept))
            if trial.timeline.peak_bytes <= budget_bytes and trial.rank <= found.rank:
                found, dropped = trial, rest
        return found

    def _room(self, found: _Found, storage: int, budget_bytes: int) -> int:
        """Bytes free throughout the time that ``storage`` would additionally be live, roughly."""
        graph = self.graph
        made = next(e for e, (kind, n) in enumerate(graph.events) if kind == 0 and n == graph.storages[storage].op)
        asked = next(e for e, (kind, n) in enumerate(graph.events) if kind == 3 and graph.saved[n] == storage)
        return budget_bytes - max(found.timeline.event_peak_bytes[made:asked], default=0)
