"""Diagrams: how a plan comes about, and the life of a fit with one tensor's life below it."""

from __future__ import annotations

from figure_style import Layout, figure


def _box(
    to: Layout, x: float, y: float, width: float, height: float, name: str, says: list[str], css: str = ""
) -> None:
    to.rect(f"box {css}".strip(), x, y, width, height, 7)
    lines, pitch = [name, *says], 1.3 * to.size
    top = y + height / 2 - pitch * (len(lines) - 1) / 2 + to.size * 0.36
    for row, line in enumerate(lines):
        css = "ink strong" if row == 0 else ""
        to.text(x + width / 2, top + row * pitch, line, css, "middle", 0 if row == 0 else to.size - 1.5)


def life_figure() -> str:
    """Watched, planned beside training, in force, left where a step differs; below, one tensor of a planned step."""

    def draw(to: Layout) -> None:
        if to.narrow:
            _states_narrow(to)
            _tensor(to, left=70, right=to.width - 14, top=208)
        else:
            _states(to)
            _tensor(to, left=150, right=to.width - 30, top=314)

    return figure(
        "The life of a fit, and of one tensor in a planned step",
        "A first step is watched: it keeps the budget online and is recorded. Its plan is made in a process beside "
        "training, and is in force from a later step on. Where a step runs other ops than planned, the rest of it is "
        "online, and its shape is planned anew. Below, one recomputed tensor in a planned step: made and stored in "
        "forward, then dropped; made again in backward by the same kernel when backward needs it, used, and freed.",
        540, draw,
    )  # fmt: skip


def _states(to: Layout) -> None:
    to.text(30, 38, "Life of a fit", "ink strong", size=16)
    y, height = 60, 84
    _box(to, 30, y, 176, height, "watched", ["a real step, recorded,", "within the budget"])
    _box(to, 312, y, 176, height, "planned", ["in a process", "beside training"], "quiet")
    _box(to, 594, y, 176, height, "in force", ["next steps run", "the plan"])
    middle = y + height / 2
    to.arrow([(206, middle), (310, middle)])
    to.text(258, middle - 9, "step ends", "", "middle", 12)
    to.arrow([(488, middle), (592, middle)])
    to.text(540, middle - 9, "between steps", "", "middle", 12)
    _box(to, 453, 196, 176, 66, "online", ["keeps the budget", "without a plan"], "budget")
    to.arrow([(682, y + height), (682, 229), (631, 229)], "budget")
    to.text(692, 190, "a step runs", "budget", "start", 12.5)
    to.text(692, 206, "other ops", "budget", "start", 12.5)
    to.arrow([(453, 229), (400, 229), (400, y + height + 2)])
    to.text(388, 190, "that step is", "", "end", 12.5)
    to.text(388, 206, "planned anew", "", "end", 12.5)
    to.line("grid", 30, 284, to.width - 30, 284)


def _states_narrow(to: Layout) -> None:
    to.text(14, 20, "Life of a fit", "ink strong")
    y, height, width = 30, 50, 110
    _box(to, 14, y, width, height, "watched", ["a real step"])
    _box(to, 155, y, width, height, "planned", ["beside training"], "quiet")
    _box(to, 296, y, width, height, "in force", ["next steps"])
    middle = y + height / 2
    to.arrow([(124, middle), (154, middle)])
    to.arrow([(265, middle), (295, middle)])
    _box(to, 226, 110, width, 44, "online", ["without a plan"], "budget")
    to.arrow([(372, y + height), (372, 132), (337, 132)], "budget")
    to.text(366, 99, "other ops", "budget", "end", 11)
    to.arrow([(226, 132), (196, 132), (196, y + height + 1)])
    to.text(188, 104, "planned anew", "", "end", 11)
    to.line("grid", 14, 167, to.width - 14, 167)


def _tensor(to: Layout, left: float, right: float, top: float) -> None:
    """A bar where the tensor takes memory, dashes where a recipe stands for it."""
    narrow = to.narrow
    name_x, small = (14 if narrow else 30), to.size - (2 if narrow else 1.5)
    to.text(
        name_x, top - (22 if narrow else 0) + 6, "One tensor in a planned step", "ink strong", size=0 if narrow else 16
    )

    def x(share: float) -> float:
        return left + share * (right - left)

    bar, height = (top + 14, 16) if narrow else (top + 76, 28)
    middle, floor = bar + height / 2, bar + height
    below = floor + (38 if narrow else 76)
    made, dropped, again, used, freed = 0.06, 0.20, 0.70, 0.80, 0.90
    half = 0.5
    axis = below - to.size - 2
    to.line("grid", left, axis, right, axis)
    to.line("divide", x(half), bar - (4 if narrow else 38), x(half), below)
    to.text(x(half) - 8, below, "forward", "", "end")
    to.text(x(half) + 8, below, "backward")
    to.text(name_x, middle + 4, "memory" if narrow else "takes memory", "", size=small)
    to.rect("alive", x(made), bar, x(dropped) - x(made), height, 4)
    to.rect("alive again", x(again), bar, x(freed) - x(again), height, 4)
    to.rect("gone", x(dropped) + 2, bar, x(again) - x(dropped) - 4, height, 4)
    says = "a recipe: the op and its inputs"
    to.text(x((dropped + again) / 2), middle + small * 0.36, "a recipe" if narrow else says, "halo", "middle", small)
    for number, (share, name) in enumerate(
        [(made, "made, stored"), (dropped, "dropped"), (again, "made again"), (used, "used"), (freed, "freed")]
    ):
        high = number in (0, 2)
        if narrow:
            where = bar - 8 if high or number == 4 else floor + 16
        else:
            where = bar - 14 if high or number == 4 else floor + 26
        css = "ours strong" if number < 2 else "again strong"
        anchor = "start" if number in (0,) else "middle"
        if number == 2:
            anchor = "middle" if not narrow else "end"
        to.text(x(share) + (6 if number == 2 and narrow else 0), where, name, f"{css} halo", anchor, small)
        to.line(
            "line thin plain", x(share), bar - 3 if where < bar else floor + 3, x(share), bar if where < bar else floor
        )


def flow_figure() -> str:
    """The stages, from a model to a verified step."""
    stages = [
        ("trace", "model, batch"), ("measure", "graph"), ("solve", "costs, budget"), ("plan", "decisions"),
        ("tape", "your loop"), ("verify", "bit by bit"),
    ]  # fmt: skip

    def draw(to: Layout) -> None:
        per_row = 3 if to.narrow else 6
        margin, gap = (16, 26) if to.narrow else (24, 30)
        width = (to.width - 2 * margin - (per_row - 1) * gap) / per_row
        height = 26 if to.narrow else 46
        for number, (name, note) in enumerate(stages):
            row, column = divmod(number, per_row)
            x, y = margin + column * (width + gap), (20 if to.narrow else 46) + row * 46
            _box(to, x, y, width, height, name, [])
            to.text(x + width / 2, y - 7, note, "", "middle", to.size - 1.5)
            if column:
                to.arrow([(x - gap, y + height / 2), (x - 2, y + height / 2)])
        if to.narrow:
            return
        x = margin + 2 * (width + gap)
        _box(to, x, 124, width, 40, "simulate", [], "quiet")
        to.arrow([(x + width / 2 - 12, 92), (x + width / 2 - 12, 122)])
        to.arrow([(x + width / 2 + 12, 124), (x + width / 2 + 12, 94)])
        to.text(x + width + 14, 149, "judges every plan", "", "start", to.size - 1.5)

    return figure(
        "From a model to a verified step",
        "Model and batch are traced into a graph; measured costs and a budget turn it into a plan, each judged by the "
        "simulator; the tape carries the plan out in your loop; verify compares it with the plain step, bit by bit.",
        190, draw,
    )  # fmt: skip
