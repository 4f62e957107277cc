"""What a report says, as plain data: totals, and decisions grouped by module and by operator.

The terminal, HTML and JSON reports all render this one summary, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from lowtide.explanation import collapse_path, short_op
from lowtide.plan import RECOMPUTE, SAVE, Decision, Plan


@dataclass(frozen=True)
class Measured:
    """What real steps under a plan showed; None is an honest "not measured".

    Attributes:
        peak_bytes, plain_peak_bytes: Absolute allocated peaks, under the plan and of the plain step.
        overhead: Step time under the plan / plain step time - 1; NaN where nothing was timed.
        bitwise_equal: Loss, gradients and buffers against the plain step's.
        steps: Steps that ran under the plan, of all shapes.
        mismatched_ops: Planned ops that did not come as planned; what they make was saved.
        unplanned_ops: Ops that no plan knew; what they make was saved.
        audited_ops, dropped_ops: Ops whose replay was compared bitwise with what was dropped, of those with a recipe.
        shapes: Input shapes that have a plan.
        trace_s, measure_s: How long those took.
    """

    peak_bytes: int | None = None
    plain_peak_bytes: int | None = None
    overhead: float | None = None
    bitwise_equal: bool | None = None
    steps: int = 0
    mismatched_ops: int = 0
    unplanned_ops: int = 0
    audited_ops: int = 0
    dropped_ops: int = 0
    shapes: int = 1
    trace_s: float | None = None
    measure_s: float | None = None

    @property
    def overhead_text(self) -> str:
        """``+4.9 %``, or a dash where nothing was timed."""
        return "-" if self.overhead is None or math.isnan(self.overhead) else percent(self.overhead)

    @property
    def evidence(self) -> list[tuple[str, str]]:
        """Facts beyond peaks and times, as lines of a name and a sentence."""
        audited = f"{self.audited_ops} of {self.dropped_ops} dropped ops replayed and compared bit by bit"
        rows = [("audit", audited)]
        if self.bitwise_equal is not None:
            equal = "bitwise equal" if self.bitwise_equal else "DIFFERENT"
            rows.append(("against plain", f"loss, gradients and buffers {equal}"))
        drift = f"{self.mismatched_ops} ops not as planned, {self.unplanned_ops} unknown to the plan"
        rows.append(("drift", f"{drift}, in {_count(self.steps, 'step')} of {_count(self.shapes, 'input shape')}"))
        if self.trace_s is not None and self.measure_s is not None:
            rows.append(("preparation", f"trace {self.trace_s:.1f} s, measure {self.measure_s:.1f} s"))
        return rows


@dataclass(frozen=True)
class Group:
    """The decisions that share a module path or an operator.

    Counts and bytes are of storages that the plain step stores, ``other`` those offloaded; ``recompute_ms`` is of
    every replay in the group, also of what only other replays need.
    """

    name: str
    save_count: int
    save_bytes: int
    recompute_count: int
    recompute_bytes: int
    other_count: int
    other_bytes: int
    recompute_ms: float


def group_decisions(decisions: Iterable[Decision], name_of: Callable[[Decision], str]) -> tuple[Group, ...]:
    """One group per name, most bytes first, then by name; what is only kept for replays forms no group."""
    members: dict[str, list[Decision]] = {}
    for decision in decisions:
        if not decision.stored and not decision.recompute_ms:
            continue
        members.setdefault(name_of(decision), []).append(decision)
    groups = [_group(name, of_name) for name, of_name in members.items()]
    groups.sort(key=lambda g: (-(g.save_bytes + g.recompute_bytes + g.other_bytes), -g.recompute_ms, g.name))
    return tuple(groups)


def _group(name: str, decisions: list[Decision]) -> Group:
    stored = [d for d in decisions if d.stored]
    save = [d.bytes for d in stored if d.action == SAVE]
    recompute = [d.bytes for d in stored if d.action == RECOMPUTE]
    other = [d.bytes for d in stored if d.action not in (SAVE, RECOMPUTE)]
    ms = sum(d.recompute_ms * d.replays for d in decisions)
    return Group(name, len(save), sum(save), len(recompute), sum(recompute), len(other), sum(other), ms)


def by_module(plan: Plan) -> tuple[Group, ...]:
    """Decisions by module path, numbered siblings together."""
    return group_decisions(plan.decisions, lambda d: collapse_path(plan.scope(d)))


def by_op(plan: Plan) -> tuple[Group, ...]:
    """Decisions by the operator that makes the storage."""
    return group_decisions(plan.decisions, lambda d: short_op(plan.ops[d.op].name))


def percent(value: float) -> str:
    """``0.049 -> "+4.9 %"``: a change."""
    return f"{100 * value:+.1f} %"


def kept_for_replays(plan: Plan) -> tuple[int, int]:
    """Count and bytes of storages that the plain step would not store and that replays read."""
    kept = [d.bytes for d in plan.decisions if not d.stored and d.action == SAVE]
    return len(kept), sum(kept)


def fraction(plan: Plan, peak_bytes: int) -> float:
    """Activation memory at ``peak_bytes`` / the plain step's."""
    return (peak_bytes - plan.resident_bytes) / max(plan.plain_peak_bytes - plan.resident_bytes, 1)


def warnings(plan: Plan, measured: Measured | None) -> list[str]:
    """What a user should know before trusting the numbers, each with the way out; empty when all is well."""
    found = []
    if plan.status == "feasible":
        found.append(
            "The solver stopped before it had a proof: the plan holds the budget, the gap says what it may cost."
        )
    if measured is None:
        return found
    if measured.mismatched_ops or measured.unplanned_ops:
        found.append("Steps differ from the traced one: what did not match was saved, so the peak may be higher.")
    if measured.bitwise_equal is False:
        found.append("Gradients differ from the plain step's: do not train with this plan; report the model, please.")
    if plan.budget_bytes is not None and measured.peak_bytes is not None and measured.peak_bytes > plan.budget_bytes:
        found.append("The measured peak is over the budget: lower the budget by the difference.")
    return found


def summary(plan: Plan, measured: Measured | None = None, more_warnings: Sequence[str] = ()) -> dict:
    """The report as one JSON object; NaN and unknown are null."""
    kept_count, kept_bytes = kept_for_replays(plan)
    return {
        "method": plan.method,
        "plan_status": plan.status,
        "device": plan.device,
        "region": plan.region,
        "graph_fingerprint": plan.graph_fingerprint,
        "budget_bytes": plan.budget_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "resident_bytes": plan.resident_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_fraction": plan.predicted_fraction,
        "plain_step_ms": plan.plain_step_ms,
        "predicted_step_ms": plan.predicted_step_ms,
        "predicted_overhead": plan.predicted_overhead,
        "bound_ms": plan.bound_ms,
        "gap": None if math.isnan(plan.gap) else plan.gap,
        "solve_s": plan.solve_s,
        "explanation": asdict(plan.explain()) if plan.evidence else None,
        "counts": plan.counts,
        "bytes_by_action": plan.bytes_by_action,
        "kept_for_replays": {"count": kept_count, "bytes": kept_bytes},
        "by_module": [asdict(g) for g in by_module(plan)],
        "by_op": [asdict(g) for g in by_op(plan)],
        "measured": None if measured is None else _json_numbers(asdict(measured)),
        "warnings": [*warnings(plan, measured), *more_warnings],
        "provenance": dict(plan.provenance),
    }


def _json_numbers(values: dict) -> dict:
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
