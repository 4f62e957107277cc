"""The whole trade-off of one step, with the published methods on the same axes: as data, and as a picture."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import TIERS, Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import TIER_OF, Plan
from lowtide.reports.plots import BUDGET, MOVED, PLAIN, PLANNED, axes_at
from lowtide.solvers.dispatch import solve
from lowtide.solvers.pareto_front import FrontierPoint, frontier
from lowtide.solvers.published.methods import BUDGETED, PUBLISHED

_SHARES = ("75%", "50%", "36%", "25%", "18%")  # budgets for the methods that need one


@dataclass(frozen=True)
class TradeOff:
    """Peak memory against step time, of lowtide and of the published methods.

    Attributes:
        front: Plans that save and recompute.
        moving: Plans that offload too; empty where the costs know no link.
        classics: Method -> its points of (peak bytes, step ms).
    """

    front: list[FrontierPoint]
    classics: dict[str, list[tuple[int, float]]]
    moving: list[FrontierPoint] = field(default_factory=list)

    def as_json(self) -> dict:
        """Plain types."""

        def plain(point: FrontierPoint) -> dict:
            overhead = point.plan.predicted_overhead
            return {"peak_bytes": point.peak_bytes, "step_ms": point.step_ms, "overhead": overhead}

        def moved_bytes(plan: Plan) -> int:
            return sum(d.bytes for d in plan.decisions if d.action in TIER_OF)

        return {
            "frontier": [plain(p) for p in self.front],
            "frontier_moving": [{**plain(p), "moved_bytes": moved_bytes(p.plan)} for p in self.moving],
            "classics": {
                method: [{"peak_bytes": peak, "step_ms": ms} for peak, ms in points]
                for method, points in self.classics.items()
            },
        }


def trade_off(
    graph: StepGraph, costs: Costs, *, points: int = 12, progress: Callable[[int, int], None] | None = None
) -> TradeOff:
    """Plan the step over its whole range of budgets, and by every published method that applies to it; where ``costs``
    knows links to other tiers, over the range that moving opens too."""
    classics: dict[str, list[tuple[int, float]]] = {}
    for method in PUBLISHED:
        found = set()
        for budget in _SHARES if method in BUDGETED else (None,):
            try:
                plan = solve(graph, costs, budget, method=method)
            except (BudgetInfeasibleError, ValueError):  # not in so little, or no layer repeats
                continue
            found.add((plan.predicted_peak_bytes, plan.predicted_step_ms))
        if found and method != "none":
            classics[method] = sorted(found)
    tiers = [tier for tier in costs.links if tier in TIERS]
    total = points * 2 if tiers else points
    report = progress or (lambda done, total: None)
    front = frontier(graph, costs, points=points, progress=lambda done, _: report(done, total))
    moving = []
    if tiers:
        moving = frontier(
            graph, costs, points=points, offload=tiers, progress=lambda done, _: report(points + done, total)
        )
    return TradeOff(front, classics, moving)


def plot_trade_off(found: TradeOff, path: str | Path) -> None:
    """Write peak memory against extra time to ``path``; the suffix (.png, .svg, .pdf) says how.

    Raises:
        LowtideError: matplotlib is not installed, or it cannot write that kind of file.
    """
    with axes_at(path, (7.5, 4.6), legend_columns=4) as axes:
        plan = found.front[-1].plan
        plain_ms, resident, whole = plan.plain_step_ms, plan.resident_bytes, plan.plain_peak_bytes - plan.resident_bytes

        def place(points: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
            return [100 * (b - resident) / whole for b, _ in points], [100 * (ms / plain_ms - 1) for _, ms in points]

        ours = place([(p.peak_bytes, p.step_ms) for p in found.front])
        axes.plot(*ours, color=PLANNED, marker="o", markersize=4, linewidth=1.6, label="lowtide", zorder=3)
        moving = place([(p.peak_bytes, p.step_ms) for p in found.moving])
        if found.moving:
            tiers = " and ".join(sorted(frozenset().union(*(p.plan.tiers for p in found.moving)))) or "no tier"
            label = f"lowtide, moving to {tiers}"
            axes.plot(*moving, color=MOVED, marker="o", markersize=4, linewidth=1.6, label=label, zorder=4)
        shapes = "s^vDPX*"
        for (method, points), shape in zip(found.classics.items(), shapes, strict=False):
            color = BUDGET if method == "full" else PLAIN
            axes.plot(*place(points), color=color, marker=shape, markersize=6, linestyle="", label=method, alpha=0.9)
        axes.set(xlabel="activation memory, % of the plain step's", ylabel="extra time, %")
        # Schedules that replay an op many times cost more than the rest of the picture is high.
        if max(*ours[1], *moving[1], *(y for points in found.classics.values() for y in place(points)[1])) > 100:
            axes.set_yscale("symlog", linthresh=10)
            axes.set_yticks([0, 5, 10, 20, 50, 100, 200], ["0", "5", "10", "20", "50", "100", "200"])
        axes.set_xlim(0, 103)
        axes.grid(linewidth=0.4, alpha=0.4)
