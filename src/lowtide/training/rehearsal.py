"""From one batch to a plan, before training: trace, measure, solve, and rehearse until every replay is proven."""

import gc
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowtide.device import values_off
from lowtide.device.autocast import outside_autocast
from lowtide.device.memory import is_short_of, release_cached_memory
from lowtide.device.out_of_memory import is_out_of_memory, let_go_of_frames, missing_bytes, told_by_name
from lowtide.errors import BudgetInfeasibleError, TierError
from lowtide.estimation.roofline import estimate
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.measurement.op_times import measure
from lowtide.options import FitOptions
from lowtide.plan import RECOMPUTE, Plan
from lowtide.rank_consensus import from_all_ranks, group_of, run_on_all_ranks
from lowtide.reports.progress import stages
from lowtide.solvers.dispatch import solve
from lowtide.step.batches import without_history
from lowtide.step.operators import fingerprint, gradient_of
from lowtide.step.restore import Gradients, preserve_training_state, versions
from lowtide.step.subclasses import wrapped_parameters
from lowtide.tape import attach
from lowtide.tape.program import program_of
from lowtide.tape.tape import Tape
from lowtide.tracing.model_facts import device_of
from lowtide.tracing.tracer import Step, record, run_step
from lowtide.training.budget import StepBudget
from lowtide.training.notices import Notices
from lowtide.training.planned_step import PlannedStep, shapes_of_graph
from lowtide.training.shared_tiers import SharedTiers
from lowtide.units import format_bytes, parse_budget

_KNOWN = frozenset({"aten", "prims"})  # operators whose schemas are checked by the list and at first sight
# By model: the least bytes that errors named.
_told: weakref.WeakKeyDictionary[nn.Module, set[int | str]] = weakref.WeakKeyDictionary()
_ATTEMPTS = 3  # plans, at most, until every replay of one gives the same bits


class Rehearsal:
    """Makes plans for one model from batches that its user shows."""

    def __init__(
        self, model: nn.Module, options: FitOptions, budget: StepBudget, tiers: SharedTiers, reasons: Notices
    ) -> None:
        self._model = weakref.ref(model)
        self._options, self._budget, self._tiers, self._reasons = options, budget, tiers, reasons

    def planned(self, batch: Any, step: Step | None) -> PlannedStep:
        """Trace, measure, solve, and rehearse until every replay is proven.

        Of a model that several ranks train together every rank has to call it. Each finds its own plan: replays run no
        collective, so plans need not be equal.

        Raises:
            BudgetInfeasibleError: no plan fits. StepError, UnsupportedModelError: the step cannot be planned.
            TierError: a tier that was asked for cannot be used.
            RehearsalMemoryError: the device has too little memory for a rehearsal.
        """
        way_out = "Fit without a batch, and the real steps are watched; or pass a smaller one."
        with told_by_name("this batch was rehearsed", way_out):
            return self._planned(batch, step)

    def _planned(self, batch: Any, step: Step | None) -> PlannedStep:
        model, batch = self._model(), without_history(batch)
        assert model is not None
        group = group_of(model)
        with stages("trace", "measure", "solve", "rehearse") as next_stage:
            start = time.perf_counter()
            forward = partial(run_on_all_ranks, group, "the forward pass")
            before = versions(model, batch)
            record_step = partial(record, model, batch, step, self._options.optimizer, forward=forward)
            graph = run_on_all_ranks(group, "tracing", record_step)
            self._reasons.say_of(graph)
            traced = time.perf_counter()
            unwritten = {key for key, version in versions(model, batch).items() if before.get(key) == version}
            next_stage()
            costs = run_on_all_ranks(group, "measuring", partial(self._measure, model, graph))
            measured = time.perf_counter()
            next_stage()
            # If an error said that this budget would do and a second trace needs more, then that is taken.
            was_told = self._options.budget in _told.get(model, ())
            try:
                plan = run_on_all_ranks(group, "solving", partial(self._solve, graph, costs, allow_least=was_told))
            except BudgetInfeasibleError as error:
                _told.setdefault(model, set()).add(error.least_bytes)
                raise
            next_stage()
            times = traced - start, measured - traced
            for _ in range(_ATTEMPTS):  # a replay that differs is saved, and the rest planned again
                try:
                    planned = self._opened(plan, graph, costs, times)
                    differed = self._rehearse(planned, group, batch, step, unwritten)
                except TierError as error:
                    if group is not None:
                        raise
                    self._tiers.give_up(error)
                    plan = self._solve(graph, costs, allow_least=was_told)
                    continue
                except Exception as error:
                    if group is not None or not is_out_of_memory(error):
                        raise
                    self._shrink(plan, error)
                    let_go_of_frames(error)
                    _collect()
                    plan = self._solve(graph, costs, allow_least=True)
                    continue
                if not any(from_all_ranks(group, bool(differed))):
                    return planned
                graph = _with_fixed_storages(graph, differed)  # what must be saved now may need more
                plan = run_on_all_ranks(group, "solving", partial(self._solve, graph, costs, allow_least=True))
            # No more attempts, and the rehearsed one has failed. Of this one the first real step proves every replay.
            return self._opened(plan, graph, costs, times)

    def _opened(self, plan: Plan, graph: StepGraph, costs: Costs, times: tuple[float, float]) -> PlannedStep:
        """``plan``, with its tiers open on every rank; ``times``: seconds of tracing and of measuring."""
        model = self._model()
        assert model is not None
        tiers = run_on_all_ranks(group_of(model), "opening tiers", partial(self._tiers.open_for, plan))
        return PlannedStep(plan, graph, costs, shapes_of_graph(graph), Tape(program_of(plan), model, tiers), *times)

    def _measure(self, model: nn.Module, graph: StepGraph) -> Costs:
        memory_bytes = None
        if parse_budget(self._options.budget) != "auto":
            budget_bytes = self._budget.fixed_for(graph, Costs((1.0,) * len(graph.ops)))
            memory_bytes = budget_bytes - _live_bytes(model, graph)
        if values_off.times_of:
            costs = estimate(graph, device=values_off.times_of)
        else:
            costs = measure(graph, memory_bytes=memory_bytes)
        try:
            return replace(costs, links=self._tiers.links())
        except TierError as error:
            self._tiers.give_up(error)
            return costs

    def _solve(self, graph: StepGraph, costs: Costs, *, allow_least: bool) -> Plan:
        options, tiers = self._options, self._tiers.capacities

        def solved(budget_bytes: int) -> Plan:
            return solve(graph, costs, budget_bytes, method=options.method, offload=tiers, **options.solver)

        try:
            return solved(self._budget.fixed_for(graph, costs))
        except BudgetInfeasibleError as error:
            if not allow_least:
                raise
            self._reasons.say(
                f"no plan fits {format_bytes(error.budget_bytes)} for {graph.provenance.get('batch', 'this input')}: "
                f"running at the least there is, {format_bytes(error.least_bytes)}"
            )
            return solved(error.least_bytes)

    def _shrink(self, plan: Plan, error: BaseException) -> None:
        """The rehearsal of ``plan`` ran out of memory: a smaller budget from now on."""
        budget = self._budget
        budget.cap(budget.lower(plan.predicted_peak_bytes, missing_bytes(error, budget.device)))
        self._reasons.say(
            f"memory ran out in a rehearsal within {format_bytes(plan.predicted_peak_bytes)}: "
            f"the budget is {format_bytes(budget.limit_bytes)} now"
        )

    def _rehearse(
        self, planned: PlannedStep, group: dist.ProcessGroup | None, batch: Any, step: Step | None, unwritten: set[int]
    ) -> set[int]:
        """Run the step under the plan and compare every replay; the ids of storages that differed.

        No tensor is kept for that: each op runs twice at once, and a fingerprint of what it dropped is compared with
        its replay's.

        Raises:
            TierError: what was moved came back with other bits, or not at all.
        """
        model, plan, program = self._model(), planned.plan, planned.tape.program
        assert model is not None
        fits = not is_short_of(plan.predicted_peak_bytes - plan.resident_bytes, device_of(model))
        # One rank alone would wait for the others.
        if not any(from_all_ranks(group, fits and not program.keeps_everything)):
            return set()
        tape = Tape(program, model, planned.tape.tiers)
        tape.proves_at_birth, tape.rehearses = self._reasons.say_saved, True
        # FSDP makes and adds up gradients itself.
        gradients: Gradients = "zeroed" if wrapped_parameters(model) else "discarded"
        with preserve_training_state(
            model, batch, gradients=gradients, written_parameters=plan.written_parameters, unwritten=unwritten
        ):
            with torch.enable_grad(), attach.taped_step(model, tape):
                loss, output = run_step(model, batch, step)
            before = [fingerprint(b) for b in model.buffers()]
            with outside_autocast():
                loss.backward()
            moved = before != [fingerprint(b) for b in model.buffers()]
            del loss, output
        if moved:  # an op of somebody's own writes a buffer that it is not even handed
            for op in program.ops:
                if op.drops and op.func and op.func.namespace not in _KNOWN:
                    op.drops = ()
                    self._reasons.say_saved(op)
        # An op whose replay differed drops nothing any more.
        return {d.storage for d in plan.decisions if d.action == RECOMPUTE and not program.ops[d.op].drops}


def _collect() -> None:
    gc.collect()
    release_cached_memory()


def _live_bytes(model: nn.Module, graph: StepGraph) -> int:
    """What lives now of what is resident in the step."""
    to_come = 0 if any(gradient_of(p) is not None for p in model.parameters()) else graph.resident["gradients"]
    return graph.resident_bytes - to_come - graph.resident["optimizer"]


def _with_fixed_storages(graph: StepGraph, storages: set[int]) -> StepGraph:
    fixed = tuple(replace(s, fixed="its replay differed") if s.id in storages else s for s in graph.storages)
    return replace(graph, storages=fixed)
