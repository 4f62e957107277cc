"""Tables of published measurements and out-of-memory errors beside what running their scripts counted."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from pretend_published_rows import TODAY, Measured, OutOfMemoryReport, Run, measured, reports
from published_rows import ALLOCATED, DRIVER, GIB, RESERVED
from published_table import source_name

from lowtide.estimation.device_table import device_named
from lowtide.pretending.settings import VERSIONS_DIFFER

_NOTED = 0.01  # rows that are farther off have a reason
_UNEXPLAINED = "the cause is not known"
_KINDS = {
    ALLOCATED: "allocated: `max_memory_allocated`",
    RESERVED: "reserved: `max_memory_reserved`",
    DRIVER: "nvidia-smi: reserved, and the context as the device table has it",
}
Results = dict[tuple[str, str], dict[str, Any]]


def summary(lines: list[dict]) -> str:
    """A row per kind of number and version of PyTorch: how far counted numbers are off, in the median and at most."""
    known = _by_run(lines)
    table = ["| kind of number | PyTorch | rows | median | within 1 % | worst |", "|---|---|---:|---:|---:|---:|"]
    for kind, words in _KINDS.items():
        for label in ("of the time", TODAY):
            errors = [
                abs(error)
                for row in measured()
                if row.kind == kind
                and (error := _error(row, known, TODAY if label == TODAY else row.run.torch)) is not None
            ]
            if errors:
                close = sum(error <= _NOTED for error in errors)
                table.append(
                    f"| {words} | {label} | {len(errors)} | {_percent(statistics.median(errors))} | {close} | "
                    f"{_percent(max(errors))} |"
                )
    return "\n".join(table)


def versions(lines: list[dict]) -> str:
    """What the version of PyTorch alone does to a peak, of the runs that were made on two."""
    known = _by_run(lines)
    differences = [
        1 - known[run, TODAY]["allocated_bytes"] / line["allocated_bytes"]
        for (run, version), line in known.items()
        if version != TODAY and (run, TODAY) in known
        and line["verdict"].startswith("fits") and known[run, TODAY]["verdict"].startswith("fits")
    ]  # fmt: skip
    assert f"{max(differences):.0%}" == f"{VERSIONS_DIFFER:.0%}", (max(differences), "what the report says")
    within = sum(abs(difference) <= _NOTED for difference in differences)
    return (
        f"**The version of PyTorch decides**: of {len(differences)} published scripts that ran on that of their time "
        f"(2.0 to\n2.6) and on {TODAY}, {within} took the same memory within {_NOTED:.0%}, the others up to "
        f"{max(differences):.0%} less today. The report says\nwhich one ran."
    )


def measurements(lines: list[dict]) -> str:
    """A table per source and device."""
    known = _by_run(lines)
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for row in measured():
        if _error(row, known, row.run.torch) is not None:
            groups.setdefault((row.source, row.run.gpu, row.kind), []).append(row)
    return "\n\n".join(_section(*key, rows, known) for key, rows in groups.items())


def _section(source: str, gpu: str, kind: str, rows: list[Measured], known: Results) -> str:
    notes: dict[str, str] = {}
    table = [
        f"| configuration | published | PyTorch | counted | error | on {TODAY} | error | |",
        "|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        marks = " ".join(notes.setdefault(note, "abcdefghij"[len(notes)]) for note in _notes(row, known))
        cells = [row.configuration, _number(row.published), row.run.torch]
        for version in (row.run.torch, TODAY):
            found, error = _counted(row, known, version), _error(row, known, version)
            cells += ["–", ""] if found is None or error is None else [_number(found), _signed(error)]
        table.append(f"| {' | '.join([*cells, marks])} |")
    head = f"[{source_name(source)}]({source}), {gpu}, {kind}, {rows[0].unit}:"
    explained = "\n".join(f"- {mark}: {words}." for words, mark in notes.items())
    return "\n".join([head, "", *table, *(["", explained] if explained else [])])


def _notes(row: Measured, known: Results) -> Iterator[str]:
    error = _error(row, known, row.run.torch)
    if error is not None and abs(error) > _NOTED:
        yield row.reason or _UNEXPLAINED
    if row.guessed:
        yield f"the source does not say, or is not followed in: {row.guessed}"


def out_of_memory(lines: list[dict]) -> str:
    """A row per published error: its message beside ours."""
    known = _by_run(lines)
    table = [
        "| report | asked for, GiB | ours | allocated, GiB | ours | reserved, GiB | ours | ours, at | |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    notes: dict[str, str] = {}
    same = near = messages = 0
    for report in reports():
        line = known.get((report.run.name, report.run.torch))
        if line is None or line["verdict"] == "failed":
            continue
        if report.asked is not None and report.allocated is not None:
            found = line["out_of_memory"]
            messages += 1
            same += found is not None and f"{found['asked_bytes'] / GIB:.2f}" == f"{report.asked:.2f}"
            near += found is not None and abs(found["allocated_bytes"] / GIB / report.allocated - 1) <= _NOTED
        words = [f"the source does not say: {report.guessed}"] if report.guessed else []
        words += [report.reason] if report.reason else []
        marks = " ".join(notes.setdefault(word, "abcdefghij"[len(notes)]) for word in words)
        table.append(f"| {' | '.join([*_error_cells(report, line), marks])} |")
    explained = "\n".join(f"- {mark}: {words}." for words, mark in notes.items())
    told = (
        f"Of {messages} messages that are whole, {same} ask for as much here; as much is allocated within {_NOTED:.0%} "
        f"in {near}."
    )
    return "\n".join([told, "", *table, *(["", explained] if explained else [])])


def _error_cells(report: OutOfMemoryReport, line: dict[str, Any]) -> Iterator[str]:
    yield f"[{report.configuration}]({report.source})"
    found = line["out_of_memory"]
    for theirs, key in ((report.asked, "asked_bytes"), (report.allocated, "allocated_bytes"),
                        (report.reserved, "reserved_bytes")):  # fmt: skip
        yield "out of memory" if theirs is None and key == "asked_bytes" else "" if theirs is None else f"{theirs:.2f}"
        yield "fits" if found is None and key == "asked_bytes" else "" if found is None else f"{found[key] / GIB:.2f}"
    yield "" if found is None else f"step {found['step']}, `{found['script_line'] or found['line']}`"


def _by_run(lines: list[dict]) -> Results:
    return {(line["run"], line["torch"]): line for line in lines}


def _counted(row: Measured, known: Results, version: str) -> float | None:
    """In the row's unit; None where there is no result."""
    line = known.get((row.run.name, version))
    if line is None or line["verdict"] in ("failed", "did not end"):
        return None
    if row.run.says:
        return line["said"][row.said] / row.scale if row.said in line["said"] else None
    if line["verdict"] == "does not fit":
        return None
    if row.kind == ALLOCATED:
        return line["allocated_bytes"] / row.scale
    return (line["reserved_bytes"] + (_context(row.run, row) if row.kind == DRIVER else 0)) / row.scale


def _context(run: Run, row: Measured) -> int:
    return device_named(run.gpu).context_bytes_of(row.cuda)


def _error(row: Measured, known: Results, version: str) -> float | None:
    found = _counted(row, known, version)
    return None if found is None else found / row.published - 1


def _number(value: float) -> str:
    return f"{value:,.1f}" if value >= 200 else f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"
