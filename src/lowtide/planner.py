"""From one batch to a plan in force: trace, measure, solve, and rehearse until every replay is proven."""

import logging
import time
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowtide.errors import BudgetInfeasibleError, LowtideError, TierError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.measurement.device import available_bytes
from lowtide.measurement.op_times import measure
from lowtide.options import FitOptions
from lowtide.plan import RECOMPUTE, Plan
from lowtide.rank_consensus import agree_on_plan, from_all_ranks, group_of, run_on_all_ranks
from lowtide.reports.progress import stages
from lowtide.solvers.arguments import absolute_bytes
from lowtide.solvers.dispatch import solve
from lowtide.tape import attach
from lowtide.tape.offload.open_tiers import open_tiers
from lowtide.tape.offload.tiers import Tier
from lowtide.tape.program import PlanProgram, TapedOp, program_of
from lowtide.tape.tape import Tape
from lowtide.tracing.batches import without_history
from lowtide.tracing.operators import fingerprint
from lowtide.tracing.restore import Gradients, preserve_training_state, versions
from lowtide.tracing.subclasses import wrapped_parameters
from lowtide.tracing.tracer import Step, device_of, record, run_step
from lowtide.units import format_bytes, parse_budget

logger = logging.getLogger("lowtide")
_KNOWN = frozenset({"aten", "prims"})  # operators whose schemas are checked by the list and at first sight
AUTO_MARGIN = 0.1  # of free memory, left alone by budget="auto": allocator fragmentation, and whoever else allocates
# By model: the least bytes that an error named, with the graph and the costs of the search that reached them.
_told: weakref.WeakKeyDictionary[nn.Module, dict[int | str, tuple[str, Costs]]] = weakref.WeakKeyDictionary()
_ATTEMPTS = 3  # plans, at most, until every replay of one gives the same bits


@dataclass
class PlannedShape:
    """One input shape: its graph, costs and plan, and the tape that carries it out.

    Attributes:
        group: Ranks that were planned for together.
        seen_mismatches, calls, replans: What the training loop has met so far.
    """

    graph: StepGraph
    costs: Costs
    plan: Plan
    tape: Tape
    trace_s: float
    measure_s: float
    group: dist.ProcessGroup | None = None
    seen_mismatches: int = 0
    calls: int = 0
    replans: int = 0

    @property
    def program(self) -> PlanProgram:
        return self.tape.program


class Planner:
    """Makes plans for one model.

    Attributes:
        options: What ``fit`` was asked for.
        capacities: Most bytes of each tier that plans may use; emptied where tiers that nobody named cannot be used.
        warnings: What you should know, one line each.
    """

    def __init__(self, model: nn.Module, options: FitOptions, capacities: dict[str, int]) -> None:
        self._model = weakref.ref(model)
        self.options = options
        self.capacities = capacities
        self.warnings: list[str] = []
        self._tiers: dict[str, Tier] = {}  # shared by all plans

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise LowtideError("the fitted model is gone: nothing holds it any more.")
        return model

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            logger.warning("lowtide: %s", text)

    def on_replay_difference(self, op: TapedOp) -> None:
        """A replay gave other bits."""
        self.warn(f"{op.name} in {op.where or 'the model'} gives other bits when it runs again: saved from now on")

    def make(self, batch: Any, step: Step | None, *, allow_least: bool = False) -> PlannedShape:
        """Trace, measure, solve, and rehearse until every replay is proven.

        Args:
            allow_least: A shape met in mid-training: where no plan fits, take the one with the least peak.
        """
        model, batch = self.model, without_history(batch)
        with stages("trace", "measure", "solve", "rehearse") as next_stage:
            start = time.perf_counter()
            # A new shape in mid-training may be one rank's alone: nobody would answer.
            group = None if allow_least else group_of(model)
            forward = partial(run_on_all_ranks, group, "the forward pass")
            before = versions(model, batch)
            record_step = partial(record, model, batch, step, self.options.optimizer, forward=forward)
            graph = run_on_all_ranks(group, "tracing", record_step)
            traced = time.perf_counter()
            unwritten = {key for key, version in versions(model, batch).items() if before.get(key) == version}
            next_stage()
            costs = run_on_all_ranks(group, "measuring", partial(self._measure, graph))
            measured = time.perf_counter()
            next_stage()
            try:
                graph, plan = self._solve(graph, costs, group, allow_least or self._was_told_enough())
            except BudgetInfeasibleError as error:
                _told.setdefault(model, {})[error.least_bytes] = (graph.fingerprint, costs)
                raise
            next_stage()
            for _ in range(_ATTEMPTS):  # a replay that differs is saved, and the rest planned again
                try:
                    opened = partial(open_tiers, plan, self.options.offload, self.capacities, self._tiers)
                    tiers = run_on_all_ranks(group, "opening tiers", opened)
                    tape = Tape(program_of(plan), model, tiers)
                    tape.proves_at_birth = self.on_replay_difference  # what no rehearsal could prove
                    planned = PlannedShape(graph, costs, plan, tape, traced - start, measured - traced, group)
                    differed: set[int] = set().union(
                        *from_all_ranks(group, self._rehearse(planned, batch, step, unwritten))
                    )
                except TierError as error:
                    if group is not None:
                        raise
                    self._drop_tiers(error)
                    graph, plan = self._solve(graph, costs, group, allow_least)
                    continue
                self._tiers.update(tiers)
                if not differed:
                    break
                graph = _with_fixed_storages(graph, differed)
                graph, plan = self._solve(graph, costs, group, True)  # what must be saved now may need more
        return planned

    def _was_told_enough(self) -> bool:
        """Whether an earlier error said that this budget would do. If a second trace needs more, then that is taken."""
        return self.options.budget in _told.get(self.model, {})

    def _measure(self, graph: StepGraph) -> Costs:
        budget = self.options.budget
        if self._was_told_enough():  # the search finds the same plan again with the same costs
            fingerprint, costs = _told[self.model][budget]
            if fingerprint == graph.fingerprint:
                return costs
        memory_bytes = None
        if parse_budget(budget) != "auto":
            budget_bytes = absolute_bytes(graph, Costs((1.0,) * len(graph.ops)), budget)
            memory_bytes = budget_bytes - _live_bytes(self.model, graph)
        measured = partial(measure, graph, scratch_dir=self.options.offload.scratch_dir, memory_bytes=memory_bytes)
        try:
            return measured(tiers=tuple(self.capacities))
        except TierError as error:
            self._drop_tiers(error)
            return measured(tiers=())

    def _drop_tiers(self, error: TierError) -> None:
        """Plan without tiers that failed and that nobody asked for. Raises: TierError: somebody did."""
        if not self.options.offload.is_automatic or not self.capacities:
            raise error
        self.warn(f"planned without other tiers: {str(error).splitlines()[0]}")
        self.capacities.clear()
        self._tiers.clear()

    def _solve(
        self, graph: StepGraph, costs: Costs, group: dist.ProcessGroup | None, allow_least: bool
    ) -> tuple[StepGraph, Plan]:
        options = self.options
        budget = _auto_budget(self.model, graph) if parse_budget(options.budget) == "auto" else options.budget

        def solved(graph: StepGraph, budget: int | str) -> Plan:
            return solve(graph, costs, budget, method=options.method, offload=self.capacities, **options.solver)

        if group is not None:
            return agree_on_plan(group, graph, absolute_bytes(graph, costs, budget), solved)
        try:
            return graph, solved(graph, budget)
        except BudgetInfeasibleError as error:
            if not allow_least:
                raise
            self.warn(
                f"no plan fits {format_bytes(error.budget_bytes)} for {graph.provenance.get('batch', 'this input')}: "
                f"running at the least there is, {format_bytes(error.least_bytes)}"
            )
            return graph, solved(graph, error.least_bytes)

    def _rehearse(self, planned: PlannedShape, batch: Any, step: Step | None, unwritten: set[int]) -> set[int]:
        """Run the step under the plan and compare every replay; the ids of storages that differed.

        No tensor is kept for that: each op runs twice at once, and a fingerprint of what it dropped is compared with
        its replay's.

        Raises:
            TierError: what was moved came back with other bits, or not at all.
        """
        program, model, plan = planned.program, self.model, planned.plan
        fits = available_bytes(device_of(model)) > plan.predicted_peak_bytes - plan.resident_bytes
        # One rank alone would wait for the others.
        if not any(from_all_ranks(planned.group, fits and not program.keeps_everything)):
            return set()
        tape = Tape(program, model, planned.tape.tiers)
        tape.proves_at_birth, tape.rehearses = self.on_replay_difference, True
        # FSDP makes and adds up gradients itself.
        gradients: Gradients = "zeroed" if wrapped_parameters(model) else "discarded"
        with preserve_training_state(
            model, batch, gradients=gradients, written_parameters=plan.written_parameters, unwritten=unwritten
        ):
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
                    self.on_replay_difference(op)
        # An op whose replay differed drops nothing any more.
        return {d.storage for d in plan.decisions if d.action == RECOMPUTE and not program.ops[d.op].drops}


def _auto_budget(model: nn.Module, graph: StepGraph) -> int:
    """What lives now plus what is free, less a margin, absolute bytes."""
    return _live_bytes(model, graph) + int((1 - AUTO_MARGIN) * available_bytes(device_of(model)))


def _live_bytes(model: nn.Module, graph: StepGraph) -> int:
    """What lives now of what is resident in the step."""
    to_come = 0 if any(p.grad is not None for p in model.parameters()) else graph.resident["gradients"]
    return graph.resident_bytes - to_come - graph.resident["optimizer"]


def _with_fixed_storages(graph: StepGraph, storages: set[int]) -> StepGraph:
    fixed = tuple(replace(s, fixed="its replay differed") if s.id in storages else s for s in graph.storages)
    return replace(graph, storages=fixed)
