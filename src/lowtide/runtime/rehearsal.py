"""From one batch to a plan, before training: trace, measure, solve, and rehearse until every replay is proven."""

import time
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowtide.errors import TierError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.measurement.device import available_bytes
from lowtide.measurement.op_times import measure
from lowtide.options import FitOptions
from lowtide.plan import RECOMPUTE, Plan
from lowtide.rank_consensus import from_all_ranks, group_of, run_on_all_ranks
from lowtide.reports.progress import stages
from lowtide.runtime.budget import StepBudget
from lowtide.runtime.planned_step import PlannedStep, shapes_of_graph
from lowtide.runtime.reasons import Reasons
from lowtide.runtime.shared_tiers import SharedTiers
from lowtide.solvers.dispatch import solve
from lowtide.tape import attach
from lowtide.tape.program import Audit, program_of
from lowtide.tape.tape import Tape
from lowtide.tracing.batches import without_history
from lowtide.tracing.operators import fingerprint
from lowtide.tracing.restore import preserve_training_state
from lowtide.tracing.tracer import Step, device_of, record, run_step

_KNOWN = frozenset({"aten", "prims"})  # operators whose schemas are checked by the list and at first sight
_ATTEMPTS = 3  # plans, at most, until every replay of one gives the same bits
_REHEARSALS = 4  # at most, to audit every dropped tensor when memory holds only some beside their recipes


class Rehearsal:
    """Makes plans for one model from batches that its user shows."""

    def __init__(
        self, model: nn.Module, options: FitOptions, budget: StepBudget, tiers: SharedTiers, reasons: Reasons
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
        """
        model, batch = self._model(), without_history(batch)
        assert model is not None
        group = group_of(model)
        with stages("trace", "measure", "solve", "rehearse") as next_stage:
            start = time.perf_counter()
            forward = partial(run_on_all_ranks, group, "the forward pass")
            record_step = partial(record, model, batch, step, self._options.optimizer, forward=forward)
            graph = run_on_all_ranks(group, "tracing", record_step)
            traced = time.perf_counter()
            next_stage()
            costs = run_on_all_ranks(group, "measuring", partial(self._measure, graph))
            measured = time.perf_counter()
            next_stage()
            plan = run_on_all_ranks(group, "solving", partial(self._solve, graph, costs))
            next_stage()
            for _ in range(_ATTEMPTS):  # a replay that differs is saved, and the rest planned again
                try:
                    tiers = run_on_all_ranks(group, "opening tiers", partial(self._tiers.open_for, plan))
                    tape = Tape(program_of(plan), model, tiers)
                    times = traced - start, measured - traced
                    planned = PlannedStep(plan, graph, costs, shapes_of_graph(graph.calls), tape, *times)
                    differed = self._rehearse(planned, group, batch, step)
                except TierError as error:
                    if group is not None:
                        raise
                    self._tiers.give_up(error)
                    plan = self._solve(graph, costs)
                    continue
                if not any(from_all_ranks(group, bool(differed))):
                    break
                graph = _with_fixed_storages(graph, differed)
                plan = run_on_all_ranks(group, "solving", partial(self._solve, graph, costs))
        return planned

    def _measure(self, graph: StepGraph) -> Costs:
        try:
            return replace(measure(graph), links=self._tiers.links())
        except TierError as error:
            self._tiers.give_up(error)
            return measure(graph)

    def _solve(self, graph: StepGraph, costs: Costs) -> Plan:
        options = self._options
        budget_bytes = self._budget.fixed_for(graph, costs)
        tiers = self._tiers.capacities
        return solve(graph, costs, budget_bytes, method=options.method, offload=tiers, **options.solver)

    def _rehearse(
        self, planned: PlannedStep, group: dist.ProcessGroup | None, batch: Any, step: Step | None
    ) -> set[int]:
        """Run the step under the plan and compare every replay bitwise; the ids of storages that differed.

        An audited tensor is kept beside its recipe until its replay. What memory cannot hold beside waits for the next
        rehearsal.

        Raises:
            TierError: what was moved came back with other bits, or not at all.
        """
        model, plan, program = self._model(), planned.plan, planned.tape.program
        assert model is not None
        stuck, unproven = False, bool(plan.tiers)
        for _ in range(_REHEARSALS):
            waiting = len(program.unaudited())
            allowance = available_bytes(device_of(model)) - (plan.predicted_peak_bytes - plan.resident_bytes)
            useful = allowance > 0 and ((waiting > 0 and not stuck) or unproven)
            if not any(from_all_ranks(group, useful)):
                break
            tape = Tape(program, model, planned.tape.tiers)
            # Memory comes in pieces: what is kept beside never takes all that is free.
            share_bytes = max(allowance, 0) // (3 if unproven else 2)
            tape.audit = Audit(program, share_bytes, self._reasons.say_saved)
            tape.comparison_bytes = share_bytes if unproven else 0
            with preserve_training_state(model, batch, written_parameters=plan.written_parameters):
                with torch.enable_grad(), attach.taped_step(model, tape):
                    loss, output = run_step(model, batch, step)
                before = [fingerprint(b) for b in model.buffers()]
                loss.backward()
                moved = before != [fingerprint(b) for b in model.buffers()]
                del loss, output
            if moved:  # an op of somebody's own writes a buffer that it is not even handed
                for op in program.ops:
                    if op.drops and op.func and op.func.namespace not in _KNOWN:
                        op.drops = ()
                        self._reasons.say_saved(op)
            stuck, unproven = len(program.unaudited()) == waiting, False
        # An op whose replay differed drops nothing any more.
        return {d.storage for d in plan.decisions if d.action == RECOMPUTE and not program.ops[d.op].drops}


def _with_fixed_storages(graph: StepGraph, storages: set[int]) -> StepGraph:
    fixed = tuple(replace(s, fixed="its replay differed") if s.id in storages else s for s in graph.storages)
    return replace(graph, storages=fixed)
