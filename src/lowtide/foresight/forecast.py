"""Whether a setup fits its device, and under which plan: memory as low, expected and high, by part, and step time.

    low        what tensors take, and the least that a context takes
    expected   and the context, the libraries' workspace, buffers of communication, a little fragmentation
    high       and much fragmentation: the allocator's blocks are not filled

"fits" means that the high amount does, "does not fit" that the low one does not. The shares below are assumed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from lowtide.errors import BudgetInfeasibleError
from lowtide.estimation.device_table import Device
from lowtide.estimation.roofline import estimate
from lowtide.explanation import collapse_path
from lowtide.foresight.pipeline import waiting_bytes
from lowtide.foresight.rank_memory import RankMemory, parameter_bytes, precision_words, rank_memory
from lowtide.foresight.setup import PRECISIONS, Setup
from lowtide.foresight.step_time import step_ms
from lowtide.foresight.subjects import Facts, Subject
from lowtide.graph.costs import HOST, Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.simulation.simulator import simulate
from lowtide.solvers.arguments import absolute_bytes
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.dispatch import solve
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.search_context import Limits
from lowtide.units import parse_budget

FITS, UNCERTAIN, DOES_NOT_FIT = "fits", "uncertain", "does not fit"
_FRAGMENTATION = (0.0, 0.03, 0.10)  # of what a step makes
_CONTEXT = (0.7, 1.0, 1.3)
_WORKSPACE = (0, 1, 2)  # streams that use the libraries' workspace
# What changes nothing of what a rank holds through the step.
_OF_THE_STEP: dict[str, Any] = {"seq_len": 1, "batch_size": 1, "accumulate": 1, "attention": "auto",
                                "chunk_loss": False, "offload_activations": False}  # fmt: skip
_BUDGETS_TRIED = 6
_SAME_BUDGET = 0.005  # of what a step makes: plans for budgets that differ by less hardly do
_COMMUNICATION_BYTES = 1 << 29  # of one group of ranks
_COMMUNICATION = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Amount:
    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class Stage:
    """One rank of a stage of a pipeline.

    Attributes:
        layers: First and last.
        micro_batches: Whose activations it holds at most.
    """

    layers: tuple[int, int]
    micro_batches: int
    peak_bytes: Amount
    verdict: str


@dataclass(frozen=True)
class Forecast:
    """What is expected of one setup.

    Attributes:
        verdict: ``FITS``, ``UNCERTAIN`` or ``DOES_NOT_FIT``.
        by_part: Bytes that make up ``peak_bytes.expected``.
        step_ms: Of one optimizer's step; None where nothing was traced.
        plan: None where nothing was traced, or no plan is small enough.
        by_module: Bytes of parameters and of what backward needs, milliseconds; numbered siblings together.
        traced: False where what is resident alone is too much, so nothing had to be traced.
        stages: Of a pipeline, first to last; all else is of the one that holds most.
    """

    setup: Setup
    verdict: str
    peak_bytes: Amount
    by_part: dict[str, int]
    host_bytes: int
    step_ms: Amount | None
    tokens_per_second: float | None
    plan: Plan | None
    assumptions: list[str]
    by_module: dict[str, dict[str, float]] = field(default_factory=dict)
    traced: bool = True
    stages: tuple[Stage, ...] = ()

    @property
    def fits(self) -> bool:
        return self.verdict == FITS


class Room(NamedTuple):
    """Whether a step fits, and what the leanest published plan lacks; less than 0 where there is room."""

    fits: bool
    missing_bytes: float


class Forecaster:
    """Forecasts for setups of one subject; what they share is found once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._costs: dict[tuple[int, str], Costs] = {}
        self._searches: dict[tuple[int, str], ExactSearch] = {}
        # Budget and plan, by search.
        self._first_plans: dict[tuple[int, str], list[tuple[int, Plan]]] = defaultdict(list)
        self._ranks: dict[Setup, RankMemory] = {}

    def forecast(self, setup: Setup, *, budget: int | str | None = "auto", thorough: bool = True) -> Forecast:
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
        graph = self.subject.trace(setup)
        costs = self.costs(graph, setup.device)
        resident = rank.resident_bytes + graph.resident["batch"]
        shift = resident - graph.resident_bytes
        plan, step_peak, waiting = self._planned(graph, costs, setup, budget, resident, shift, thorough)
        during = step_peak + waiting + shift
        allocated = max(during, resident + rank.optimizer_step)
        peak = _allocator(setup, allocated, resident)
        verdict = _verdict(peak, setup.device) if plan is not None else DOES_NOT_FIT
        micro_ms = costs.plain_step_ms if plan is None else plan.predicted_step_ms
        took = step_ms(setup, facts, rank, micro_ms, graph)
        error = costs.error_fraction or 0.0
        return Forecast(
            setup, verdict, peak,
            _parts(setup, rank, graph.resident["batch"], during - resident, waiting, allocated, resident),
            rank.host,
            None if plan is None else Amount(took / (1 + error), took, took * (1 + error)),
            None if plan is None else 1e3 * setup.sequences * setup.seq_len / took,
            plan, _assumptions(setup, rank, graph), _by_module(facts, graph, costs),
        )  # fmt: skip

    def best_rate(self, setup: Setup) -> float:
        """Tokens a second if nothing had to be recomputed: no plan is faster. 0 where no plan can fit."""
        rank = self.rank(setup)
        if self.refuses(setup) or rank.resident_bytes + rank.optimizer_step > _most_allocated(setup, 0):
            return 0.0
        graph = self.subject.trace(setup)
        micro_ms = self.costs(graph, setup.device).plain_step_ms
        took = step_ms(setup, self.subject.facts(setup), rank, micro_ms, graph)
        return 1e3 * setup.sequences * setup.seq_len / took

    def refuses(self, setup: Setup) -> bool:
        """Whether what lives through the whole step is too much already: no trace is needed to know."""
        if _is_pipeline(setup):
            return any(map(self.refuses, _stages(setup)))
        resident = self.rank(setup).resident_bytes
        return _allocator(setup, resident, resident).low > setup.device.usable_bytes

    def rank(self, setup: Setup) -> RankMemory:
        key = replace(setup, **_OF_THE_STEP)
        if key not in self._ranks:
            self._ranks[key] = rank_memory(self.subject.facts(setup), setup)
        return self._ranks[key]

    def costs(self, graph: StepGraph, device: Device) -> Costs:
        key = id(graph), device.name  # the subject keeps its graphs
        if key not in self._costs:
            self._costs[key] = estimate(graph, device=device)
        return self._costs[key]

    def search(self, graph: StepGraph, device: Device) -> ExactSearch:
        key = id(graph), device.name
        if key not in self._searches:
            self._searches[key] = ExactSearch(graph, self.costs(graph, device), Limits())
        return self._searches[key]

    def room(self, setup: Setup, *, plain: bool = False) -> Room:
        """Whether the step fits under some plan, or as it is, and what is missing."""
        if _is_pipeline(setup):
            rooms = [self.room(stage, plain=plain) for stage in _stages(setup)]
            return Room(all(r.fits for r in rooms), max(r.missing_bytes for r in rooms))
        rank = self.rank(setup)
        missing = rank.resident_bytes + rank.optimizer_step - _most_allocated(setup, rank.resident_bytes)
        if self.refuses(setup):
            return Room(False, missing)
        graph = self.subject.trace(setup)
        resident = rank.resident_bytes + graph.resident["batch"]
        search, shift = self.search(graph, setup.device), resident - graph.resident_bytes
        most = _most_allocated(setup, resident) - shift
        known = [search.plain] if plain else [search.plain, *search.published]
        others = setup.micro_batches_in_flight - 1
        lacking = min(e.peak_bytes + others * waiting_bytes(graph, e.timeline.live_bytes) for e in known) - most
        if missing > 0 or lacking <= 0 or plain:
            return Room(missing <= 0 and lacking <= 0, max(missing, lacking))
        # Where none of the published plans is small enough, one is looked for.
        return Room(self._first_beside_others(graph, setup, most) is not None, lacking)

    def _planned(
        self, graph: StepGraph, costs: Costs, setup: Setup, budget: int | str | None, resident: int, shift: int,
        thorough: bool,
    ) -> tuple[Plan | None, int, int]:  # fmt: skip
        """A plan, the peak of its step, as the graph counts, and what micro-batches that wait hold beside it.

        No plan: the least peak that was found.
        """
        others = setup.micro_batches_in_flight - 1

        def waiting(plan: Plan) -> int:
            return others * waiting_bytes(graph, simulate(graph, costs, plan).live_bytes) if others else 0

        if budget is None:
            plan = solve(graph, costs, method="none")
            return plan, plan.predicted_peak_bytes, waiting(plan)
        parsed = parse_budget(budget)
        if parsed != "auto":
            most = [absolute_bytes(graph, costs, budget) - (0 if isinstance(parsed, float) else shift)]
        else:
            most = [_most_allocated(setup, resident) - shift]
            if thorough:
                most.append(setup.device.usable_bytes - int(_beside(setup, 0)) - shift)
        search = self.search(graph, setup.device)
        least = graph.resident_bytes
        for budget_bytes in most:
            if not setup.offload_activations and not _surely_fits(search, budget_bytes):
                least = bound_peak(graph)
                if budget_bytes < least:
                    continue
            if setup.offload_activations or (thorough and not others):
                try:
                    plan = solve(graph, costs, budget_bytes, offload=(HOST,) if setup.offload_activations else ())
                    return plan, plan.predicted_peak_bytes, waiting(plan)
                except BudgetInfeasibleError as error:
                    least = max(least, error.least_bytes)
            elif not others:
                if (quick := self._first_plan(search, setup.device, budget_bytes)) is not None:
                    return quick, quick.predicted_peak_bytes, 0
            elif found := self._first_beside_others(graph, setup, budget_bytes):
                plan = build_plan(graph, costs, found, method="exact", budget_bytes=budget_bytes, start_s=0,
                                  bounded=False)  # fmt: skip
                return plan, plan.predicted_peak_bytes, waiting(plan)
        if others:  # what the leanest of the known plans would hold
            held = [waiting_bytes(graph, e.timeline.live_bytes) for e in (search.plain, *search.published)]
            return None, least, others * min(held)
        return None, least, 0

    def _first_beside_others(self, graph: StepGraph, setup: Setup, most: int) -> Candidate | None:
        """A good plan under which the step, and micro-batches that wait, need no more than ``most`` bytes."""
        search, others, least = self.search(graph, setup.device), setup.micro_batches_in_flight - 1, bound_peak(graph)
        if most < least:
            return None
        if not others:
            return search.first(most, near_least=False)

        def within(budget_bytes: int) -> Candidate | None:
            found = search.first(budget_bytes, near_least=False)
            if found is None:
                return None
            evaluated = search.context.evaluate(found.actions, found.replays)
            held = others * waiting_bytes(graph, evaluated.timeline.live_bytes)
            return found if evaluated.peak_bytes + held <= most else None

        if found := within(most):
            return found
        low, high, best = least, most, None  # a smaller budget for one micro-batch leaves less of it waiting
        for _ in range(_BUDGETS_TRIED):
            middle = (low + high) // 2
            found = within(middle)
            best, low, high = (found, middle, high) if found is not None else (best, low, middle)
        return best

    def _worst(self, stages: list[Forecast]) -> Forecast:
        """The stage that holds most, at the pace of the slowest."""
        order = (DOES_NOT_FIT, UNCERTAIN, FITS)
        worst = min(stages, key=lambda f: (order.index(f.verdict), -f.peak_bytes.expected))
        slowest = max((f for f in stages if f.step_ms is not None), key=lambda f: f.step_ms.expected, default=None)  # type: ignore[union-attr]
        known = worst.plan is not None and slowest is not None
        rows = []
        for f in stages:
            layers = self.subject.stage_layers(f.setup)
            row = Stage((layers[0], layers[-1]), f.setup.micro_batches_in_flight, f.peak_bytes, f.verdict)
            rows.append(row)
        return replace(
            worst, stages=tuple(rows), step_ms=slowest.step_ms if known and slowest else None,
            tokens_per_second=slowest.tokens_per_second if known and slowest else None,
        )  # fmt: skip

    def _first_plan(self, search: ExactSearch, device: Device, budget_bytes: int) -> Plan | None:
        """A good plan within the budget; one that was found for nearly so much serves again."""
        graph, costs = search.graph, search.costs
        found_before = self._first_plans[id(graph), device.name]
        near = budget_bytes - _SAME_BUDGET * (budget_bytes - graph.resident_bytes)
        for budget, plan in found_before:
            if budget >= near and plan.predicted_peak_bytes <= budget_bytes:
                return plan
        found = search.first(budget_bytes, near_least=False)
        if found is None:
            return None
        plan = build_plan(graph, costs, found, method="exact", budget_bytes=budget_bytes, start_s=0, bounded=False)
        found_before.append((budget_bytes, plan))
        return plan

    def residents(self, setup: Setup) -> Forecast:
        """What lives through the whole step alone: too much already, or uncertain."""
        if _is_pipeline(setup):
            return self._worst(list(map(self.residents, _stages(setup))))
        facts, rank = self.subject.facts(setup), self.rank(setup)
        resident = rank.resident_bytes
        allocated = resident + rank.optimizer_step
        notes = ["the step was not traced: activations count 0"]
        return Forecast(
            setup, DOES_NOT_FIT if self.refuses(setup) else UNCERTAIN, _allocator(setup, allocated, resident),
            _parts(setup, rank, 0, 0, 0, allocated, resident), rank.host, None, None, None,
            [*notes, *_assumptions(setup, rank, None)], _by_module(facts, None, None), traced=False,
        )  # fmt: skip


def _is_pipeline(setup: Setup) -> bool:
    """Whether all stages are asked about."""
    return setup.pipeline_parallel > 1 and setup.stage is None


def _stages(setup: Setup) -> list[Setup]:
    return [replace(setup, stage=stage) for stage in range(setup.pipeline_parallel)]


def _groups(setup: Setup) -> int:
    """Of ranks that communicate."""
    return sum(
        n > 1 for n in (setup.data_parallel, setup.tensor_parallel, setup.expert_parallel, setup.pipeline_parallel)
    )


def _surely_fits(search: ExactSearch, budget_bytes: int) -> bool:
    """Whether a plan that is known without a search does: the bound on all plans takes longer."""
    return any(e.peak_bytes <= budget_bytes for e in (search.plain, *search.published))


def _beside(setup: Setup, level: int) -> float:
    """Beside tensors: context, workspace, buffers of communication."""
    device = setup.device
    return (
        _CONTEXT[level] * device.context_bytes
        + _WORKSPACE[level] * device.blas_workspace_bytes
        + _COMMUNICATION[level] * _groups(setup) * _COMMUNICATION_BYTES
    )


def _allocator(setup: Setup, allocated: int, resident: int) -> Amount:
    low, expected, high = (
        math.ceil(allocated + _beside(setup, i) + _FRAGMENTATION[i] * (allocated - resident)) for i in range(3)
    )
    return Amount(low, expected, high)


def _most_allocated(setup: Setup, resident: int) -> int:
    """Allocated bytes of a step whose high amount just fits."""
    room = setup.device.usable_bytes - _beside(setup, 2) + _FRAGMENTATION[2] * resident
    return int(room / (1 + _FRAGMENTATION[2])) - 1


def _verdict(peak: Amount, device: Device) -> str:
    if peak.high <= device.usable_bytes:
        return FITS
    return UNCERTAIN if peak.low <= device.usable_bytes else DOES_NOT_FIT


def _parts(
    setup: Setup, rank: RankMemory, batch: int, activations: int, waiting: int, allocated: int, resident: int
) -> dict[str, int]:
    """Of the expected peak: in the step, or in ``optimizer.step()`` where that takes more."""
    expected = int(_allocator(setup, allocated, resident).expected)
    in_step = resident + activations == allocated
    found = {
        "parameters": rank.parameters,
        "gradients": rank.gradients,
        "optimizer": rank.optimizer,
        "buffers": rank.buffers,
        "batch": batch,
        "gathered": rank.gathered,
        "activations": activations - waiting if in_step else 0,
        "micro_batches_that_wait": waiting if in_step else 0,
        "optimizer_step": 0 if in_step else allocated - resident,
        "workspace": setup.device.blas_workspace_bytes,
        "context": setup.device.context_bytes,
    }
    found["communication"] = _groups(setup) * _COMMUNICATION_BYTES
    return found | {"fragmentation": expected - sum(found.values())}


def _assumptions(setup: Setup, rank: RankMemory, graph: StepGraph | None) -> list[str]:
    device = setup.device
    dtype = PRECISIONS[setup.precision][1] or PRECISIONS[setup.precision][0]
    found = [precision_words(setup), rank.rule]
    if setup.attention == "eager":
        found.append("attention: eager, its scores are stored")
    elif device.kind != "cpu":
        kernels = {op.name for op in graph.ops if "attention" in op.name} if graph is not None else set()
        named = next((k for k in ("flash", "efficient") if any(k in name for name in kernels)), None)
        found.append(f"attention: {named or 'math' if graph is not None else 'not traced'} kernel")
    if dtype not in device.matrix_flops:
        found.append(f"{device.title} has no matrix units for {dtype}: counted at the rate of a wider one")
    share = ", ".join(f"{100 * f:.0f} %" for f in _FRAGMENTATION)
    found.append(f"fragmentation: {share} of what a step makes (low, expected, high; assumed)")
    found.append("gradients count as there before the step")
    if device.kind not in ("cpu", "cuda"):
        found.append(f"the kernels of {device.kind} are not known: the CPU's are taken")
    if setup.quantized:
        found.append("time to expand 4-bit weights is not counted, nor the one layer that is expanded at a time")
    if setup.pipeline_parallel > 1:
        found.append("one forward, one backward in turn (1F1B); ranks wait while the pipeline fills and drains")
    if graph is not None:
        found += graph.provenance.get("assumed", "").splitlines()
    if device.kind != "cpu":
        found.append(
            f"no step was compared with a real {device.title}; times may be off by {device.error_fraction:.0%}"
        )
    return [line for line in found if line]


def _by_module(facts: Facts, graph: StepGraph | None, costs: Costs | None) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("parameters", "activations", "step_ms"), 0))
    for p in facts.parameters:
        found[collapse_path(p.name.rpartition(".")[0])]["parameters"] += parameter_bytes(p)
    if graph is not None and costs is not None:
        for s in graph.stored:
            maker = graph.storages[s].op
            assert maker is not None
            found[collapse_path(graph.scope(graph.ops[maker]))]["activations"] += graph.storages[s].bytes
        for op in graph.ops:
            found[collapse_path(graph.scope(op))]["step_ms"] += costs.op_ms[op.id]
    return {path: dict(row) for path, row in sorted(found.items())}


def as_json(forecast: Forecast, parameters: int) -> dict[str, Any]:
    """As ``lowtide plan --json`` shows it, without limits and changes."""
    plan = forecast.plan
    return {
        "fits": forecast.fits,
        "verdict": forecast.verdict,
        "parameters": parameters,
        "peak_bytes": asdict(forecast.peak_bytes),
        "by_part": forecast.by_part,
        "host_bytes": forecast.host_bytes,
        "step_ms": forecast.step_ms and asdict(forecast.step_ms),
        "tokens_per_second": forecast.tokens_per_second,
        "plan": plan and _plan_json(plan),
        "setup": forecast.setup.as_json,
        "by_module": forecast.by_module,
        "assumptions": forecast.assumptions,
        "worst_rank": worst_rank(forecast),
        "stages": [asdict(stage) for stage in forecast.stages],
    }


def worst_rank(forecast: Forecast) -> str:
    """Which rank the answer is of, in words; ranks that share a layer hold alike, the first the largest parts."""
    setup = forecast.setup
    if setup.ranks == 1:
        return "the only one"
    if setup.stage is None:
        return "the first of each group"
    first, last = forecast.stages[setup.stage].layers if forecast.stages else (0, 0)
    return f"stage {setup.stage} of 0 to {setup.pipeline_parallel - 1} (layers {first} to {last}), its first"


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "counts": plan.counts,
        "overhead": plan.predicted_overhead,
        "gap": None if math.isnan(plan.gap) else plan.gap,
        "method": plan.method,
        "budget_bytes": plan.budget_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
    }
