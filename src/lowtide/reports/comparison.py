"""Two plans side by side: peaks, times and decisions, and where they differ, by module."""

import textwrap
from dataclasses import asdict, dataclass
from html import escape

from lowtide.explanation import shorten
from lowtide.plan import Plan
from lowtide.reports.breakdown import ActionTotals, by_module
from lowtide.reports.html import page, plain_table
from lowtide.reports.summary import percent
from lowtide.reports.terminal import columns
from lowtide.units import format_bytes

_NAME_WIDTH = 40
_MOST_MODULES = 20
_SAME_TIME = 0.02  # of the plain step: nearer than that, two measurements agree


@dataclass(frozen=True)
class ModuleChange:
    """Of one module: bytes that the plain step stores, bytes that stay under the plan, time of replays; in a and b."""

    name: str
    stored_bytes: tuple[int, int]
    saved_bytes: tuple[int, int]
    recompute_ms: tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """Plans ``a`` and ``b`` and what they are called; they may be of different steps."""

    a_name: str
    b_name: str
    a: Plan
    b: Plan

    @property
    def same_step(self) -> bool:
        return self.a.graph_fingerprint == self.b.graph_fingerprint

    def modules(self) -> list[ModuleChange]:
        """Every module that differs, the largest change of saved bytes first."""
        groups = [{g.name: g for g in by_module(plan)} for plan in (self.a, self.b)]
        nothing = ActionTotals("", 0, 0, 0, 0, 0, 0, 0.0)
        found = []
        for name in dict.fromkeys([*groups[0], *groups[1]]):
            a, b = (group.get(name, nothing) for group in groups)
            change = ModuleChange(
                name, (a.bytes, b.bytes), (a.save_bytes, b.save_bytes), (a.recompute_ms, b.recompute_ms)
            )
            if any(x != y for x, y in (change.stored_bytes, change.saved_bytes, change.recompute_ms)):
                found.append(change)
        return sorted(found, key=lambda c: (-abs(c.saved_bytes[1] - c.saved_bytes[0]), c.name))

    def sentences(self) -> list[str]:
        """What the difference is, in words."""
        a, b = self.a, self.b
        peak = b.predicted_peak_bytes - a.predicted_peak_bytes
        found = [
            f"{self.b_name} needs {_less_or_more(peak, format_bytes(abs(peak)))} memory at the peak than {self.a_name}"
            f", for an overhead of {percent(b.predicted_overhead)} against {percent(a.predicted_overhead)}."
        ]
        if self.same_step and abs(b.plain_step_ms - a.plain_step_ms) > _SAME_TIME * a.plain_step_ms:
            found.append("Op times were measured apart and differ: compare the overheads, not the milliseconds.")
        if not self.same_step:
            plain = b.plain_peak_bytes - a.plain_peak_bytes
            found.append(
                f"They are for different steps: the plain step's peak differs by {_signed(plain)} and its time by "
                f"{b.plain_step_ms - a.plain_step_ms:+.1f} ms."
            )
        return found

    def rows(self) -> list[list[str]]:
        """Name, a, b and change, of what a plan says of its whole step."""
        a, b = self.a, self.b
        sizes = {
            "plain peak": (a.plain_peak_bytes, b.plain_peak_bytes),
            "predicted peak": (a.predicted_peak_bytes, b.predicted_peak_bytes),
            "before the step": (a.before_bytes, b.before_bytes),
            **{f"{name}, bytes": (a.bytes_by_action[name], b.bytes_by_action[name]) for name in a.counts},
        }
        found = [[name, format_bytes(x), format_bytes(y), _signed(y - x)] for name, (x, y) in sizes.items() if x or y]
        found += [
            [name, f"{x:.1f} ms", f"{y:.1f} ms", f"{y - x:+.1f} ms"]
            for name, x, y in (
                ("plain step", a.plain_step_ms, b.plain_step_ms),
                ("predicted step", a.predicted_step_ms, b.predicted_step_ms),
            )
        ]
        overheads = a.predicted_overhead, b.predicted_overhead
        points = f"{100 * (overheads[1] - overheads[0]):+.1f} points"
        return [*found, ["overhead", *map(percent, overheads), points], ["method", a.method, b.method, ""]]

    def text(self) -> str:
        """At most 100 columns."""
        changes = self.modules()
        blocks = ["\n".join(line for says in self.sentences() for line in textwrap.wrap(says, 100))]
        heads = ["", shorten(self.a_name, 20), shorten(self.b_name, 20), "change"]
        blocks.append("\n".join(columns([heads, *self.rows()])))
        if changes:
            head = [f"saved bytes by module, {len(changes)} differ".ljust(_NAME_WIDTH), "a", "b", "change", "replay"]
            rows = [[shorten(c.name, _NAME_WIDTH), *_cells(c)] for c in changes[:_MOST_MODULES]]
            blocks.append("\n".join(columns([head, *rows])))
        else:
            blocks.append("no module differs.")
        return "\n\n".join(blocks)

    def html(self) -> str:
        """A page that needs no other file."""
        title = f"{self.a_name} and {self.b_name}"
        says = "".join(f"<li>{escape(s)}</li>" for s in self.sentences())
        body = [
            f"<h1>{escape(title)}</h1>",
            f'<ul class="say">{says}</ul>',
            "<h2>The whole step</h2>",
            plain_table("The whole step", ("", self.a_name, self.b_name, "change"), self.rows()),
        ]
        if changes := self.modules():
            heads = ("module", "saved, a", "saved, b", "change", "replay time")
            rows = [[c.name, *_cells(c)] for c in changes]
            body += [f"<h2>Where they differ: {len(changes)} modules</h2>", plain_table("By module", heads, rows)]
        return page(title, body)

    def as_json(self) -> dict:
        """Plain types."""

        def side(plan: Plan) -> dict:
            names = ("method", "graph_fingerprint", "budget_bytes", "plain_peak_bytes", "predicted_peak_bytes",
                     "resident_bytes", "plain_step_ms", "predicted_step_ms", "predicted_overhead", "counts",
                     "bytes_by_action")  # fmt: skip
            return {name: getattr(plan, name) for name in names}

        return {
            "a": {"name": self.a_name, **side(self.a)},
            "b": {"name": self.b_name, **side(self.b)},
            "same_step": self.same_step,
            "difference": self.sentences(),
            "modules": [asdict(change) for change in self.modules()],
        }


def _cells(change: ModuleChange) -> list[str]:
    (a, b), (a_ms, b_ms) = change.saved_bytes, change.recompute_ms
    return [format_bytes(a), format_bytes(b), _signed(b - a), f"{b_ms - a_ms:+.1f} ms"]


def _less_or_more(change: float, amount: str) -> str:
    return f"{amount} {'less' if change < 0 else 'more'}" if change else "as much"


def _signed(count: int) -> str:
    return format_bytes(count) if count < 0 else f"+{format_bytes(count)}" if count else "0 B"
