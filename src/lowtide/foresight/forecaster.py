"""Whether a setup fits its device, and under which plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from lowtide.foresight import device_peak
from lowtide.foresight.assumptions import assumptions
from lowtide.foresight.device_peak import DOES_NOT_FIT, FITS, UNCERTAIN, Amount
from lowtide.foresight.forecast import Forecast, Stage
from lowtide.foresight.forecast_parts import by_module, parts
from lowtide.foresight.rank_memory import RankMemory, rank_memory
from lowtide.foresight.reserved import reserved_bytes
from lowtide.foresight.step_planner import StepPlanner
from lowtide.foresight.step_time import step_ms
from lowtide.foresight.subjects import Subject
from lowtide.foresight.training_setup import TrainingSetup
from lowtide.graph.costs import Costs
from lowtide.graph.gradients import (
    gradient_bytes_at,
    with_gradients_before,
    with_gradients_stepped,
    with_part_of_gradients,
)
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.simulation.simulator import simulate
from lowtide.solvers.arguments import absolute_bytes
from lowtide.units import parse_budget

# What changes nothing of what a rank holds through the step.
_OF_THE_STEP: dict[str, Any] = {"seq_len": 1, "batch_size": 1, "accumulate": 1, "attention": "auto",
                                "chunk_loss": False, "offload_activations": False}  # fmt: skip


class Room(NamedTuple):
    """Whether a step fits, and what the leanest published plan lacks; less than 0 where there is room."""

    fits: bool
    missing_bytes: float


class Forecaster:
    """Forecasts for setups of one subject; what they share is found once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._planners: dict[tuple[int, str, int | None, bool], StepPlanner] = {}
        self._ranks: dict[TrainingSetup, RankMemory] = {}

    def forecast(self, setup: TrainingSetup, *, budget: int | str | None = "auto", thorough: bool = True) -> Forecast:
        """Return what is expected of ``setup``.

        Args:
            budget: Of allocated bytes as for ``solve``; ``"auto"``: the most that fits; None: no plan, all is saved.
            thorough: Solve for the plan with a bound; else the first good one is taken.
        """
        if _is_pipeline(setup):
            if self.refuses(setup):
                return self.residents(setup)
            return self._worst([self.forecast(s, budget=budget, thorough=thorough) for s in _stages(setup)])
        facts, rank = self.subject.facts(setup), self.rank(setup)
        if self.refuses(setup):
            return self.residents(setup)
        planner, others = self._planner(setup), setup.micro_batches_in_flight - 1
        graph, costs = planner.graph, planner.costs
        resident = rank.resident_bytes + graph.resident["batch"]
        shift = resident - graph.resident_bytes
        if setup.selective_op:
            plan, step_peak, waiting = planner.selective_op(others)
        elif budget is None:
            plan, step_peak, waiting = planner.plain(others)
        else:
            budgets = _budgets(planner, setup, budget, resident, thorough=thorough)
            plan, step_peak, waiting = planner.within(
                budgets, others, thorough=thorough, offload=setup.offload_activations
            )
        during = step_peak + waiting + shift
        allocated = max(during, resident + rank.optimizer_step)
        peak = device_peak.amounts(setup, allocated, resident)
        workspaces = device_peak.workspaces_bytes(setup.device, graph)
        verdict = device_peak.verdict_of(peak, setup.device) if plan is not None else DOES_NOT_FIT
        micro_ms = costs.plain_step_ms if plan is None else plan.predicted_step_ms
        took = step_ms(setup, facts, rank, micro_ms, graph)
        error = costs.error_fraction or 0.0
        return Forecast(
            setup, verdict, peak,
            parts(
                setup, rank, graph.resident["batch"], during - resident, waiting, allocated, resident,
                _gradients_at_peak(graph, costs, plan) if setup.makes_gradients else None,
            ),
            rank.host,
            None if plan is None else Amount(took / (1 + error), took, took * (1 + error)),
            None if plan is None else 1e3 * setup.sequences * setup.seq_len / took,
            plan, assumptions(setup, rank, graph), by_module(facts, graph, costs),
            allocated_bytes=allocated + workspaces,
            ask_reserved=partial(
                reserved_bytes, graph, plan, rank, waiting, workspaces, setup.accumulate,
                kept=not setup.makes_gradients,
            ),
        )  # fmt: skip

    def best_rate(self, setup: TrainingSetup) -> float:
        """Tokens a second if nothing had to be recomputed: no plan is faster. 0 where no plan can fit."""
        rank = self.rank(setup)
        if self.refuses(setup) or rank.resident_bytes + rank.optimizer_step > device_peak.most_allocated(setup, 0):
            return 0.0
        planner = self._planner(setup)
        took = step_ms(setup, self.subject.facts(setup), rank, planner.costs.plain_step_ms, planner.graph)
        return 1e3 * setup.sequences * setup.seq_len / took

    def refuses(self, setup: TrainingSetup) -> bool:
        """Whether what lives through the whole step is too much already: no trace is needed to know."""
        if _is_pipeline(setup):
            return any(map(self.refuses, _stages(setup)))
        resident = self.rank(setup).resident_bytes
        return device_peak.amounts(setup, resident, resident).low > setup.device.usable_bytes

    def rank(self, setup: TrainingSetup) -> RankMemory:
        key = replace(setup, **_OF_THE_STEP)
        if key not in self._ranks:
            self._ranks[key] = rank_memory(self.subject.facts(setup), setup)
        return self._ranks[key]

    def _planner(self, setup: TrainingSetup) -> StepPlanner:
        graph, kept = self.subject.trace(setup), None
        if setup.makes_gradients:
            kept = self.rank(setup).gradients
        key = id(graph), setup.device.name, kept, setup.optimizer_in_backward  # the subject keeps its graphs
        if key not in self._planners:
            of_rank = with_gradients_before(graph) if kept is None else with_part_of_gradients(graph, kept)
            if setup.optimizer_in_backward:
                of_rank = with_gradients_stepped(graph, self.rank(setup).step_share)
            self._planners[key] = StepPlanner(of_rank, setup.device)
        return self._planners[key]

    def is_large(self, setup: TrainingSetup) -> bool:
        """Whether its step has so many ops that each trace takes long."""
        return not _is_pipeline(setup) and not self.refuses(setup) and self._planner(setup).is_large

    def room(self, setup: TrainingSetup, *, plain: bool = False) -> Room:
        """Whether the step fits under some plan, or as it is, and what is missing."""
        if _is_pipeline(setup):
            rooms = [self.room(stage, plain=plain) for stage in _stages(setup)]
            return Room(all(r.fits for r in rooms), max(r.missing_bytes for r in rooms))
        rank = self.rank(setup)
        missing = rank.resident_bytes + rank.optimizer_step - device_peak.most_allocated(setup, rank.resident_bytes)
        if self.refuses(setup):
            return Room(False, missing)
        planner, others = self._planner(setup), setup.micro_batches_in_flight - 1
        resident = rank.resident_bytes + planner.graph.resident["batch"]
        most = device_peak.most_allocated(setup, resident) - (resident - planner.graph.resident_bytes)
        if setup.selective_op:
            _, peak, waiting = planner.selective_op(others)
            return Room(missing <= 0 and peak + waiting <= most, max(missing, peak + waiting - most))
        lacking = planner.missing_bytes(most, others, plain=plain)
        if missing > 0 or lacking <= 0 or plain:
            return Room(missing <= 0 and lacking <= 0, max(missing, lacking))
        # Where none of the published plans is small enough, one is looked for.
        return Room(planner.first_beside(others, most) is not None, lacking)

    def _worst(self, stages: list[Forecast]) -> Forecast:
        """The stage that holds most, at the pace of the slowest."""
        order = (DOES_NOT_FIT, UNCERTAIN, FITS)
        worst = min(stages, key=lambda f: (order.index(f.verdict), -f.peak_bytes.expected))
        slowest = max((f for f in stages if f.step_ms is not None), key=lambda f: f.step_ms.expected, default=None)  # type: ignore[union-attr]
        known = worst.plan is not None and slowest is not None
        rows = []
        for f in stages:
            layers = self.subject.stage_layers(f.setup)
            rows.append(Stage((layers[0], layers[-1]), f.setup.micro_batches_in_flight, f.peak_bytes, f.verdict))
        return replace(
            worst, stages=tuple(rows), step_ms=slowest.step_ms if known and slowest else None,
            tokens_per_second=slowest.tokens_per_second if known and slowest else None,
        )  # fmt: skip

    def residents(self, setup: TrainingSetup) -> Forecast:
        """What lives through the whole step alone: too much already, or uncertain."""
        if _is_pipeline(setup):
            return self._worst(list(map(self.residents, _stages(setup))))
        facts, rank = self.subject.facts(setup), self.rank(setup)
        resident = rank.resident_bytes
        allocated = resident + rank.optimizer_step
        notes = ["the step was not traced: activations count 0"]
        return Forecast(
            setup, DOES_NOT_FIT if self.refuses(setup) else UNCERTAIN, device_peak.amounts(setup, allocated, resident),
            parts(setup, rank, 0, 0, 0, allocated, resident), rank.host, None, None, None,
            [*notes, *assumptions(setup, rank, None)], by_module(facts, None, None), traced=False,
        )  # fmt: skip


def _gradients_at_peak(graph: StepGraph, costs: Costs, plan: Plan | None) -> int | None:
    if plan is None:
        return None
    return gradient_bytes_at(graph, simulate(graph, costs, plan).peak_event)


def _is_pipeline(setup: TrainingSetup) -> bool:
    """Whether all stages are asked about."""
    return setup.pipeline_parallel > 1 and setup.stage is None


def _stages(setup: TrainingSetup) -> list[TrainingSetup]:
    return [replace(setup, stage=stage) for stage in range(setup.pipeline_parallel)]


def _budgets(
    planner: StepPlanner, setup: TrainingSetup, budget: int | str, resident: int, *, thorough: bool
) -> list[int]:
    """Bytes, as the graph counts, to ask for one after the other: of ``"auto"`` first what fits for sure."""
    shift, parsed = resident - planner.graph.resident_bytes, parse_budget(budget)
    if parsed != "auto":
        asked = absolute_bytes(planner.graph, planner.costs, budget)
        return [asked if isinstance(parsed, float) else asked - shift]
    sure = device_peak.most_allocated(setup, resident) - shift
    return [sure, setup.device.usable_bytes - int(device_peak.beside(setup, 0)) - shift] if thorough else [sure]
