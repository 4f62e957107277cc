"""Tables of docs/full-size.md, and the reports on docs/how-to/pretend.md, from their committed results."""

from __future__ import annotations

GIB = 2**30


def example_text(device: str, found: list[dict]) -> str:
    """The report of ``examples/pretend/llama_1b.py`` as the command printed it."""
    return f"```text\n{found[0]['devices'][device]['text']}\n```"


def full_size_table(lines: list[dict]) -> str:
    """A row for each model and method: peaks of the first steps and of planned ones, beside the budget."""
    heads = (
        "| | budget | first step | second | planned, counted | predicted | reserved | 5 % more | overhead | launches |"
    )
    rows = [heads, "|---|---:|---:|---:|---:|---:|---:|---|---:|---:|"]
    case = ""
    for line in lines:
        if line["case"] != case:
            case = line["case"]
            rows.append(f"| **{case}** | | | | | | | | | |")
        rows.append(f"| {line['method'].removeprefix('lowtide, ')} | {' | '.join(_cells(line))} |")
    commit = sorted({row["commit"] for line in lines for row in (line, line.get("tight")) if row})
    note = f"GiB. Commit {', '.join(commit)}, PyTorch {lines[0]['torch']}, transformers {lines[0]['transformers']}."
    return "\n".join([*rows, "", note])


def _cells(line: dict) -> list[str]:
    steps, inside = line["steps"], line["lowtide"] or {}
    budget = "" if line["budget_bytes"] is None else f"{line['budget_bytes'] / GIB:.2f}"
    if not steps:
        return [budget, line["verdict"], *[""] * 7]
    peaks = [step["allocated_bytes"] / GIB for step in steps]
    planned = f"{peaks[-1]:.2f}" if inside.get("planned_steps") else ""
    if budget and not planned:
        planned = "no plan"
    predicted = inside.get("predicted_peak_bytes")
    overhead = inside.get("predicted_overhead")
    return [
        budget, f"{peaks[0]:.2f}", f"{peaks[1]:.2f}" if len(peaks) > 1 else "", planned,
        "" if predicted is None else f"{predicted / GIB:.2f}", f"{line['peak_reserved_bytes'] / GIB:.2f}",
        _on_little_more(line.get("tight")), "" if overhead is None else f"{100 * overhead:+.0f} %",
        f"{steps[-1]['launches']:,}",
    ]  # fmt: skip


def _on_little_more(tight: dict | None) -> str:
    """What came of the run on a device that has a twentieth more than the budget."""
    if tight is None:
        return ""
    return "fits" if not tight["error"] else f"step {tight['steps'] + 1}: {tight['verdict']}"
