"""The whole trade-off of one step, with the published methods on the same axes: as data, and as a picture."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import TIERS, Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import TIER_OF, Plan
from lowtide.reports.labels import along, joined, placed
from lowtide.reports.plots import MOVED, PLAIN, PLANNED, axes_at
from lowtide.solvers.dispatch import solve
from lowtide.solvers.pareto_front import FrontierPoint, frontier
from lowtide.solvers.published.methods import BUDGETED, PUBLISHED

_STRAIGHT, _KNEE = 100.0, 10.0  # percent of extra time: from where on the axis bends, and where it does
_SHARES = ("75%", "50%", "36%", "25%", "18%")  # budgets for the methods that need one


@dataclass(frozen=True)
class TradeOff:
    """Peak memory against step time, of lowtide and of the published methods.

    Attributes:
        front: Plans that save and recompute.
        moving: Plans that offload too; empty where the costs know no link.
        classics: Method -> its points of (peak bytes, step ms).
        left_out: Method -> why it has no point.
    """

    front: list[FrontierPoint]
    classics: dict[str, list[tuple[int, float]]]
    moving: list[FrontierPoint] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def shares(self, points: Iterable[tuple[int, float]]) -> list[tuple[float, float]]:
        """Points of (peak bytes, step ms) in percent: of the plain step's activation memory, and of extra time."""
        plan = self.front[-1].plan
        return [(100 * plan.fraction_of(size), 100 * (ms / plan.plain_step_ms - 1)) for size, ms in points]

    def series(self) -> dict[str, list[tuple[int, float]]]:
        """lowtide's own lines, by name: one, or two where offloading is possible."""
        lines = {"lowtide": [(p.peak_bytes, p.step_ms) for p in self.front]}
        if self.moving:
            tiers = " and ".join(sorted(frozenset().union(*(p.plan.tiers for p in self.moving)))) or "no tier"
            lines[f"lowtide, moving to {tiers}"] = [(p.peak_bytes, p.step_ms) for p in self.moving]
        return lines

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
            "left_out": self.left_out,
        }


def trade_off(
    graph: StepGraph, costs: Costs, *, points: int = 12, progress: Callable[[int, int], None] | None = None
) -> TradeOff:
    """Plan the step over its whole range of budgets, and by every published method that applies to it; where ``costs``
    knows links to other tiers, over the range that moving opens too."""
    classics: dict[str, list[tuple[int, float]]] = {}
    left_out: dict[str, str] = {}
    for method in PUBLISHED:
        found = set()
        for budget in _SHARES if method in BUDGETED else (None,):
            try:
                plan = solve(graph, costs, budget, method=method)
            except (BudgetInfeasibleError, ValueError) as error:  # not in so little, or it does not apply
                left_out.setdefault(method, str(error).partition("\n")[0])
                continue
            found.add((plan.predicted_peak_bytes, plan.predicted_step_ms))
        if found and method != "none":
            classics[method] = sorted(found)
    left_out = {method: why for method, why in left_out.items() if method not in classics}
    tiers = [tier for tier in costs.links if tier in TIERS]
    total = points * 2 if tiers else points
    report = progress or (lambda done, total: None)
    front = frontier(graph, costs, points=points, progress=lambda done, _: report(done, total))
    moving: list[FrontierPoint] = []
    if tiers:
        moving = frontier(
            graph, costs, points=points, offload=tiers, progress=lambda done, _: report(points + done, total)
        )
    return TradeOff(front, classics, moving, left_out)


def plot_trade_off(found: TradeOff, path: str | Path) -> None:
    """Write peak memory against extra time to ``path``; the suffix (.png, .svg, .pdf) says how.

    Raises:
        LowtideError: matplotlib is not installed, or it cannot write that kind of file.
    """
    with axes_at(path, (7.5, 4.6)) as axes:
        lines = []
        for (name, points), color in zip(found.series().items(), (PLANNED, MOVED)):
            shares = found.shares(points)
            lines.append(shares)
            axes.plot(*zip(*shares), color=color, marker="o", markersize=4, linewidth=1.6, label=name, zorder=3)
        methods = [(name, a, b) for name, points in found.classics.items() for a, b in found.shares(points)]
        if methods:
            _, x, y = zip(*methods)
            axes.plot(x, y, color=PLAIN, marker="o", markersize=5, linestyle="", label="published methods", zorder=4)
        axes.set(xlabel="activation memory, % of the plain step's", ylabel="extra time, %", xlim=(0, 103))
        highest = max(y for _, y in [*(p for line in lines for p in line), *(m[1:] for m in methods)])
        if highest > _STRAIGHT:
            axes.set_yscale("symlog", linthresh=_KNEE)
            axes.set_ylim(-0.5, 1.25 * highest)
        ticks = extra_scale(highest)[1]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.grid(linewidth=0.4, alpha=0.4)
        axes.figure.canvas.draw()  # the layout is done, so points have places
        box = axes.get_window_extent()
        at = [(name, *axes.transData.transform((x, y))) for name, x, y in methods]
        inside = [(name, x - box.x0, y - box.y0) for name, x, y in at]
        points_per_pixel = 72 / axes.figure.dpi
        letter, line = 4.7 / points_per_pixel, 11 / points_per_pixel
        size = box.width, box.height
        drawn = [[tuple(axes.transData.transform(p) - (box.x0, box.y0)) for p in points] for points in lines]
        others = [p for points in drawn for p in along(points, line)]
        for label in placed(joined(inside, within=line / 3), others, size=size, letter=letter, line=line):
            offset = (label.left - label.x) * points_per_pixel, (label.middle - label.y) * points_per_pixel
            point = axes.transData.inverted().transform((label.x + box.x0, label.y + box.y0))
            style = {"va": "center", "fontsize": 8, "color": "#444b54"}
            axes.annotate(label.text, point, xytext=offset, textcoords="offset points", **style)


def extra_scale(highest: float) -> tuple[Callable[[float], float], list[float]]:
    """How far up a picture so much extra time is, and the ticks: straight, or straight and then by powers of ten where
    schedules that replay an op many times would press all others to the floor."""
    if highest <= _STRAIGHT:
        step = next(s for s in (0.2, 0.5, 1, 2, 5, 10, 20, 50) if highest / s <= 8)
        return float, [round(step * i, 3) for i in range(int(highest / step) + 1)]
    ticks = [0.0, 5.0, *(m * 10.0**p for p in range(1, 9) for m in (1, 2, 5))]
    return lambda v: v / _KNEE if v <= _KNEE else 1 + math.log10(v / _KNEE), [t for t in ticks if t <= highest]
