"""A ``PretendReport`` as text, within 100 columns."""

from textwrap import wrap
from typing import Any

from lowtide.pretending.outcome_facts import KINDS, PretendFacts
from lowtide.pretending.step_time import StepTime
from lowtide.units import format_bytes

_WIDTH = 100
_LINES = 6


def text(report: PretendFacts) -> str:
    parts = [_head(report), _ranks(report), _steps(report), _time(report), _peak(report), _out_of_memory(report)]
    parts += [_stops(report), _lowtide(report), _changes(report)]
    parts += [_list("note", report.notes), _list("taken for granted", report.assumptions)]
    return "\n".join(part for part in parts if part)


def verdict(report: PretendFacts) -> str:
    """One sentence."""
    where = f"{format_bytes(report.usable_bytes)} of {report.device}"
    if report.ranks > 1:
        where += f" (rank {report.rank} of {report.ranks})"
    if report.fits:
        share = report.peak_reserved_bytes / report.usable_bytes
        word = "fits" if report.verdict == "fits" else "fits tightly"
        return f"It {word}: {format_bytes(report.peak_reserved_bytes)} reserved, {share:.0%} of {where}."
    if report.out_of_memory is not None and report.verdict == "does not fit":
        return f"It does not fit: out of memory in step {report.out_of_memory.step} on {where}."
    return {
        "failed": f"The script failed with exit code {report.exit_code}; its own error is above.",
        "trained nothing": "The command trained nothing: no optimizer step on the device.",
        "did not end": "The command did not end.",
    }.get(report.verdict, f"It {report.verdict}.")


def _head(report: PretendFacts) -> str:
    pinned = f", {format_bytes(report.pinned_peak_bytes)} pinned by the script" if report.pins_much else ""
    compiling = f", {report.compile_s:.0f} s of it compiling" if report.compile_s else ""
    host = format_bytes(report.host_peak_bytes)
    head = f"{verdict(report)}\n  {report.seconds:.0f} s{compiling}; {host} of host memory{pinned}"
    if report.fits or not report.stages:
        return head
    reached = ", ".join(f"{stage['stage']} ({stage['seconds']:.0f} s)" for stage in report.stages)
    return "\n".join([head, *wrap(f"it reached: {reached}", _WIDTH, initial_indent="  ", subsequent_indent="    ")])


def _ranks(report: PretendFacts) -> str:
    if not report.by_rank:
        return ""
    rows = [f"rank {report.rank} takes most of those that ran; what follows is of it"]
    for one in report.by_rank:
        step = "" if one.step_ms is None else f"  {one.step_ms:>9,.1f} ms a step"
        rows.append(
            f"  {one.rank:>4}  {format_bytes(one.peak_allocated_bytes):>11}  "
            f"{format_bytes(one.peak_reserved_bytes):>11}  {one.verdict}{step}"
        )
    return "\n".join(rows)


def _steps(report: PretendFacts) -> str:
    if not report.steps:
        return ""
    rows = [f"  {'step':>4}  {'allocated':>11}  {'reserved':>11}  {'launches':>8}  {'waits':>5}  {'host':>9}"]
    for number, step in enumerate(report.steps, 1):
        rows.append(
            f"  {number:>4}  {format_bytes(step.allocated_bytes):>11}  {format_bytes(step.reserved_bytes):>11}  "
            f"{step.launches:>8,}  {step.waits:>5,}  {step.host_ms:>6.0f} ms"
        )
    smi = f"  nvidia-smi would show about {format_bytes(report.nvidia_smi_bytes)}."
    return "\n".join([*rows, smi])


def time_text(found: StepTime, device: str) -> str:
    """What a step takes, on ``device``."""
    by = "nothing measured: --measured makes it closer"
    if found.is_anchored:
        by = f"with matrix products at {found.speed:.2f} of the table's speed"
    within = f"within about {found.error_fraction:.0%}"
    rows = [f"a step on {device} takes {found.step_ms:,.1f} ms, {within} ({by})"]
    if found.tokens_per_second is not None:
        rows.append(f"  {found.tokens_per_second:>9,.0f} tokens/s a GPU, of {found.tokens:,} a step")
    if found.flops:
        rows.append(
            f"  {found.mfu:>9.1%} of the data sheet's operations (MFU)"
            + (f", {found.hfu:.1%} with those computed again" if found.hfu > found.mfu * 1.05 else "")
        )
    rows.append(f"  {found.busy_ms:>9,.1f} ms  kernels")
    if found.communication_ms:
        waited, every = found.exposed_communication_ms, found.communication_ms
        rows.append(f"  {waited:>9,.1f} ms  waiting for communication, which takes {every:,.1f} ms")
    rows.append(f"  {found.host_ms:>9,.1f} ms  the host; the device waits for it {found.launch_bound:.0%} of the step")
    rows += [f"    {ms:>8,.1f} ms  {calls:>6,}x  {name}"[:_WIDTH] for name, ms, calls in found.slowest[:_LINES]]
    return "\n".join(rows)


def _time(report: PretendFacts) -> str:
    return "" if report.time is None else time_text(report.time, report.device)


def _peak(report: PretendFacts) -> str:
    total = sum(report.by_kind.values())
    if not total:
        return ""
    place = peak_place(report)
    rows = [f"at the peak, {place}"[:_WIDTH] if place else "at the peak"]
    for kind in KINDS:
        taken = report.by_kind[kind]
        if taken:
            rows.append(f"  {format_bytes(taken):>11}  {taken / total:>4.0%}  {kind}")
    if report.unused_bytes:
        rows.append(
            f"  {format_bytes(report.unused_bytes):>11}        reserved beyond it: fragments, blocks kept for later"
        )
    rows += ["    activations, by module"] if report.by_module else []
    for row in report.by_module[:_LINES]:
        rows.append(f"      {format_bytes(row['bytes']):>11}  {module_name(row)}"[:_WIDTH])
    rows += ["    who allocated it, by line"] if report.by_line else []
    for row in report.by_line[:_LINES]:
        rows.append(f"      {format_bytes(row['bytes']):>11}  {row['line']}"[:_WIDTH])
    return "\n".join(rows)


def peak_place(report: PretendFacts) -> str:
    """Where the script was when most was allocated; empty where that is not known."""
    found = report.peak_at
    if not found or not found["line"]:
        return ""
    if found["is_backward"]:
        return f"in the backward of {found['line']}"
    inner = "" if found["inner_line"] == found["line"] else f", inside it {found['inner_line']}"
    return f"at {found['line']}{inner}"


def module_name(row: dict[str, Any]) -> str:
    """``model.layers.*.mlp (LlamaMLP, 32 of them)``; a class alone where it has no name in the model."""
    if not row.get("name"):
        return str(row["module"])
    return f"{row['name']} ({row['module']}" + (f", {row['count']} of them)" if row["count"] > 1 else ")")


def _out_of_memory(report: PretendFacts) -> str:
    found = report.out_of_memory
    if found is None:
        return ""
    rows = [
        f"out of memory in step {found.step}, at {found.line}",
        f"  {format_bytes(found.asked_bytes)} asked for, {format_bytes(found.allocated_bytes)} allocated, "
        f"{format_bytes(found.reserved_bytes)} reserved",
    ]
    if found.inner_line != found.line:
        rows.append(f"  inside it: {found.inner_line}")
    return "\n".join(rows)


def _stops(report: PretendFacts) -> str:
    if not report.stops:
        return ""
    rows = ["where the host waited for the device in the last step"]
    rows += [f"  {row['count']:>5,}x  {row['operator']:<24} {row['line']}"[:_WIDTH] for row in report.stops]
    return "\n".join(rows)


def _lowtide(report: PretendFacts) -> str:
    found = report.lowtide
    if found is None:
        return ""
    state = "in force" if found.get("in_force") else "not in force"
    rows = [f"lowtide: {state}, {found.get('planned_steps', 0)} planned steps"]
    if found.get("predicted_peak_bytes"):
        rows.append(
            f"  predicted peak {format_bytes(found['predicted_peak_bytes'])}, "
            f"overhead {found.get('predicted_overhead') or 0:+.0%}"
        )
    rows += [f"  {reason}" for reason in found.get("reasons", ())]
    return "\n".join(rows)


def _changes(report: PretendFacts) -> str:
    if not report.changes:
        return ""
    rows = ["what would change it, measured by running it again"]
    for made in report.changes:
        peak = "-" if made.peak_reserved_bytes is None else format_bytes(made.peak_reserved_bytes)
        launches = "-" if made.launches is None else f"{made.launches:,} launches"
        step = "-" if made.step_ms is None else f"{made.step_ms:,.1f} ms a step"
        fits = "fits" if made.fits else "does not fit"
        rows.append(f"  {peak:>11}  {step:>18}  {fits:<12}  {launches:>16}  {made.change}"[:_WIDTH])
        rows += wrap(made.how, _WIDTH, initial_indent=" " * 15, subsequent_indent=" " * 15)
    return "\n".join(rows)


def _list(title: str, lines: tuple[str, ...]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)]) if lines else ""
