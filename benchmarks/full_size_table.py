"""Tables of docs/full-size.md, and the reports on docs/how-to/pretend.md, from their committed results."""

from __future__ import annotations

GIB = 2**30


def example_text(device: str, found: list[dict]) -> str:
    """The report of ``examples/pretend/llama_1b.py`` as the command printed it."""
    return f"```text\n{found[0]['devices'][device]['text']}\n```"


def full_size_summary(lines: list[dict]) -> str:
    """What the table shows: budgets from checkpointing's peak up, and at checkpointing's peak itself."""
    within = [line for line in lines if line["budget_bytes"] and not line["method"].endswith("the least")]
    planned = [line for line in within if (line["lowtide"] or {}).get("planned_steps") and line["steps"]]
    off = [_share(line["steps"][-1]["allocated_bytes"], line["lowtide"]["predicted_peak_bytes"]) for line in planned]
    over = [_share(line["steps"][-1]["allocated_bytes"], line["budget_bytes"]) for line in planned]
    first = [_share(max(s["allocated_bytes"] for s in line["steps"][:2]), line["budget_bytes"]) for line in planned]
    checkpointing = {
        line["case"]: 100 * line["lowtide"]["predicted_overhead"]
        for line in planned
        if line["method"].endswith("checkpointing's peak")
    }
    tight = [line["tight"] for line in within if "tight" in line]
    ran = sum(not row["error"] for row in tight)
    told = [
        f"- Planned steps take what was predicted: at most {max(map(abs, off)):.2f} % off in {len(planned)} runs, and "
        f"at most {max(over):.2f} % more than the budget.",
        f"- The first two steps, before a plan, take at most {max(first):.1f} % more than the budget; "
        f"{sum(f > 0.1 for f in first)} of {len(first)} more than a thousandth.",
        "- Within the peak of checkpointing every layer, plans are predicted to cost "
        + ", ".join(f"{ms:.0f} % ({case})" for case, ms in checkpointing.items())
        + ".",
    ]
    if tight:
        told.append(f"- On a device with a twentieth more than the budget, {ran} of {len(tight)} run to the end.")
    return "\n".join(told)


def _share(found: int, of: int) -> float:
    """Percent by which ``found`` is above ``of``."""
    return 100 * (found / of - 1)


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
    note = f"GiB. PyTorch {lines[0]['torch']}, transformers {lines[0]['transformers']}. {_commits(lines)}"
    return "\n".join([*rows, "", note])


def _commits(lines: list[dict]) -> str:
    """What was measured on which commit: whole models, or rows where a model has several."""
    commits: dict[str, list[str]] = {}
    for case in dict.fromkeys(line["case"] for line in lines):
        methods: dict[str, list[str]] = {}
        for line in lines:
            if line["case"] == case:
                methods.setdefault(line["commit"], []).append(line["method"].removeprefix("lowtide, "))
        for commit, names in methods.items():
            part = f" ({', '.join(names)})" if len(methods) > 1 else ""
            commits.setdefault(commit, []).append(f"{case}{part}")
    tight = sorted({line["tight"]["commit"] for line in lines if "tight" in line})
    told = [f"{commit}: {', '.join(names)}." for commit, names in commits.items()]
    return " ".join(["Commits:", *told, f"5 % more: {', '.join(tight)}." if tight else ""]).strip()


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
