"""From one batch to a plan in force: trace, measure, solve, and rehearse until every replay is proven."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowtide.errors import BudgetInfeasibleError, LowtideError, TierError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.measurement.allocator import available_bytes
from lowtide.measurement.op_times import measure
from lowtide.plan import Plan
from lowtide.rank_consensus import agree_on_plan, any_rank, group_of, run_on_all_ranks, union_over_ranks
from lowtide.reports.progress import Stages
from lowtide.solvers.dispatch import absolute_bytes, solve
from lowtide.tape import attach
from lowtide.tape.offload.tier_settings import TierSettings
from lowtide.tape.offload.tiers import Tier
from lowtide.tape.program import Program, Slot
from lowtide.tape.tape import Audit, Tape
from lowtide.tracing import module_calls
from lowtide.tracing.batches import without_history
from lowtide.tracing.operators import fingerprint
from lowtide.tracing.restore import preserve_training_state
from lowtide.tracing.tracer import Step, device_of, record, run_step
from lowtide.units import format_bytes

logger = logging.getLogger("lowtide")
_KNOWN = frozenset({"aten", "prims"})  # operators whose schemas are checked by the list and at first sight
AUTO_MARGIN = 0.1  # of free memory, left alone by budget="auto": allocator fragmentation, and whoever else allocates
_REHEARSALS = 4  # at most, to audit every dropped tensor when memory holds only some beside their recipes


@dataclass
class Planned:
    """One input shape: its graph, costs and plan, and the tape that carries it out."""

    graph: StepGraph
    costs: Costs
    plan: Plan
    tape: Tape
    trace_s: float
    measure_s: float
    replans: int = 0
    seen_mismatches: int = 0
    calls: int = 0
    group: dist.ProcessGroup | None = None  # ranks that were planned for together

    @property
    def program(self) -> Program:
        return self.tape.program


@dataclass
class Settings:
    """What ``fit`` was asked for."""

    budget: int | float | str
    optimizer: Any
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    places: TierSettings = field(default_factory=TierSettings)
    tiers_automatic: bool = False  # the tiers are ours to choose, so a plan without them is as good as asked for

    @property
    def tiers(self) -> tuple[str, ...]:
        return tuple(self.options.get("offload", ()))


class Planner:
    """Makes plans for one model.

    Attributes:
        warnings: What you should know, one line each.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model = weakref.ref(model)
        self.settings = settings
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

    def differed(self, slot: Slot) -> None:
        """A replay gave other bits."""
        self.warn(f"{slot.name} in {slot.where or 'the model'} gives other bits when it runs again: saved from now on")

    def make(self, batch: Any, step: Step | None, *, fall_back: bool = False) -> Planned:
        """Trace, measure, solve, and rehearse until every replay is proven.

        Args:
            fall_back: A shape met in mid-training: where no plan fits, take the least there is.
        """
        model, settings, batch = self.model, self.settings, without_history(batch)
        with Stages("trace", "measure", "solve", "rehearse") as stages:
            start = time.perf_counter()
            # A new shape in mid-training may be one rank's alone: nobody would answer.
            group = None if fall_back else group_of(model)
            graph = run_on_all_ranks(
                group,
                "tracing",
                lambda: record(
                    model,
                    batch,
                    step,
                    settings.optimizer,
                    forward=lambda run: run_on_all_ranks(group, "the forward pass", run),
                ),
            )
            traced = time.perf_counter()
            stages.next()
            costs = run_on_all_ranks(group, "measuring", lambda: self._measure(graph))
            measured = time.perf_counter()
            stages.next()
            graph, plan = self._solve(graph, costs, group, fall_back)
            stages.next()
            for _ in range(3):  # a replay that differs is saved, and the rest planned anew
                try:
                    tiers = run_on_all_ranks(group, "opening tiers", partial(settings.places.open, plan, self._tiers))
                    tape = Tape(attach.program_of(plan), model, tiers)
                    planned = Planned(graph, costs, plan, tape, traced - start, measured - traced, group=group)
                    differed = union_over_ranks(group, self._rehearse(planned, batch, step))
                except TierError as error:
                    if group is not None:
                        raise
                    self._do_without(error)
                    graph, plan = self._solve(graph, costs, group, fall_back)
                    continue
                self._tiers.update(tiers)
                if not differed:
                    break
                graph = _with_fixed(graph, differed)
                graph, plan = self._solve(graph, costs, group, fall_back)
        return planned

    def _measure(self, graph: StepGraph) -> Costs:
        settings = self.settings
        try:
            return measure(graph, tiers=settings.tiers, scratch_dir=settings.places.scratch_dir)
        except TierError as error:
            self._do_without(error)
            return measure(graph, tiers=settings.tiers)

    def _do_without(self, error: TierError) -> None:
        """Plan without tiers that failed and that nobody asked for. Raises: TierError: somebody did."""
        settings = self.settings
        if not settings.tiers_automatic or "offload" not in settings.options:
            raise error
        self.warn(f"planned without other tiers: {str(error).splitlines()[0]}")
        settings.options = {k: v for k, v in settings.options.items() if k != "offload"}
        self._tiers.clear()

    def _solve(
        self, graph: StepGraph, costs: Costs, group: dist.ProcessGroup | None, fall_back: bool
    ) -> tuple[StepGraph, Plan]:
        settings = self.settings
        budget: int | str
        if settings.budget == "auto":
            budget = _auto_budget(self.model, graph)
        elif isinstance(settings.budget, float):
            budget = f"{settings.budget * 100!r}%"
        else:
            assert isinstance(settings.budget, int)
            budget = settings.budget
        if group is not None:
            budget_bytes = absolute_bytes(graph, costs, budget)
            return agree_on_plan(
                group, graph, budget_bytes, lambda g, b: solve(g, costs, b, method=settings.method, **settings.options)
            )
        try:
            return graph, solve(graph, costs, budget, method=settings.method, **settings.options)
        except BudgetInfeasibleError as error:
            if not fall_back:
                raise
            self.warn(
                f"no plan fits {format_bytes(error.budget_bytes)} for {graph.provenance.get('batch', 'this input')}: "
                f"running at the least there is, {format_bytes(error.least_bytes)}"
            )
            return graph, solve(graph, costs, error.least_bytes, **settings.options)

    def _rehearse(self, planned: Planned, batch: Any, step: Step | None) -> set[int]:
        """Audit: keep what is dropped beside its recipe, compare bitwise at replay. Returns storages that differed.

        Raises:
            TierError: what was moved came back with other bits, or not at all.
        """
        program = planned.program
        differed: list[Slot] = []
        model = self.model
        ids = {id(slot): n for n, slot in enumerate(program.slots)}
        drops = {id(s): s.drops for s in program.slots}
        stuck = False
        unproven = bool(planned.plan.tiers)
        for _ in range(_REHEARSALS):
            waiting = len(program.unaudited())
            need = planned.plan.predicted_peak_bytes - planned.plan.resident_bytes
            allowance = available_bytes(device_of(model)) - need
            if not any_rank(planned.group, allowance > 0 and ((waiting > 0 and not stuck) or unproven)):
                break
            tape = Tape(program, model, planned.tape.tiers)
            # Memory comes in pieces: what is kept beside never takes all that is free.
            share_bytes = max(allowance, 0) // (3 if unproven else 2)
            tape.audit = Audit(program, share_bytes, differed.append)
            tape.beside_bytes = share_bytes if unproven else 0
            with (
                preserve_training_state(model, batch, written_parameters=planned.plan.written_parameters),
                _installed(model),
            ):
                with torch.enable_grad(), tape.region(program.root, whole_step=True):
                    loss, output = run_step(model, batch, step)
                before = [fingerprint(b) for b in model.buffers()]
                loss.backward()
                moved = before != [fingerprint(b) for b in model.buffers()]
                del loss, output
            if moved:  # an op of somebody's own writes a buffer that it is not even handed
                foreign = [s for s in program.slots if s.drops and s.func and s.func.namespace not in _KNOWN]
                for slot in foreign:
                    slot.drops = ()
                differed += foreign
            stuck, unproven = len(program.unaudited()) == waiting, False
        for slot in differed:
            self.differed(slot)
        by_op = {ids[id(slot)]: drops[id(slot)] for slot in differed}
        return {d.storage for d in planned.plan.decisions if any(d.output == o for o, _ in by_op.get(d.op, ()))}


@contextmanager
def _installed(model: nn.Module) -> Iterator[None]:
    undo = module_calls.install(model, attach.GuardedCall(model, lambda args, kwargs: None))
    try:
        yield
    finally:
        undo()


def _auto_budget(model: nn.Module, graph: StepGraph) -> int:
    """What lives now plus what is free, less a margin, absolute bytes."""
    device = device_of(model)
    to_come = 0 if any(p.grad is not None for p in model.parameters()) else graph.resident["gradients"]
    now = graph.resident_bytes - to_come - graph.resident["optimizer"]
    return now + int((1 - AUTO_MARGIN) * available_bytes(device))


def _with_fixed(graph: StepGraph, storages: set[int]) -> StepGraph:
    fixed = tuple(replace(s, fixed="its replay differed") if s.id in storages else s for s in graph.storages)
    return replace(graph, storages=fixed)
