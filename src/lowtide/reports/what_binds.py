"""What sets a plan's peak and what would lower it or the time, in sentences with numbers."""

import math

from lowtide.explanation import Explanation
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.reports.breakdown import attention_scores
from lowtide.units import format_bytes

_LARGE_SHARE = 0.25  # of the peak: worth a sentence
_BUSY_SHARE = 0.8  # of the step: a link that has hardly any time left
_WIDE_GAP = 0.01
_HELD = {"saved": "saved for backward", "backward": "made in backward", "gradient": "of gradients"}
_LOSS_OPS = ("log_softmax", "nll_loss", "cross_entropy")


def peak_sentences(plan: Plan, graph: StepGraph | None = None) -> list[str]:
    """When the peak is reached, what fills it, and its price; empty for a plan without evidence."""
    told = plan.explain()
    if not told.when:
        return []
    doing = {"replay": "in backward, while {} runs again"}.get(told.when, f"in {told.when}, while {{}} runs")
    found = [f"The peak is {format_bytes(told.peak_bytes)}, {doing.format(f'{told.op} of {told.module}')}."]
    parts = ""
    if graph is not None:
        named = [f"{name} {format_bytes(count)}" for name, count in graph.before.items() if count]
        parts = f" ({', '.join(named)})" if named else ""
    share = told.resident_bytes / max(told.peak_bytes, 1)
    found.append(
        f"{format_bytes(told.resident_bytes)} of it ({100 * share:.0f} %) live before the step{parts}; "
        "no plan changes that."
    )
    if told.holders:
        largest = told.holders[0]
        times = f"{largest.count} × " if largest.count > 1 else ""
        found.append(
            f"The most of the rest is {format_bytes(largest.bytes)} {_HELD.get(largest.kind, largest.kind)}: "
            f"{times}{largest.op} of {largest.module}."
        )
    if price := told.price():
        found.append(f"{price[:1].upper()}{price[1:]}.")
    return found


def help_sentences(plan: Plan, graph: StepGraph | None = None) -> list[str]:
    """What would take time or memory off this step."""
    told = plan.explain()
    found = []
    if told.resident_bytes > 0.5 * told.peak_bytes:
        found.append(
            "Most of the peak lives before the step: fewer bytes for each parameter (LoRA, a leaner optimizer, lower "
            "precision) or sharding help more than recomputing."
        )
    loss = sum(h.bytes for h in told.holders if any(op in h.op for op in _LOSS_OPS))
    if loss > _LARGE_SHARE * (told.peak_bytes - told.resident_bytes) and loss:
        found.append(
            f"The loss holds {format_bytes(loss)} at the peak, which checkpointing layers cannot lower: compute it in "
            "chunks (chunk_loss=True)."
        )
    if graph is not None:
        found += attention_scores(graph).sentences(format_bytes)
    found += _link_sentences(plan, told)
    if not math.isnan(plan.gap) and plan.gap > _WIDE_GAP:
        found.append(
            f"The plan may be up to {100 * plan.gap:.1f} % slower than the best one; more solving time may help."
        )
    return found


def _link_sentences(plan: Plan, told: Explanation) -> list[str]:
    found = []
    for link in told.links:
        busy = link.busy_ms / plan.predicted_step_ms if plan.predicted_step_ms else 0.0
        line = f"The link to {link.tier} ({link.direction}) is busy {100 * busy:.0f} % of the step"
        if link.waited_ms:
            found.append(f"{line}, and the step waits {link.waited_ms:.1f} ms for it: a faster link would help.")
        elif busy > _BUSY_SHARE:
            found.append(f"{line}: there is hardly room to move more.")
        else:
            found.append(f"{line} and the step never waits for it.")
    return found
