"""The table of ``benchmarks/real_steps.py``: loops as people write them, fitted without a batch."""

from __future__ import annotations


def real_steps_table(lines: list[dict]) -> str:
    rows = [
        "| loop | losses, weights | steps planned | largest peak | time | plans alone | short batches |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    rows += ["| " + " | ".join(_cells(line)) + " |" for line in lines]
    first = lines[0]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    rows += [
        "",
        f"The budget is resident memory and {100 * first['fraction']:.0f} % of the largest plain step's activations. "
        "Peaks are the allocator's, over every step, as a share of the budget. Time is elapsed time of the whole run, "
        "relative to the plain run. Plans alone: what the plans predict for their steps, without watching and "
        "planning. Short batches: their time as a share of that under one plan for the longest. Plain steps take 28 to "
        "119 ms, in the wide loops 0.3 to 0.8 s: a step without a plan costs about the same for each op, whatever its "
        f"size. {first['device']}, one thread, torch {first['torch']}, commit {commits}.",
    ]
    return "\n".join(rows)


def _cells(line: dict) -> list[str]:
    by_phase, rank = line["steps_by_phase"], f", rank {line['rank']} of 2" if line["case"].startswith("data") else ""
    share = line["wall_s"] / line["plain_wall_s"]
    short = line.get("short_step_ratio")
    return [
        line["case"] + rank,
        "equal" if line["bitwise_equal"] else "NOT EQUAL",
        f"{by_phase.get('planned', 0)} of {sum(by_phase.values())}",
        f"{100 * line['largest_peak_share']:.1f} %",
        f"{100 * (share - 1):+.0f} %",
        f"{100 * (share / line['wall_ratio'] - 1):+.0f} %",
        "" if short is None else f"{short:.2f}",
    ]
