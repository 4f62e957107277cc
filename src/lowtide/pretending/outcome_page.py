"""A ``PretendReport`` as one HTML page without scripts or other files, and as a fragment for a notebook."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape

from lowtide.pretending.outcome_facts import PretendFacts
from lowtide.pretending.outcome_text import module_name, peak_place, verdict
from lowtide.reports import html
from lowtide.reports.notebook import card
from lowtide.reports.svg import kinds_chart
from lowtide.units import format_bytes


def page(report: PretendFacts) -> str:
    """The whole page."""
    sections = [
        ("broke", "Where it broke", _out_of_memory(report)),
        ("ranks", "Ranks", _ranks(report)),
        ("memory", "What memory holds", picture(report)),
        ("steps", "Steps", _steps(report)),
        ("time", "What a step takes", _time(report)),
        ("stages", "How far it came", _stages(report)),
        ("kinds", "At the peak", _parts(report)),
        ("modules", "Activations at the peak, by module", _modules(report)),
        ("lines", "At the peak, by line", _rows("line", report.by_line)),
        ("stops", "Where the host waited for the device", _stops(report)),
        ("changes", "What would change it", _changes(report)),
        ("lowtide", "lowtide in it", _lowtide(report)),
        ("assumed", "Taken for granted", _items((*report.notes, *report.assumptions))),
    ]
    body = [
        f"<h1>{escape(verdict(report))}</h1>",
        f'<p class="lead">{escape(shlex.join(report.command))}</p>',
        html.tile_row(_tiles(report)),
        *html.with_contents(sections),
    ]
    return html.page(verdict(report), body)


def fragment(report: PretendFacts) -> str:
    """For a notebook."""
    return card(verdict(report), _tiles(report), [picture(report)], report.notes)


def picture(report: PretendFacts) -> str:
    """Memory by kind over the run, and its legend; empty where no history was recorded."""
    curve = report.curve
    if not curve or not any(any(series) for series in curve["by_kind"].values()):
        return ""
    shown = {kind: series for kind, series in curve["by_kind"].items() if any(series)}
    legend = "".join(f'<i class="kind {kind}"></i>{kind}' for kind in shown)
    chart = kinds_chart(shown, curve["steps"], report.usable_bytes)
    return (
        f'{chart}<p class="legend">{legend}<i class="swatch-budget"></i>what the device has, without its context</p>'
        '<p class="note">From left to right: each allocation and each release of the run, in their order.</p>'
    )


def _tiles(report: PretendFacts) -> list[tuple[str, str, str]]:
    ranks = f"rank {report.rank} of {report.ranks}" if report.ranks > 1 else "one GPU"
    tiles = [
        (format_bytes(report.peak_reserved_bytes), "reserved", f"of {format_bytes(report.usable_bytes)}"),
        (format_bytes(report.peak_allocated_bytes), "allocated", "the peak, as PyTorch's allocator counts it"),
        (report.device, "device", f"{ranks}, PyTorch {report.torch}"),
    ]
    if report.time is not None:
        rate = report.time.tokens_per_second
        said = f"within about {report.time.error_fraction:.0%}" + (f", {rate:,.0f} tokens/s" if rate else "")
        tiles.append((f"{report.time.step_ms:,.1f} ms", "a step", said))
    if report.pins_much:
        tiles.append((format_bytes(report.pinned_peak_bytes), "pinned", "memory of the host that the script locks"))
    if report.host_ms_per_step is not None:
        last = report.steps[-1]
        tiles.append((f"{last.launches:,}", "launches a step", f"the host waits for the device {last.waits:,} times"))
    return tiles


def _steps(report: PretendFacts) -> str:
    heads = ("step", "allocated", "reserved", "launches", "waits", "host")
    rows = [
        (str(number), format_bytes(step.allocated_bytes), format_bytes(step.reserved_bytes), f"{step.launches:,}",
         f"{step.waits:,}", f"{step.host_ms:.0f} ms")
        for number, step in enumerate(report.steps, 1)
    ]  # fmt: skip
    return html.plain_table("Steps", heads, rows) if rows else ""


def _ranks(report: PretendFacts) -> str:
    heads = ("rank", "allocated", "reserved", "a step", "")
    rows = [
        (str(one.rank), format_bytes(one.peak_allocated_bytes), format_bytes(one.peak_reserved_bytes),
         "-" if one.step_ms is None else f"{one.step_ms:,.1f} ms", one.verdict)
        for one in report.by_rank
    ]  # fmt: skip
    return html.plain_table("Ranks", heads, rows) if rows else ""


def _time(report: PretendFacts) -> str:
    found = report.time
    if found is None:
        return ""
    rows = [("the step", found.step_ms), ("kernels", found.busy_ms), ("the host", found.host_ms),
            ("communication", found.communication_ms)]  # fmt: skip
    rows += [(f"the device stands still for {name}", ms) for name, ms in found.lost_ms.items()]
    times = html.plain_table("What a step takes", ("what", "ms"), [(name, f"{ms:,.2f}") for name, ms in rows if ms])
    most = [(name, f"{ms:,.2f}", f"{calls:,}") for name, ms, calls in found.slowest]
    return times + html.plain_table("What takes most", ("operator", "ms", "calls"), most)


def _parts(report: PretendFacts) -> str:
    total = sum(report.by_kind.values())
    rows = [
        (part["part"], part["kind"], format_bytes(part["bytes"]), f"{part['bytes'] / total:.1%}")
        for part in report.by_part
    ]
    if not rows:
        return ""
    place = f'<p class="note">{escape(peak_place(report))}</p>' if report.peak_at and report.peak_at["line"] else ""
    if report.unused_bytes:
        rows.append(
            ("fragments, and blocks kept for later", "reserved beyond it", format_bytes(report.unused_bytes), "")
        )
    return html.plain_table("At the peak", ("what", "kind", "bytes", "share"), rows) + place


def _stages(report: PretendFacts) -> str:
    rows = [(stage["stage"], f"{stage['seconds']:.1f} s") for stage in report.stages]
    return html.plain_table("Stages", ("stage", "after"), rows) if rows else ""


def _modules(report: PretendFacts) -> str:
    rows = [(module_name(row), format_bytes(row["bytes"])) for row in report.by_module]
    return html.plain_table("module", ("module", "bytes"), rows) if rows else ""


def _rows(name: str, rows: Sequence[dict]) -> str:
    found = [(row[name], format_bytes(row["bytes"])) for row in rows]
    return html.plain_table(name, (name, "bytes"), found) if found else ""


def _stops(report: PretendFacts) -> str:
    rows = [(stop["line"], stop["operator"], f"{stop['count']:,}") for stop in report.stops]
    return html.plain_table("Stops", ("line", "operator", "times in the last step"), rows) if rows else ""


def _out_of_memory(report: PretendFacts) -> str:
    found = report.out_of_memory
    if found is None:
        return ""
    rows = [
        ("line", found.line), ("inside it", found.inner_line), ("step", str(found.step)),
        ("asked for", format_bytes(found.asked_bytes)), ("allocated", format_bytes(found.allocated_bytes)),
        ("reserved", format_bytes(found.reserved_bytes)), ("PyTorch says", found.message),
    ]  # fmt: skip
    return f"<dl>{''.join(f'<dt>{escape(n)}</dt><dd>{escape(v)}</dd>' for n, v in rows if v)}</dl>"


def _lowtide(report: PretendFacts) -> str:
    if report.lowtide is None:
        return ""
    rows = [(name.replace("_", " "), str(value)) for name, value in report.lowtide.items() if name != "reasons"]
    facts = f"<dl>{''.join(f'<dt>{escape(n)}</dt><dd>{escape(v)}</dd>' for n, v in rows)}</dl>"
    return facts + _items(report.lowtide.get("reasons", ()))


def _changes(report: PretendFacts) -> str:
    rows = [
        (made.change, made.how, "-" if made.peak_reserved_bytes is None else format_bytes(made.peak_reserved_bytes),
         "-" if made.step_ms is None else f"{made.step_ms:,.1f} ms",
         "-" if made.launches is None else f"{made.launches:,}", "fits" if made.fits else "does not fit")
        for made in report.changes
    ]  # fmt: skip
    heads = ("change", "how", "reserved", "a step", "launches a step", "")
    return html.plain_table("What would change it", heads, rows) if rows else ""


def _items(lines: Sequence[str]) -> str:
    return f'<ul class="say">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>' if lines else ""
