"""Tables of published GPU measurements beside what lowtide says of them: rows of the data, numbers of the results."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

from published_rows import ALLOCATED, DRIVER, NOT_CREATED, RESERVED, TIME, Row, rows

_NOTED = 0.05  # rows that are farther off have a reason
_UNEXPLAINED = "the cause is not known"
_CALIBRATED = "the shares of the table were chosen on it"
_KINDS = {
    ALLOCATED: "allocated: what the allocator gave out, `max_memory_allocated`",
    RESERVED: "reserved: what it took from the device, `max_memory_reserved`",
    DRIVER: "nvidia-smi: all that the process takes, its context too",
    TIME: "rate: tokens, images or sequences a second",
}


def summary(lines: list[dict]) -> str:
    """A row per kind of number: how far predictions are off, in the median and at most."""
    found = _matched(lines)
    table = ["| kind of number | rows | median | worst | aside |", "|---|---:|---:|---:|---:|"]
    for kind, words in _KINDS.items():
        mine = [(row, line["error"]) for row, line in found if row.kind == kind]
        counted = [abs(error) for row, error in mine if not row.gradients and not row.calibrated]
        table.append(_summary_row(words, counted, len(mine) - len(counted)))
        if kind == TIME:
            for family in ("a100", "h100"):
                of = [abs(e) for r, e in mine if r.gpu.startswith(family) and not r.calibrated]
                aside = sum(r.calibrated for r, _ in mine if r.gpu.startswith(family))
                table.append(_summary_row(f"on {family.upper()}", of, aside))
    line = lines[0]
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    aside = (
        "Aside: rows whose gradients are made otherwise than a trace counts them (marked below), and times on which "
        f"shares were chosen. {versions}, commit {line['commit']}, {line['date']}."
    )
    return "\n".join([*table, "", aside])


def _summary_row(words: str, errors: list[float], aside: int) -> str:
    return (
        f"| {words} | {len(errors)} | {_percent(statistics.median(errors))} | {_percent(max(errors))} | {aside or ''} |"
    )


def memory(lines: list[dict]) -> str:
    """A table per source and device of what takes memory."""
    return "\n\n".join(_sections([(r, x) for r, x in _matched(lines) if r.kind != TIME]))


def times(lines: list[dict]) -> str:
    """A table per source and device of rates."""
    return "\n\n".join(_sections([(r, x) for r, x in _matched(lines) if r.kind == TIME]))


def not_created(_: list[dict]) -> str:
    """What has no prediction, and why."""
    table = ["| configuration | published | why there is no prediction |", "|---|---:|---|"]
    table += [f"| [{what}]({source}), {gpu} | {number} | {why} |" for source, what, gpu, number, why in NOT_CREATED]
    return "\n".join(table)


def _matched(lines: list[dict]) -> list[tuple[Row, dict]]:
    """Rows with their results.

    Raises:
        SystemExit: a row without a result, or a result without a row.
    """
    known = {line["row"]: line for line in lines}
    wanted = {row.key: row for row in rows()}
    if differing := sorted(known.keys() ^ wanted.keys()):
        raise SystemExit(f"rows and results differ: {', '.join(differing[:3])}. Run: python published.py")
    return [(row, known[key]) for key, row in wanted.items()]


def _sections(found: list[tuple[Row, dict]]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[tuple[Row, dict]]] = defaultdict(list)
    for row, line in found:
        groups[row.source, row.gpu, row.kind].append((row, line))
    for (source, gpu, kind), members in groups.items():
        notes: dict[str, str] = {}
        table = ["| configuration | published | predicted | error | |", "|---|---:|---:|---:|---|"]
        for row, line in members:
            marks = " ".join(dict.fromkeys(notes.setdefault(n, "abcdefgh"[len(notes)]) for n in _notes(row, line)))
            sign = "+" if line["error"] > 0 else ""
            table.append(
                f"| {row.configuration} | {_number(row.published)} | {_number(line['predicted'])} | "
                f"{sign}{100 * line['error']:.1f} % | {marks} |"
            )
        unit = members[0][0].unit
        words = [f"[{source_name(source)}]({source})", gpu, *([kind] if kind != TIME else []), unit]
        head = f"{', '.join(words)}:"
        explained = "\n".join(f"- {mark}: {words}." for words, mark in notes.items())
        yield "\n".join([head, "", *table, *(["", explained] if explained else [])])


def _notes(row: Row, line: dict) -> Iterator[str]:
    if row.calibrated:
        yield _CALIBRATED
    if row.gradients:
        yield f"aside, {row.gradients}"
    if row.reason and abs(line["error"]) > 0.01:
        yield row.reason
    if row.guessed:
        yield f"the source does not say {row.guessed}" if not row.guessed.startswith("the GPU") else row.guessed
    if abs(line["error"]) > _NOTED and not row.gradients and not row.reason and not row.calibrated:
        yield _UNEXPLAINED


def source_name(source: str) -> str:
    parts = source.removeprefix("https://").split("/")
    if parts[0] == "github.com":
        return "/".join(parts[1:3]) + (f" #{parts[4]}" if parts[3] == "pull" else f", {parts[-1]}")
    return f"{parts[0]}, {parts[-1]}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
