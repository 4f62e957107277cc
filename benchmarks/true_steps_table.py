"""The tables of ``docs/steps.md``: kinds of training steps, what their plans predict and what they take."""

from __future__ import annotations

PREDICTED_WITHIN, BUDGET_WITHIN = 0.001, 1.001  # what is asked


def true_steps_cuda_summary(lines: list[dict]) -> str:
    found = _counts(lines)
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    return "\n".join([*found, "", f"{lines[0]['device']}, torch {lines[0]['torch']}, commit {commits}."])


def true_steps_cuda_table(lines: list[dict]) -> str:
    rows = ["| kind of step | bits | predicted | peak under a plan | before a plan |", "|---|---|---:|---:|---:|"]
    return "\n".join([*rows, *("| " + " | ".join(_cells(line)[:5]) + " |" for line in lines)])


def true_steps_table(lines: list[dict]) -> str:
    rows = [
        "| kind of step | bits | predicted | peak under a plan | before a plan | checkpointing | plan | no plan |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows += ["| " + " | ".join(_cells(line)) + " |" for line in lines]
    return "\n".join(rows)


def true_steps_summary(lines: list[dict]) -> str:
    beside = [line for line in lines if line["status"] == "ok" and line["planned_parts"]]
    beside = [line for line in beside if line["checkpointed_peak_bytes"] == line["budget_bytes"]]
    faster = [line for line in beside if line["step_ms"]["lowtide"] <= line["step_ms"]["checkpointed"]]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    return "\n".join(
        [
            *_counts(lines),
            f"- Faster than checkpointing at checkpointing's own peak: {len(faster)} of {len(beside)}.",
            "",
            f"{lines[0]['device']}, one thread, torch {lines[0]['torch']}, commit {commits}.",
        ]
    )


def _counts(lines: list[dict]) -> list[str]:
    ran = [line for line in lines if line["status"] == "ok"]
    planned = [line for line in ran if line["planned_parts"]]
    exact = [line for line in planned if abs(line["largest_error"] or 0.0) <= PREDICTED_WITHIN]
    within = [line for line in planned if line["planned_peak_share"] <= BUDGET_WITHIN]
    first = [line for line in ran if (line["unplanned_peak_share"] or 0.0) <= BUDGET_WITHIN]
    return [
        f"- Bits: equal in {sum(line['bitwise_equal'] for line in ran)} of {len(lines)} kinds.",
        f"- Planned: {len(planned)}. Of these the predicted peak is within 0.1 % of the counted one: {len(exact)}.",
        f"- Peak within the budget under a plan: {len(within)} of {len(planned)}; in the steps before a plan: "
        f"{len(first)} of {len(ran)}.",
    ]


def _cells(line: dict) -> list[str]:
    if line["status"] != "ok":
        return [line["what"], line["status"], "", "", "", "", "", ""]
    ms = line.get("step_ms", {})
    return [
        line["what"],
        "equal" if line["bitwise_equal"] else "NOT EQUAL",
        "no plan" if line["largest_error"] is None else f"{100 * line['largest_error']:+.2f} %",
        _percent(line["planned_peak_share"]),
        _percent(line["unplanned_peak_share"]),
        *(f"{ms[name] / ms['plain']:.2f}" if name in ms else "" for name in ("checkpointed", "lowtide", "unplanned")),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
