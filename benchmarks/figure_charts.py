"""Charts: memory over one step, and time against memory."""

from __future__ import annotations

from figure_data import AS_SMALL, HALF, MIB, Curve, Results, thinned
from figure_style import LETTER, Layout, figure

from lowtide.reports.labels import along, joined, placed
from lowtide.reports.svg import round_ticks, steps_path
from lowtide.units import format_bytes


def _mib(count: float) -> str:
    return f"{count / MIB:.0f} MiB"


class _Axes:
    """Memory upwards, time across."""

    def __init__(self, layout: Layout, most_bytes: float, plain: Curve, across: float) -> None:
        self.layout, self.most, self.plain, self.end = layout, most_bytes, plain, plain.end_ms * across
        self.left, self.right = (58, layout.width - 14) if layout.narrow else (80, layout.width - 24)
        self.top, self.floor = (16, layout.height - 32) if layout.narrow else (26, layout.height - 46)

    def x(self, ms: float) -> float:
        return self.left + ms / self.end * (self.right - self.left)

    def y(self, count: float) -> float:
        return self.floor - count / self.most * (self.floor - self.top)

    def scales(self, held_bytes: int, held: str) -> None:
        """Grids and names; a band for what is there before the step."""
        to, small = self.layout, self.layout.size - 1
        to.rect("held", self.left, self.y(held_bytes), self.right - self.left, self.floor - self.y(held_bytes))
        ticks = round_ticks(self.most)
        for tick in ticks[:: 2 if to.narrow and len(ticks) > 4 else 1]:
            to.line("grid", self.left, self.y(tick), self.right, self.y(tick))
            to.text(self.left - 8, self.y(tick) + 4, _amount(tick), "", "end", small)
        below = self.floor + 1.5 * to.size
        middle = self.x(self.plain.backward_ms)
        to.line("divide", middle, self.top, middle, below)
        to.text(middle - 8, below, "forward", "", "end")
        to.text(middle + 8, below, "backward")
        end, name = self.x(self.plain.end_ms), "plain step ends"
        if end - middle > 8 + LETTER * to.size * len(f"backward {name} "):
            to.line("divide", end, self.floor, end, self.floor + 5)
            to.text(end, below, name, "", "end", small)
        to.text(self.right - 8, self.floor - 9, held, "", "end", small)

    def curve(self, css: str, points: list[tuple[float, int]], filled_from: int | None = None) -> None:
        units = (self.right - self.left) * points[-1][0] / self.end
        found = thinned(points, int(units / (2 if self.layout.narrow else 1.5)))
        line = steps_path([(self.x(at), self.y(size)) for at, size in found])
        if filled_from is not None:
            area = f"{line}V{self.y(filled_from):.1f}H{self.left:.1f}Z"
            self.layout.path(f"area {css.split()[0]}", area)
        self.layout.path(f"line {css}", line)


def memory_figure(results: Results) -> str:
    """Four steps of one decoder: plain, every layer checkpointed, and two plans."""
    plans = {
        "plain": results.plan("none"), "full": results.plan("full"), "half": results.plan("exact", HALF),
        "small": results.plan("exact", AS_SMALL),
    }  # fmt: skip
    curves = {name: results.curve(plan) for name, plan in plans.items()}
    resident, budget = results.graph.resident_bytes, plans["half"].budget_bytes or 0
    measured = {"full": "transformers full", "half": "lowtide 0.50", "small": "lowtide at full's peak"}
    time = {name: f"{100 * (results.measured[of]['time_ratio'] - 1):+.1f} % time" for name, of in measured.items()}
    peak = {name: _mib(found.peak_bytes) for name, found in curves.items()}

    def draw(to: Layout) -> None:
        axes = _Axes(to, 1.07 * curves["plain"].peak_bytes, curves["plain"], 1.27)
        axes.scales(resident, f"weights and gradients: {_mib(resident)}")
        axes.curve("plain thin", curves["plain"].points, resident)
        axes.curve("ours", curves["half"].points, resident)
        axes.curve("other thin", curves["full"].points)
        axes.curve("ours", curves["small"].points)
        limit, line = axes.y(budget), to.size * 1.25
        to.line("line budget thin", axes.left, limit, axes.right, limit)
        beside = axes.x(curves["plain"].backward_ms) + 2.2 * to.size
        to.text(beside, axes.y(curves["plain"].peak_bytes) + line / 2, f"plain step: {peak['plain']}", "ink strong")
        to.text(axes.left + 8, limit - 7, "budget", "budget strong")
        text = "lowtide, half" if to.narrow else "lowtide, half of the activations"
        to.text(axes.right, limit - 8 - line, text, "ours strong", "end")
        to.text(axes.right, limit - 8, f"{peak['half']}, {time['half']}", "ours", "end")
        names = {"full": ("every layer checkpointed", "other"), "small": ("lowtide in no more memory", "ours")}
        if to.narrow:
            for row, (name, (text, css)) in enumerate(names.items()):
                text = text.removesuffix(" checkpointed").replace(" in", ",")
                said = f"{text}: {time[name].removesuffix(' time')}"
                to.text(axes.right, limit + 18 + row * line, said, f"{css} strong halo", "end", 11.5)
            return
        for row, (name, (text, css)) in enumerate(names.items()):
            top = limit + 1.5 * line + 2.3 * row * line
            to.text(axes.right, top, text, f"{css} strong halo", "end")
            to.text(axes.right, top + line, f"{peak[name]}, {time[name]}", css, "end")

    return figure(
        "Memory over one training step of an 8-layer decoder",
        f"The plain step rises through forward to {peak['plain']} and falls in backward. lowtide, given a budget of "
        f"half of the activations, stays below it: {peak['half']}, {time['half']}. Checkpointing every layer peaks at "
        f"{peak['full']}, {time['full']}; lowtide within that peak at {peak['small']}, {time['small']}. "
        f"{_mib(resident)} of each are weights and gradients.",
        470, draw, 15,
    )  # fmt: skip


def _amount(count: int) -> str:
    return format_bytes(count).replace(".00 ", " ") if count else "0"


def tutorial_figure(results: Results) -> str:
    """The tutorial's own step, plain and planned."""
    told = results.tutorial
    plain, planned = (Curve([tuple(p) for p in told[name]], told["backward_ms"]) for name in ("plain", "planned"))
    budget = told["budget_bytes"]
    peak = {"plain": _tenths(plain.peak_bytes), "planned": _tenths(planned.peak_bytes)}

    def draw(to: Layout) -> None:
        axes = _Axes(to, 1.1 * plain.peak_bytes, plain, 1.05 * planned.end_ms / plain.end_ms)
        axes.scales(told["resident_bytes"], "weights, gradients, optimizer, batch")
        axes.curve("plain thin", plain.points, told["resident_bytes"])
        axes.curve("ours", planned.points, told["resident_bytes"])
        limit, line = axes.y(budget), to.size * 1.25
        to.line("line budget thin", axes.left, limit, axes.right, limit)
        beside = axes.x(plain.backward_ms) + 2.2 * to.size
        to.text(beside, axes.y(plain.peak_bytes) + line / 2, f"plain step: {peak['plain']}", "ink strong")
        to.text(axes.left + 8, limit - 7, f"budget: {_tenths(budget)}", "budget strong halo")
        to.text(axes.right, limit - 7, f"planned step: {peak['planned']}", "ours strong halo", "end")

    return figure(
        "Memory over the tutorial's training step, plain and planned",
        f"The plain step peaks at {peak['plain']}, where forward ends. The planned step stays under the budget of "
        f"{_tenths(budget)}: it peaks at {peak['planned']}, and takes longer in backward, where kernels run again.",
        360, draw, 15,
    )  # fmt: skip


def _tenths(count: float) -> str:
    return f"{count / MIB:.1f} MiB"


_NAMES = {
    "full": "every layer", "every_n": "every 2nd layer", "sqrt_n": "√n groups of layers", "selective": "selective",
    "knapsack": "knapsack", "rotor": "Rotor", "revolve": "Revolve",
}  # fmt: skip
_HIGHEST, _LEAST = 34.0, 12.0  # percent: of extra time, of activation memory


def trade_off_figure(results: Results) -> str:
    """Extra time against activation memory: the front, its bound, and published methods by name."""
    resident, plain = results.graph.resident_bytes, results.plan("none").timeline
    whole = plain.peak_bytes - resident

    def share(size: float) -> float:
        return 100 * (size - resident) / whole

    def extra(ms: float) -> float:
        return 100 * (ms / plain.step_ms - 1)

    ours = [plan for plan in results.plans if plan.method == "exact"]
    front = _staircase([(share(p.timeline.peak_bytes), extra(p.timeline.step_ms)) for p in ours])
    bound = sorted((share(p.budget_bytes or 0), extra(p.bound_ms or 0.0)) for p in ours)
    methods = list(dict.fromkeys(
        (_NAMES[p.method], share(p.timeline.peak_bytes), extra(p.timeline.step_ms))
        for p in results.plans if p.method in _NAMES
    ))  # fmt: skip

    def draw(to: Layout) -> None:
        left, right = (54, to.width - 16) if to.narrow else (66, to.width - 26)
        top, floor = (14, to.height - 46) if to.narrow else (26, to.height - 64)

        def x(percent: float) -> float:
            return left + (percent - _LEAST) / (102 - _LEAST) * (right - left)

        def y(percent: float) -> float:
            return floor - percent / _HIGHEST * (floor - top)

        small = to.size - 1
        for tick in range(0, int(_HIGHEST) + 1, 10):
            to.line("grid", left, y(tick), right, y(tick))
            to.text(left - 8, y(tick) + 4, f"+{tick} %" if tick else "0", "", "end", small)
        for tick in range(20, 101, 20):
            to.line("grid", x(tick), floor, x(tick), floor + 5)
            to.text(x(tick), floor + 8 + to.size, f"{tick} %", "", "middle", small)
        to.text(right, floor + 12 + 2.2 * to.size, "activation memory, of the plain step's", "", "end")
        to.text(left + 8, top + to.size * 0.7, "extra step time", "halo")
        below = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in bound)
        to.path("area never", f"M{x(bound[0][0]):.1f} {floor:.1f}L{below}L{x(_LEAST):.1f} {floor:.1f}Z")
        at = [(x(a), y(b)) for a, b in front if b <= _HIGHEST]
        to.path("line ours", "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in at))
        to.path("line bound thin", f"M{below}")
        for a, b in at:
            to.dot("dot", a, b, 3 if to.narrow else 3.5)
        to.text(x(92), y(4.8 if to.narrow else 2.0), "lowtide", "ours strong halo", "middle")
        to.text(
            x(17), y(1.2), "no plan here" if to.narrow else "below the lower bound: no plan is here", "", size=small
        )
        shown = joined([(name, x(a), y(b)) for name, a, b in methods if b <= _HIGHEST], within=6)
        for _, a, b in shown:
            to.dot("method", a, b, 4 if to.narrow else 5)
        letter = LETTER * to.size
        for label in placed(shown, along(at, 8), size=(right, floor), letter=letter, line=1.2 * to.size):
            to.text(label.left, label.middle + to.size / 3, label.text, "other halo")

    return figure(
        "Extra step time against activation memory, lowtide and published methods",
        "lowtide's front falls steeply up to a fifth of the plain step's activation memory, then gently to no extra "
        "time at 100 %, close to the lower bound. No published method is below it: every layer, Rotor, Revolve, √n "
        "groups, every second layer and selective checkpointing need more time for their memory; knapsack touches it.",
        470, draw,
    )  # fmt: skip


def _staircase(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both, by memory."""
    found: list[tuple[float, float]] = []
    for memory, time in sorted(points):
        if not found or time < found[-1][1]:
            found.append((memory, time))
    return found
