"""The tables of ``docs/changing-steps.md``: steps that leave their plan, and steps that differ each time."""

from __future__ import annotations

KEPT = 1.05  # of the budget


def leaves_table(lines: list[dict]) -> str:
    """A row for each step of another kind than the planned one: its peak beside the budget, and what was said."""
    rows = [
        "| planned, then | budget | bits | plain | checkpointing | lowtide | told |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for line in _of(lines, leaves=True):
        if line["status"] != "ok":
            rows.append(f"| {line['what']} | | {line['status']} | | | | |")
            continue
        for step in line["steps"]:
            shares = (step["plain_peak_bytes"], step["checkpointed_peak_bytes"], max(step["peaks"]))
            cells = [
                f"{line['what']}: {step['kind']}" + ", once more" * step["before"],
                "roomy" if step["roomy"] else "tight",
                _bits(step),
                *(f"{100 * share / step['budget_bytes']:.1f} %" for share in shares),
                "yes" if step["told"] else "",
            ]
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def changes_table(lines: list[dict]) -> str:
    """A row for each training whose steps differ: peaks beside the budget, and time beside plain steps."""
    rows = [
        "| each step | bits | peak | steps under a plan | checkpointing | lowtide |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for line in _of(lines, leaves=False):
        if line["status"] != "ok":
            rows.append(f"| {line['what']} | {line['status']} | | | | |")
            continue
        ms = line["all_ms"]
        cells = [
            line["what"],
            _bits(line),
            f"{100 * max(line['peaks']) / line['budget_bytes']:.1f} %",
            f"{100 * line['planned_share']:.0f} %",
            f"{ms['checkpointed'] / ms['plain']:.2f}",
            f"{ms['lowtide'] / ms['plain']:.2f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def changing_summary(lines: list[dict]) -> str:
    steps = [step for line in _of(lines, leaves=True) if line["status"] == "ok" for step in line["steps"]]
    kept = [step for step in steps if max(step["peaks"]) <= KEPT * step["budget_bytes"]]
    over = [step for step in steps if max(step["peaks"]) > step["budget_bytes"]]
    told = [step for step in over if step["told"]]
    untold = max((max(s["peaks"]) / s["budget_bytes"] - 1 for s in over if not s["told"]), default=0.0)
    ran = [*steps, *(line for line in _of(lines, leaves=False) if line["status"] == "ok")]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    return "\n".join(
        [
            f"- Bits: equal in {sum(found['bitwise_equal'] for found in ran)} of {len(ran)}.",
            f"- Left in mid-step: at most 1.05 of the budget in {len(kept)} of {len(steps)}.",
            f"- Above the budget: {len(over)} of {len(steps)}; of these told: {len(told)}, of the others none by more "
            f"than {100 * untold:.1f} %.",
            "",
            f"{lines[0]['device']}, one thread, torch {lines[0]['torch']}, commit {commits}.",
        ]
    )


def _of(lines: list[dict], *, leaves: bool) -> list[dict]:
    return [line for line in lines if line["leaves"] == leaves]


def _bits(found: dict) -> str:
    return "equal" if found["bitwise_equal"] else "NOT EQUAL"
