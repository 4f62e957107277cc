"""The figure of a script that was run on a GPU that is not there, from ``results/pretend_example.json``."""

from __future__ import annotations

import json
from typing import Any

from figure_data import ROOT
from figure_style import Layout, figure

from lowtide.units import format_bytes

RESULTS = ROOT / "benchmarks" / "results" / "pretend_example.json"
KINDS = ("weights", "gradients", "optimizer", "activations", "other")
_STEPS = 2  # that are shown: the second has the optimizer's state


def pretend_figure() -> str:
    """What memory holds in the first steps of Llama 1B, by kind."""
    run = json.loads(RESULTS.read_text())["devices"]["h100"]
    curve, peak = run["curve"], run["peak_allocated_bytes"]
    ends = curve["steps"][:_STEPS]
    series = {kind: curve["by_kind"][kind][: ends[-1]] for kind in KINDS}
    series["other"] = [a + b for a, b in zip(series["other"], curve["by_kind"]["workspaces"])]

    def draw(to: Layout) -> None:
        left, right, top, floor = (
            4.2 * to.size,
            to.width - to.size,
            2.4 * to.size,
            300.0 * to.width / 800 - 1.6 * to.size,
        )
        count, most = ends[-1], 1.12 * peak

        def x(at: float) -> float:
            return left + at / count * (right - left)

        def y(taken: float) -> float:
            return floor - taken / most * (floor - top)

        for gib in range(0, int(most / 2**30) + 1, 8):
            to.line("grid", left, y(gib * 2**30), right, y(gib * 2**30))
            to.text(left - 8, y(gib * 2**30) + 4, f"{gib} GiB", "", "end", to.size * 0.85)
        below = [0] * count
        for kind in KINDS:
            above = [a + b for a, b in zip(below, series[kind])]
            to.path(f"kind {kind}", _between(below, above, x, y))
            below = above
        begins = 0
        for number, at in enumerate(ends, 1):
            to.line("divide", x(at), top, x(at), floor)
            to.text((x(begins) + x(at)) / 2, floor + 1.3 * to.size, f"step {number}", "ink", "middle")
            begins = at
        highest = max(range(count), key=below.__getitem__)
        beside = x(highest) + 0.7 * to.size
        to.text(beside, y(below[highest]) + 0.4 * to.size, f"peak: {format_bytes(peak)}", "ink strong")
        place = left + 0.6 * to.size
        for row, kind in enumerate(KINDS[-2::-1]):
            at = top + (0.3 + 1.35 * row) * to.size
            to.rect(f"kind {kind}", place, at - 0.75 * to.size, 0.8 * to.size, 0.8 * to.size)
            to.text(place + 1.2 * to.size, at, kind, "ink")

    return figure(
        "What memory holds in two steps of Llama 1B on an H100 that is not there",
        f"Weights stay. Activations rise through forward and fall in backward, while gradients grow. In the first "
        f"optimizer step the optimizer's state comes, so that the second step is higher: {format_bytes(peak)}.",
        300, draw, 15,
    )  # fmt: skip


def _between(below: list[int], above: list[int], x: Any, y: Any) -> str:
    up = "".join(f"H{x(i):.1f}V{y(taken):.1f}" for i, taken in enumerate(above))
    down = "".join(f"V{y(taken):.1f}H{x(i):.1f}" for i, taken in reversed(list(enumerate(below))))
    return f"M{x(0):.1f} {y(0):.1f}{up}H{x(len(above)):.1f}{down}Z"
