"""What a report says, as plain data: facts, warnings, and the whole as JSON.

The terminal, HTML and JSON reports all render this one summary, so they cannot disagree.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lowtide.graph.step_graph import StepGraph
from lowtide.plan import ALLOCATED, COMPILED, SAVE, Plan
from lowtide.reports.breakdown import BREAKDOWNS, attention_scores
from lowtide.reports.what_binds import help_sentences, peak_sentences
from lowtide.units import format_bytes
from lowtide.verifier import Verification

_WIDE_GAP = 0.01  # a plan this near its bound needs no warning that it may not be the fastest
_PLANNED = {
    "model": "the model's own calls; what runs outside them is saved",
    "step": "the whole step, the loss outside the model too",
    "layers": "inside of compiled layers; what runs between them is saved",
}


@dataclass(frozen=True)
class TrainingCounts:
    """What the tapes met in training, over all steps and input shapes.

    Attributes:
        steps: Steps that ran under a plan.
        mismatched_ops: Planned ops that did not come as planned; what they make was saved.
        unplanned_ops: Ops that no plan knew; what they make was saved.
        proven_ops, dropped_ops: Ops that gave the same bits when they ran twice, of those with a recipe.
        shapes: Input shapes that have a plan.
        trace_s, measure_s: How long those took.
    """

    steps: int = 0
    mismatched_ops: int = 0
    unplanned_ops: int = 0
    proven_ops: int = 0
    dropped_ops: int = 0
    shapes: int = 1
    trace_s: float | None = None
    measure_s: float | None = None


def overhead_text(verification: Verification | None) -> str:
    """``+4.9 %``, or a dash where nothing was timed."""
    return "-" if verification is None or math.isnan(verification.overhead) else percent(verification.overhead)


def facts(
    plan: Plan, graph: StepGraph | None, verification: Verification | None, counts: TrainingCounts | None = None
) -> list[tuple[str, str]]:
    """Facts beyond peaks and times, as rows of a name and a sentence."""
    if plan.bound_ms is None:
        bound = "none known for this method"
    elif math.isnan(plan.gap):
        bound = f"{plan.bound_ms:.1f} ms"
    else:
        bound = f"no plan within the budget is under {plan.bound_ms:.1f} ms; gap {plan.gap:.2%}"
    amounts = plan.bytes_by_action
    decided = [f"{action} {count} ({format_bytes(amounts[action])})" for action, count in plan.counts.items() if count]
    rows = [("time bound", bound), ("storages", ", ".join(decided) or "the step stores nothing for backward")]
    kept, kept_bytes = kept_for_replays(plan)
    if kept:
        rows.append(("for replays alone", f"save {kept} ({format_bytes(kept_bytes)})"))
    before = format_bytes(plan.before_bytes)
    if graph is not None:
        parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in graph.before.items() if count)
        before += f": {parts}" if parts else ""
    if made := plan.resident_bytes - plan.before_bytes:
        before += f"; backward adds gradients, {format_bytes(made)}"
    rows.append(("before the step", before))
    if rest := plan.measurable_peak_bytes - plan.predicted_peak_bytes:
        counted = f"{format_bytes(plan.measurable_peak_bytes)}, {format_bytes(rest)} of it in blocks that are not full"
        rows.append(("device counts", counted))
    if plan.predicted_reserved_peak_bytes is not None:
        unused = format_bytes(plan.predicted_reserved_peak_bytes - plan.predicted_peak_bytes)
        reserved = f"{format_bytes(plan.predicted_reserved_peak_bytes)}, {unused} of it in segments that are not full"
        rows.append(("reserved", reserved))
    if graph is not None and graph.optimizer_step_bytes:
        moment = f"{format_bytes(graph.optimizer_step_bytes)} more for a moment, beside the peak"
        rows.append(("optimizer.step()", moment))
    if opaque := plan.opaque_calls():
        rows.append(("opaque calls", opaque.removeprefix("opaque calls ")))
    rows.append(("planned", _PLANNED.get(plan.region, plan.region)))
    tape = counts or verification
    if tape is not None:
        proven = f"{tape.proven_ops} of {tape.dropped_ops} dropped ops ran twice and gave the same bits"
        rows.append(("proof", proven))
    if verification is not None:
        equal = "bitwise equal" if verification.equal else "DIFFERENT"
        rows.append(("against plain", f"loss, gradients and buffers {equal}, in a rehearsal"))
        if verification.not_in_force:
            rows.append(("in training", verification.not_in_force))
    if counts is not None:
        drift = f"{counts.mismatched_ops} ops not as planned, {counts.unplanned_ops} unknown to the plan"
        where = f"{_count(counts.steps, 'step')} of {_count(counts.shapes, 'input shape')}"
        rows.append(("drift", f"{drift}, in {where}"))
        if counts.trace_s is not None and counts.measure_s is not None:
            rows.append(("preparation", f"trace {counts.trace_s:.1f} s, measure {counts.measure_s:.1f} s"))
    return rows


def percent(value: float) -> str:
    """``0.049 -> "+4.9 %"``: a change."""
    return f"{100 * value:+.1f} %"


def kept_for_replays(plan: Plan) -> tuple[int, int]:
    """Count and bytes of storages that the plain step would not store and that replays read."""
    kept = [d.bytes for d in plan.decisions if not d.stored and d.action == SAVE]
    return len(kept), sum(kept)


def fraction(plan: Plan, peak_bytes: int) -> float:
    """Activation memory at ``peak_bytes`` / the plain step's."""
    return plan.fraction_of(peak_bytes)


def warnings(plan: Plan, verification: Verification | None = None, counts: TrainingCounts | None = None) -> list[str]:
    """What a user should know before trusting the numbers, each with the way out; empty when all is well."""
    found = []
    # "feasible" alone is no warning: the gap, beside it in every report, says what it may cost.
    if plan.status == "feasible" and plan.method != COMPILED and not plan.gap <= _WIDE_GAP:
        found.append(
            "The solver stopped before it had a proof: the plan holds the budget, the gap says what it may cost."
        )
    budget = plan.budget_bytes if plan.budget_kind == ALLOCATED else None
    if budget is not None and plan.measurable_peak_bytes > budget:
        found.append(
            f"The device counts {format_bytes(plan.measurable_peak_bytes - budget)} more than the budget, in blocks "
            "that are not full: lower the budget by that, or set PYTORCH_ALLOC_CONF=expandable_segments:True."
        )
    tapes = [tape for tape in (verification, counts) if tape is not None]
    if any(tape.mismatched_ops or tape.unplanned_ops for tape in tapes):
        found.append("Steps differ from the traced one: what did not match was saved, so the peak may be higher.")
    if verification is None:
        return found
    if not verification.equal:
        found.append("Gradients differ from the plain step's: do not train with this plan; report the model, please.")
    peak = verification.measured_peak_bytes
    if plan.budget_bytes is not None and peak is not None and peak > plan.budget_bytes:
        found.append("The measured peak is over the budget: lower the budget by the difference.")
    return found


def summary(
    plan: Plan,
    verification: Verification | None = None,
    counts: TrainingCounts | None = None,
    more_warnings: Sequence[str] = (),
    *,
    graph: StepGraph | None = None,
) -> dict:
    """The report as one JSON object; NaN and unknown are null. What needs ``graph`` is null without it."""
    kept_count, kept_bytes = kept_for_replays(plan)
    measured = {} if counts is None else asdict(counts)
    if verification is not None:
        measured["peak_bytes"] = verification.measured_peak_bytes
        measured["plain_peak_bytes"] = verification.plain_peak_bytes
        measured["overhead"] = None if math.isnan(verification.overhead) else verification.overhead
        measured["bitwise_equal"] = verification.equal
        measured["in_force"] = verification.in_force
    same_name = (
        "method", "device", "region", "graph_fingerprint", "budget_bytes", "budget_kind", "plain_peak_bytes",
        "resident_bytes", "predicted_peak_bytes", "predicted_counted_peak_bytes", "predicted_reserved_peak_bytes",
        "predicted_fraction", "plain_step_ms", "predicted_step_ms", "predicted_overhead", "bound_ms", "solve_s",
        "counts", "bytes_by_action", "provenance",
    )  # fmt: skip
    return {
        **{name: getattr(plan, name) for name in same_name},
        "plan_status": plan.status,
        "gap": None if math.isnan(plan.gap) else plan.gap,
        "explanation": asdict(plan.explain()) if plan.evidence else None,
        "opaque_calls": plan.opaque_calls() or None,
        "kept_for_replays": {"count": kept_count, "bytes": kept_bytes},
        **{
            f"by_{'op' if name == 'operator' else name}": [asdict(g) for g in of(plan)]
            for name, of in BREAKDOWNS.items()
        },
        "attention_scores": None if graph is None else asdict(attention_scores(graph)),
        "what_binds": peak_sentences(plan, graph),
        "what_helps": help_sentences(plan, graph),
        "measured": measured or None,
        "warnings": [*warnings(plan, verification, counts), *more_warnings],
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
