"""``lowtide compare``: what checkpointing settings cost and reach on a user's own step, and what a plan would save."""

from __future__ import annotations

import argparse
import sys
import textwrap
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.commands.settings_file import read_settings
from lowtide.commands.verbs import add_target, add_verb
from lowtide.errors import BudgetInfeasibleError, SettingsError
from lowtide.scripts import BadUsageError, load_step

if TYPE_CHECKING:
    from lowtide.graph.costs import Costs
    from lowtide.graph.step_graph import StepGraph
    from lowtide.plan import Plan
    from lowtide.settings.description import SettingsFinding
    from lowtide.side_by_side import Row

_WIDTH = 100
_SEARCH_STEPS = 5  # halvings of the range of budgets
_NEAR = 0.01  # peaks that differ by less need no explanation
_AS_PLAN, _SAME_PEAK, _SAME_TIME = "settings, as a plan", "exact, same peak", "exact, same time"
_HALF = "exact, 50 % of the activations"


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "compare", run, "what your checkpointing settings cost and reach, and what a plan would save",
        "Measure your step plain, with your checkpointing settings, and under exact plans, side by side.",
        "example:\n  lowtide compare train.py:setup --settings training_args.yaml --framework transformers",
    )  # fmt: skip
    add_target(parser)
    frameworks = "transformers, trl, roll, megatron, colossalai, deepspeed, torchtitan, accelerate or torch"
    parser.add_argument("--settings", metavar="FILE", type=Path, required=True, help="a .yaml, .json or .toml file")
    told = "read from the file's key framework, or told by the names where that is clear"
    parser.add_argument("--framework", metavar="NAME", help=f"{frameworks}; {told}")


@dataclass(frozen=True)
class Comparison:
    """What was measured and found.

    Attributes:
        summary: What the settings mean, in words.
        real: Name of the row of the settings as they are really carried out; "" where ``why_not_real`` says why not.
        difference: Predicted peak of the settings' plan / measured peak of the real thing - 1; None without one.
    """

    framework: str
    summary: str
    findings: tuple[SettingsFinding, ...]
    rows: tuple[Row, ...]
    real: str
    why_not_real: str
    difference: float | None

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    @property
    def settings_row(self) -> Row | None:
        """What the settings reach: really, or as a plan."""
        return self.row(self.real) or self.row(_AS_PLAN)

    @property
    def failures(self) -> list[str]:
        """Why the exit code is not 0."""
        from lowtide.settings.description import FAILS, NOTHING

        found = [str(f) for f in self.findings if f.kind in (NOTHING, FAILS)]
        return found + [
            f"{r.name}: loss or gradients differ from the plain step's" for r in self.rows if not r.bitwise_equal
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain types."""
        faster, smaller = self._gains()
        return {
            "framework": self.framework,
            "settings": self.summary,
            "findings": [asdict(f) for f in self.findings],
            "rows": [asdict(row) for row in self.rows],
            "measured_as": self.real or None,
            "why_not_measured": self.why_not_real or None,
            "mapped_peak_difference": self.difference,
            "time_saved_at_same_peak": faster,
            "activations_saved_in_same_time": smaller,
        }

    def _gains(self) -> tuple[float | None, float | None]:
        """At the same peak: share of the step's time saved; in the same time: share of the activations."""
        settings, peak, time = self.settings_row, self.row(_SAME_PEAK), self.row(_SAME_TIME)
        faster = 1 - peak.time_ratio / settings.time_ratio if settings and peak else None
        smaller = 1 - time.fraction / settings.fraction if settings and time else None
        return faster, smaller

    def __str__(self) -> str:
        from lowtide.reports.terminal import columns
        from lowtide.side_by_side import HEAD

        lines = _wrapped(f"{self.framework}: {self.summary}")
        lines += ["", *columns([HEAD, *(row.cells for row in self.rows)]), "", *self._sentences()]
        if self.findings:
            lines += ["", "settings"]
            lines += [line for found in self.findings for line in _wrapped(f"- {found}", "  ")]
        return "\n".join(lines)

    def _sentences(self) -> list[str]:
        settings, peak, time = self.settings_row, self.row(_SAME_PEAK), self.row(_SAME_TIME)
        faster, smaller = self._gains()
        found = []
        if settings is None:
            found.append("The settings change nothing: the step runs as without them.")
        if settings and peak and faster is not None:
            extra = f"{_extra(peak)} of extra time instead of {_extra(settings)}"
            found.append(f"At the same peak the exact plan takes {extra}: the step is {100 * faster:.0f} % shorter.")
        if settings and time and smaller is not None:
            shares = f"{100 * time.fraction:.0f} % of the activation memory instead of {100 * settings.fraction:.0f} %"
            found.append(f"In the same time, as predicted, an exact plan needs {shares}: {100 * smaller:.0f} % less.")
        if self.difference is not None:
            text = f"The plan that the settings mean predicts {abs(self.difference):.1%} "
            text += f"{'less' if self.difference < 0 else 'more'} than the real thing's peak."
            if abs(self.difference) > _NEAR:
                text += " A checkpoint makes all of its inside again at once; a plan, what backward asks for next."
            found.append(text)
        elif self.why_not_real:
            found.append(f"Not carried out here, only as a plan: {self.why_not_real}.")
        return [line for text in found for line in _wrapped(text)]


def run(args: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and JSON of the verb."""
    from lowtide.settings.frameworks import about_memory, check_framework, framework_of

    values = read_settings(args.settings)
    named = values.pop("framework", None)
    if args.framework is not None:
        named = args.framework
    try:
        check_framework(named)
        settings, others = about_memory(values, named)
        framework = named or framework_of(settings)
    except SettingsError as error:
        raise BadUsageError(str(error)) from error
    model, batch, step = load_step(args.target)
    try:
        comparison = compare(model, batch, step, settings, framework, others)
    except SettingsError as error:
        print(f"lowtide: {error}", file=sys.stderr)
        return 1, "", {"status": "finding", "framework": framework, "message": str(error)}
    code = 1 if comparison.failures else 0
    return code, str(comparison), {"status": "finding" if code else "ok", **comparison.as_json()}


def compare(
    model: Any, batch: Any, step: Any, settings: dict[str, Any], framework: str, others: list[str]
) -> Comparison:
    """Measure the step plain, with ``settings``, and under exact plans.

    Args:
        others: Names of settings in the file that are about something else.

    Raises:
        SettingsError: the framework would refuse the settings, or one is not known.
    """
    from lowtide.reports.progress import counting, stages
    from lowtide.settings.carried_out import carried_out, carrier, why_not
    from lowtide.settings.description import FAILS, NOTE, SettingsFinding
    from lowtide.settings.settings_plan import settings_plan, without_checkpointing
    from lowtide.side_by_side import PLAIN, SideBySide, Way, exact_or_least

    with without_checkpointing(model):
        with stages("tracing and measuring", "planning") as next_stage:
            found = settings_plan(model, settings, batch=batch, framework=framework, step=step)
            next_stage()
            graph, costs, plan = found.graph, found.costs, found.plan
            findings = list(found.description.findings)
            bench = SideBySide(model, batch, step, graph)
            ways, real, why, difference = [Way(PLAIN)], "", "", None
            if plan.keeps_everything:
                ways.append(Way(_HALF, exact_or_least(graph, costs, "50%")))
            else:
                why, peak = why_not(found.description, model), plan.predicted_peak_bytes
                if not why:
                    real = f"settings, by {carrier(found.description, model)}"
                    way = Way(real, around=partial(carried_out, found.description, model))
                    try:
                        peak = bench.peak_bytes(way)
                    except Exception as error:  # whatever the model does when its layers run again
                        real, why = "", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                        findings.append(SettingsFinding("settings", FAILS, why))
                    else:
                        ways.append(way)
                        difference = plan.predicted_peak_bytes / peak - 1
                same_peak = exact_or_least(graph, costs, max(peak, plan.predicted_peak_bytes))
                same_time = smallest_within(graph, costs, plan.predicted_step_ms, same_peak)
                ways += [Way(_AS_PLAN, plan), Way(_SAME_PEAK, same_peak), Way(_SAME_TIME, same_time)]
        with counting("timing, rounds") as progress:
            rows = bench.rows(ways, progress=progress)
    if others:
        text = f"what is about other things is left aside: {', '.join(others[:6])}"
        findings.append(SettingsFinding("file", NOTE, text + (", ..." if len(others) > 6 else "")))
    return Comparison(framework, found.description.summary, tuple(findings), tuple(rows), real, why, difference)


def smallest_within(graph: StepGraph, costs: Costs, step_ms: float, known: Plan) -> Plan:
    """An exact plan with a small peak whose predicted step is no longer than ``step_ms``, by halving the budgets.

    Args:
        known: A plan that is fast enough, as a rule; it is returned where no smaller one is.
    """
    from lowtide.solvers.dispatch import solve

    best, low = known, graph.resident_bytes
    for _ in range(_SEARCH_STEPS):
        budget = (low + best.predicted_peak_bytes) // 2
        try:
            plan = solve(graph, costs, budget)
        except BudgetInfeasibleError as error:
            low = error.least_bytes
            if low >= best.predicted_peak_bytes:
                break
            plan = solve(graph, costs, low)
        if plan.predicted_step_ms <= step_ms and plan.predicted_peak_bytes < best.predicted_peak_bytes:
            best = plan
        else:
            low = max(low, budget)
    return best


def _extra(row: Row) -> str:
    return f"{100 * (row.time_ratio - 1):.0f} %"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent)
