"""The table of programs at full size in docs/integrations.md, from the lines of ``full_size_programs.py``."""

from __future__ import annotations

from pretend_cases import CASES

GIB = 2**30
_WATCHED = 2  # steps before a plan
_WAYS = {"plain": "plain", "own": "its own checkpointing", "lowtide": "lowtide"}


def full_size_programs_table(lines: list[dict]) -> str:
    """Three rows a program: peaks of all steps, what is reserved, what the host and the device take of a step."""
    rows = [
        "| | budget | first two steps | every later step | reserved | kernels a step | host, ms | step, ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    name = ""
    for line in lines:
        if line["name"] != name:
            name = line["name"]
            case = next(case for case in CASES if case.name == name)
            ranks = f", rank 0 of {line['ranks']}" if line["ranks"] > 1 else ""
            rows.append(f"| **{case.source}, {name}**: {case.does}{ranks} | | | | | | | |")
        rows.append(f"| {_WAYS[line['method']]} | {' | '.join(_cells(line))} |")
    versions = lines[0]["versions"]
    told = [
        f"- {line['name']}: {_first(line)}"
        for line in lines
        if line["method"] == "lowtide" and (not line["lowtide"]["in_force"] or _over(line))
    ]  # fmt: skip
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    rows += [
        "",
        "GiB, the highest of these steps, as PyTorch's own allocator counts them. Host: of a step, by this machine's "
        "clock; step: what the device is predicted to take of the third one. An H100, or the device that the case "
        f"has on the page of public scripts, with 400 GiB. PyTorch {versions['torch']}, transformers "
        f"{versions['transformers']}, TRL {versions['trl']}. Commits {commits}.",
    ]
    if told:
        rows += [
            "",
            "Where a step took a hundredth more than the budget, or no plan was in force at the end:",
            "",
            *told,
        ]
    return "\n".join(rows)


def _of_which_step(steps: list[dict]) -> str:
    """The third step is the one that is recorded for its time; a plan may come later."""
    return " (no plan yet)" if steps[_WATCHED]["launches"] > 1.5 * steps[-1]["launches"] else ""


def _over(line: dict) -> bool:
    return max(step["allocated_bytes"] for step in line["steps"]) > 1.01 * line["budget_bytes"]


def _first(line: dict) -> str:
    """What lowtide said, but for what is said of every pretended run."""
    said = [" ".join(reason.split()) for reason in line["lowtide"]["reasons"] if "WITHOUT_VALUES" not in reason]
    return f"{said[0].rstrip('.')}." if said else "nothing was said."


def _cells(line: dict) -> list[str]:
    budget = "" if line["budget_bytes"] is None else f"{line['budget_bytes'] / GIB:.2f}"
    steps, time = line["steps"], line["time"]
    if not steps:
        return [budget, line["verdict"], *[""] * 5]
    peaks = [step["allocated_bytes"] / GIB for step in steps]
    later = f"{max(peaks[_WATCHED:]):.2f}" if len(peaks) > _WATCHED else ""
    if budget and not (line["lowtide"] or {}).get("planned_steps"):
        later += " (no plan)"
    return [
        budget, f"{max(peaks[:_WATCHED]):.2f}", later, f"{line['peak_reserved_bytes'] / GIB:.2f}",
        f"{steps[-1]['launches']:,}", "" if time is None else f"{time['host_ms']:.0f}",
        "" if time is None else f"{time['step_ms']:,.0f}{_of_which_step(steps)}",
    ]  # fmt: skip
