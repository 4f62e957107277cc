"""What the figures show: plans of a committed graph, simulated from what each recomputes, and the tutorial's step."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from provenance import provenance

import lowtide
from lowtide.graph.costs import Costs
from lowtide.graph.facts import step_facts
from lowtide.graph.json_format import load, load_costs
from lowtide.graph.step_graph import RUN, StepGraph
from lowtide.plan import RECOMPUTE, SAVE, Plan
from lowtide.simulation.simulator import Timeline, simulate_actions
from lowtide.solvers.published.methods import BUDGETED, FIXED

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = RESULTS / "figures.jsonl"
MIB = 2**20
CASE = "decoder8_4096"  # the decoder of README's table
HALF, AS_SMALL = "half of the activations", "full's peak"
_SHARES = ("75%", "50%", "36%", "25%", "18%")  # budgets for the published methods that need one
# Of the front, in percent of the plain step's activations: time rises steeply towards the least peak.
_FRONT = (15, 16, 16.5, 17, 17.5, 20, 22, 25, 28, 32, 36, 40, 45, 54, 64, 75, 87, 100)


@dataclass(frozen=True)
class Curve:
    """Memory over one step, replays at their time.

    Attributes:
        points: (ms, live bytes from then on), the last at the end of the step.
        backward_ms: When backward begins.
    """

    points: list[tuple[float, int]]
    backward_ms: float

    @property
    def peak_bytes(self) -> int:
        return max(size for _, size in self.points)

    @property
    def end_ms(self) -> float:
        return self.points[-1][0]


@dataclass(frozen=True)
class Planned:
    """One plan of ``CASE`` as the results have it, and the step that it gives."""

    method: str
    budget: str
    budget_bytes: int | None
    bound_ms: float | None
    timeline: Timeline


class Results:
    """The committed results, and what follows from them without solving anything."""

    def __init__(self, lines: list[dict]) -> None:
        self.lines = lines

    @classmethod
    def read(cls) -> Results:
        return cls([json.loads(line) for line in FIGURES.read_text().splitlines()])

    @cached_property
    def graph(self) -> StepGraph:
        return load(ROOT / "tests" / "graphs" / f"{CASE}.json.gz")

    @cached_property
    def costs(self) -> Costs:
        return load_costs(ROOT / "tests" / "graphs" / f"{CASE}.costs.json.gz")

    @cached_property
    def plans(self) -> list[Planned]:
        found = []
        for line in self.lines:
            if line["case"] != CASE:
                continue
            if line["graph_fingerprint"] != self.graph.fingerprint:
                raise SystemExit(f"{FIGURES.name} is of another {CASE}. Run: python benchmarks/figures.py --plan")
            actions = {**dict.fromkeys(line["save"], SAVE), **dict.fromkeys(line["recompute"], RECOMPUTE)}
            replays = {int(storage): count for storage, count in line["replays"].items()}
            timeline = simulate_actions(self.graph, self.costs, actions, replays)
            found.append(Planned(line["method"], line["budget"], line["budget_bytes"], line["bound_ms"], timeline))
        return found

    def plan(self, method: str, budget: str = "") -> Planned:
        (found,) = (plan for plan in self.plans if (plan.method, plan.budget) == (method, budget))
        return found

    def curve(self, plan: Planned) -> Curve:
        return curve(self.graph, self.costs, plan.timeline)

    @property
    def tutorial(self) -> dict:
        (line,) = (line for line in self.lines if line["case"] == "tutorial")
        return line

    @cached_property
    def measured(self) -> dict[str, dict]:
        """By method what ``decoder.py`` measured on the same decoder, with memory fixed to the process."""
        lines = map(json.loads, (RESULTS / "decoder_cpu.jsonl").read_text().splitlines())
        return {x["method"]: x for x in lines if x["case"] == "vocabulary 4096" and x["malloc"] == "fixed"}


def curve(graph: StepGraph, costs: Costs, timeline: Timeline) -> Curve:
    """The step of ``timeline`` over time; the tape's own work is spread evenly over forward."""
    of_event: dict[int, list] = {}
    for replay in timeline.replays:
        of_event.setdefault(replay.event, []).append(replay)
    replay_ms = sum(costs.op_ms[r.op] + costs.replay_us / 1e3 for r in timeline.replays)
    tape_ms = (timeline.recompute_ms - replay_ms) / len(graph.forward_ops)
    at, backward_ms, points = 0.0, 0.0, []
    first_backward = step_facts(graph).first_backward_run
    for event, (kind, number) in enumerate(graph.events):
        if event == first_backward:
            backward_ms = at
        for replay in of_event.get(event, ()):
            points.append((at, replay.peak_bytes))
            at += costs.op_ms[replay.op] + costs.replay_us / 1e3
        high = timeline.live_bytes if event in of_event else timeline.event_peak_bytes
        points.append((at, high[event]))
        if kind == RUN:
            at += costs.op_ms[number] + (0.0 if graph.ops[number].backward else tape_ms)
    return Curve([*points, (at, timeline.live_bytes[-1])], backward_ms)


def thinned(points: list[tuple[float, int]], count: int) -> list[tuple[float, int]]:
    """At most ``count`` steps of equal length, each with the most of its time; and the last point."""
    end = points[-1][0]
    most: dict[int, int] = {}
    for at, size in points[:-1]:
        slot = min(int(at / end * count), count - 1)
        most[slot] = max(most.get(slot, 0), size)
    return [*((slot * end / count, size) for slot, size in most.items()), points[-1]]


# -- solving, once ------------------------------------------------------------------------------------------


def plan_all() -> None:
    """Solve for every plan that a figure shows, run the tutorial's step, and write ``FIGURES``."""
    results = Results([])
    graph, costs = results.graph, results.costs
    lines = [_line("none", "", lowtide.solve(graph, costs, method="none"))]
    full = lowtide.solve(graph, costs, method="full")
    for method in FIXED:
        if method != "none":
            lines.append(_line(method, "", lowtide.solve(graph, costs, method=method)))
    for method in BUDGETED:
        for share in _SHARES:
            try:
                lines.append(_line(method, share, lowtide.solve(graph, costs, share, method=method)))
            except lowtide.BudgetInfeasibleError:
                continue
    budgets: dict[str, int | str] = {HALF: "50%", AS_SMALL: full.predicted_peak_bytes}
    budgets |= {f"{share}%": f"{share}%" for share in _FRONT}
    lines += [_line("exact", name, lowtide.solve(graph, costs, budget)) for name, budget in budgets.items()]
    told = provenance()
    FIGURES.write_text("".join(json.dumps({**line, **told}) + "\n" for line in [*lines, _tutorial_line()]))


def _line(method: str, budget: str, plan: Plan) -> dict:
    by_action = {
        action: [d.storage for d in plan.decisions if d.action == action and (d.stored or action == RECOMPUTE)]
        for action in (SAVE, RECOMPUTE)
    }
    by_action[SAVE] += [d.storage for d in plan.decisions if d.action == SAVE and not d.stored]
    return {
        "benchmark": "figures", "case": CASE, "graph_fingerprint": plan.graph_fingerprint, "method": method,
        "budget": budget, "budget_bytes": plan.budget_bytes, "bound_ms": plan.bound_ms, **by_action,
        "replays": plan.replays_of(),
    }  # fmt: skip


def _tutorial_line() -> dict:
    """One step of the model on the tutorial's page, plain and planned."""
    torch.set_num_threads(1)
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)[:2]:
        exec(block, namespace)
    fit = namespace["fit"]
    graph, costs, plan = fit.graph, fit.costs, fit.plan
    curves = {
        name: curve(graph, costs, lowtide.simulate(graph, costs, actions))
        for name, actions in (("plain", {}), ("planned", plan))
    }
    fit.remove()
    return {
        "benchmark": "figures", "case": "tutorial", "resident_bytes": plan.resident_bytes,
        "budget_bytes": plan.budget_bytes, "backward_ms": round(curves["plain"].backward_ms, 3),
        **{name: [(round(at, 3), size) for at, size in thinned(c.points, 800)] for name, c in curves.items()},
    }  # fmt: skip
