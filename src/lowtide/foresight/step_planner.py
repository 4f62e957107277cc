"""Plans for one step on one device, beside what micro-batches that wait for their backward hold."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from lowtide.errors import BudgetInfeasibleError
from lowtide.estimation.device_table import Device
from lowtide.estimation.roofline import estimate
from lowtide.foresight.pipeline import waiting_bytes
from lowtide.foresight.training_setup import SetupError
from lowtide.graph.costs import HOST
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.settings.decisions import candidate_of
from lowtide.settings.description import Checkpoint, Description
from lowtide.settings.torchtitan import KEEPS
from lowtide.simulation.simulator import Timeline, simulate
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.dispatch import solve
from lowtide.solvers.graph_queries import layers
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.published.methods import fixed_plans
from lowtide.solvers.search_context import SearchContext

_BUDGETS_TRIED = 6
LARGE_OPS = 12_000  # of a step: a search for the best plan then takes minutes (SDXL's U-Net has 18,660)
_NUMBERED = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")  # path of the outermost numbered module
_SAME_BUDGET = 0.005  # of what a step makes: plans for budgets that differ by less hardly do


class PlannedMicroBatch(NamedTuple):
    """A plan for one micro-batch; without one, the rest is of the least that was found.

    Attributes:
        peak_bytes: Of its step, as the graph counts.
        waiting_bytes: What other micro-batches, which wait, hold meanwhile.
    """

    plan: Plan | None
    peak_bytes: int
    waiting_bytes: int


class StepPlanner:
    """Plans for one step; what they share is found once. ``others``: how many micro-batches wait beside it."""

    def __init__(self, graph: StepGraph, device: Device) -> None:
        self.graph, self.costs = graph, estimate(graph, device=device)
        self._first_plans: list[tuple[int, Plan]] = []  # with their budgets

    @cached_property
    def known(self) -> list[Timeline]:
        """Plans that need no search, simulated; the plain step first."""
        return [found.timeline for found in fixed_plans(SearchContext(self.graph, self.costs))]

    def plain(self, others: int) -> PlannedMicroBatch:
        """Everything is saved."""
        return self._planned(solve(self.graph, self.costs, method="none"), others)

    def selective_op(self, others: int) -> PlannedMicroBatch:
        """Layers are checkpoints that keep attention and every other matrix product, as torchtitan's ``op`` says.

        Raises:
            SetupError: no layer repeats.
        """
        if self._selective_op is None:
            raise SetupError("--selective-op is about layers, and this model repeats none. Leave it out.")
        return self._planned(self._selective_op, others)

    @cached_property
    def _selective_op(self) -> Plan | None:
        paths = (_NUMBERED.match(self.graph.scope(self.graph.ops[op])) for op in layers(self.graph))
        found = dict.fromkeys(path[0] for path in paths if path)
        if not found:
            return None
        checkpoints = tuple(Checkpoint((path,), KEEPS, skips_every=2) for path in found)
        candidate, _ = candidate_of(self.graph, self.costs, Description("selective by op", checkpoints))
        return build_plan(SearchContext(self.graph, self.costs), candidate, method="settings")

    def within(self, budgets: list[int], others: int, *, thorough: bool, offload: bool) -> PlannedMicroBatch:
        """The plan for the first of ``budgets`` that there is one for.

        Args:
            thorough: Solve for the plan with a bound; else the first good one is taken.
            offload: Activations may go to the host.
        """
        least, plan = self.graph.resident_bytes, None
        for budget_bytes in budgets:
            # Where a known plan fits, the bound on all plans would take longer.
            if not offload and all(line.peak_bytes > budget_bytes for line in self.known):
                least = bound_peak(self.graph)
                if budget_bytes < least:
                    continue
            if offload and self.is_large and not thorough:
                raise SetupError(f"moving activations of {len(self.graph.ops)} ops takes minutes to plan: not tried.")
            if self.is_large and not offload and not others and (quick := self._knapsack(budget_bytes)) is not None:
                plan = quick
            elif offload or (thorough and not others):
                try:
                    plan = solve(self.graph, self.costs, budget_bytes, offload=(HOST,) if offload else ())
                except BudgetInfeasibleError as error:
                    least = max(least, error.least_bytes)
            elif others:
                plan = self.first_beside(others, budget_bytes)
            else:
                plan = self._first_or_near(budget_bytes)
            if plan is not None:
                return self._planned(plan, others)
        # What the leanest of the known plans would hold.
        return PlannedMicroBatch(None, least, others * min(waiting_bytes(self.graph, e.live_bytes) for e in self.known))

    def missing_bytes(self, most: int, others: int, *, plain: bool) -> int:
        """What the leanest of the known plans, or the plain step, lacks of ``most`` bytes."""
        lines = self.known[:1] if plain else self.known
        return min(e.peak_bytes + others * waiting_bytes(self.graph, e.live_bytes) for e in lines) - most

    def first_beside(self, others: int, most: int) -> Plan | None:
        """A good plan under which the step, and micro-batches that wait, need no more than ``most`` bytes."""
        low, high, best = bound_peak(self.graph), most, None
        if most < low:
            return None

        def within(budget_bytes: int) -> Plan | None:
            plan = self._first(budget_bytes)
            if plan is None:
                return None
            planned = self._planned(plan, others)
            return replace(plan, budget_bytes=most) if planned.peak_bytes + planned.waiting_bytes <= most else None

        found = within(most)
        if found is not None or not others:
            return found
        for _ in range(_BUDGETS_TRIED):  # a smaller budget for one micro-batch leaves less of it waiting
            middle = (low + high) // 2
            found = within(middle)
            best, low, high = (found, middle, high) if found is not None else (best, low, middle)
        return best

    def _planned(self, plan: Plan, others: int) -> PlannedMicroBatch:
        held = waiting_bytes(self.graph, simulate(self.graph, self.costs, plan).live_bytes) if others else 0
        return PlannedMicroBatch(plan, plan.predicted_peak_bytes, others * held)

    @property
    def is_large(self) -> bool:
        """Whether a search for the best plan would take minutes."""
        return len(self.graph.ops) > LARGE_OPS

    def _knapsack(self, budget_bytes: int) -> Plan | None:
        """The plan of a published method that takes seconds, with a bound on how far it is from the best."""
        try:
            return solve(self.graph, self.costs, budget_bytes, method="knapsack")
        except BudgetInfeasibleError:
            return None

    def _first(self, budget_bytes: int) -> Plan | None:
        if self.is_large and (found := self._knapsack(budget_bytes)) is not None:
            return found
        try:
            return solve(self.graph, self.costs, budget_bytes, effort="first")
        except BudgetInfeasibleError:
            return None

    def _first_or_near(self, budget_bytes: int) -> Plan | None:
        """A good plan within the budget; one that was found for nearly so much serves again."""
        near = budget_bytes - _SAME_BUDGET * (budget_bytes - self.graph.resident_bytes)
        for budget, plan in self._first_plans:
            if budget >= near and plan.predicted_peak_bytes <= budget_bytes:
                return plan
        found = self._first(budget_bytes)
        if found is not None:
            self._first_plans.append((budget_bytes, found))
        return found
