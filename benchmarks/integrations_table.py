"""The tables of ``docs/integrations.md``, from the lines of ``integrations.py``."""

from __future__ import annotations

MIB = 2**20


def cases_table(lines: list[dict]) -> str:
    """A row a case: whether bits are equal, and what steps took of the budget."""
    lines = [line for line in lines if "wall_ratio" not in line]
    rows = [
        "| library | case | losses, weights | budget | peak, all steps | peak, planned steps | steps planned | plans |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for line in lines:
        library = f"{line['library']} {'(re-created)' if line['version'] is None else line['version']}"
        if line["status"] != "ok":
            rows.append(f"| {library} | {line['case']} | {line['status']} | | | | | |")
            continue
        same = [_same(line[key]) for key in ("bitwise_losses", "bitwise_weights")]
        rows.append(
            f"| {library} | {line['case']} | {', '.join(same)} | "
            f"{line['budget_bytes'] / MIB:.2f} MiB | {_percent(line['largest_peak_share'])} | "
            f"{_percent(line['largest_planned_peak_share'])} | {line['planned_steps']} of {line['steps']} | "
            f"{line['plans']} |"
        )
    first = next(line for line in lines if line["status"] == "ok")
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines if "commit" in line))
    rows += [
        "",
        f"The budget is resident memory and {100 * first['fraction']:.0f} % of the plain step's activations. Peaks "
        "are the allocator's largest, resident memory included, as a share of the budget. After the first steps each "
        f"run waits for its plan. {first['device']}, {first['threads']} thread, torch {first['torch']}, commit "
        f"{commits}.",
    ]
    return "\n".join(rows)


def programs_table(lines: list[dict]) -> str:
    """A row a program and case: bits, peak of every step against the budget, time beside its own checkpointing."""
    rows = [
        "| program | case | lines changed | losses, weights | plain peak | budget | highest peak | steps planned | "
        "time: lowtide, its own checkpointing |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for line in lines:
        same = [_same(line[key]) for key in ("bitwise_losses", "bitwise_weights")]
        if line.get("plain_repeats") is False:
            same = ["equal" if line["bitwise_losses"] else "two plain runs differ", "two plain runs differ"]
        plain, seconds = line["seconds"]["plain"], line["seconds"]
        times = [_more(seconds[name] / plain) if name in seconds else "none" for name in ("lowtide", "own")]
        peak = "not counted" if line["peak_bytes"] is None else _percent(line["peak_bytes"] / line["budget_bytes"])
        rows.append(
            f"| {line['program']} {line['version']} | {line['case']} | {line['lines_changed']} | {', '.join(same)} | "
            f"{line['plain_peak_bytes'] / MIB:.2f} MiB | {line['budget_bytes'] / MIB:.2f} MiB | {peak} | "
            f"{line['planned_steps']} of {line['steps']} | {', '.join(times)} |"
        )
    first, notes = lines[0], []
    for line in (line for line in lines if "selective_peak_bytes" in line):
        own = [
            f"{name} {line[key] / MIB:.2f} MiB ({_more(line['seconds'][took] / line['seconds']['plain'])})"
            for name, key, took in (
                ("full", "own_peak_bytes", "own"),
                ("selective", "selective_peak_bytes", "selective"),
                ("memory budget", "memory_budget_peak_bytes", "memory budget"),
            )
            if line.get(key) is not None
        ]
        notes.append(f"{line['program']}'s own in the last step, {line['case']}: {', '.join(own)}.")
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    torches: dict[str, list[str]] = {}
    for line in lines:
        torches.setdefault(line["torch"], []).append(f"{line['program']} ({line['case']})")
    most = max(torches, key=lambda version: len(torches[version]))
    others = "".join(f"; {version}: {', '.join(names)}" for version, names in torches.items() if version != most)
    devices = " or ".join(dict.fromkeys(line["device"] for line in lines))
    rows += [
        "",
        f"{len({line['program'] for line in lines})} programs on random weights, {lines_equal(lines)} of {len(lines)} "
        "cases with equal bits. The highest peak is of every step of two runs, counted, as a share of the budget, "
        f"which is 80 % of the plain peak for {_most_budgets(lines)}. The plans of these runs were found in the cache "
        f"of a run before, which had to make them. Times are of whole runs of {_fewest_and_most(lines)} steps, the "
        "steps before the plan included, on two cores that did other work: they tell what hurts, not percent. "
        f"{' '.join(notes)} {devices}, {first['threads']} thread, torch {most}{others}. Commits {commits}.",
    ]
    told = _told(lines)
    if told:
        rows += ["", "What took more than its budget, and what was said of it:", "", *told]
    return "\n".join(rows)


def lines_equal(lines: list[dict]) -> int:
    return sum(line["bitwise_losses"] and line["bitwise_weights"] for line in lines)


def _fewest_and_most(lines: list[dict]) -> str:
    numbers = [line["steps"] for line in lines]
    return f"{min(numbers)} to {max(numbers)}"


def _most_budgets(lines: list[dict]) -> str:
    others = [
        line["program"] for line in lines if not 0.79 < line["budget_bytes"] / line["plain_peak_bytes"] < 0.81
    ]  # fmt: skip
    return "all" if not others else f"all but {', '.join(dict.fromkeys(others))}"


_TELL_BYTES = ("no plan", "a step that ran online took", "a step under its plan took")  # reasons of what was told


def _told(lines: list[dict]) -> list[str]:
    """A line a case that had steps above its budget: how many, by how much, why."""
    found = []
    for line in lines:
        if line["peak_bytes"] is None or line["peak_bytes"] <= line["budget_bytes"]:
            continue
        over = (line["peak_bytes"] - line["budget_bytes"]) / 2**10
        reasons = line.get("reasons") or []
        # What says which bytes, where one does.
        reason = next((r for told in _TELL_BYTES for r in reasons if r.startswith(told)), next(iter(reasons), ""))
        said = f": {reason[:1].lower()}{reason[1:]}" if reason else ""
        found.append(
            f"- {line['program']} ({line['case']}): {line['over_budget_steps']} of {line['steps']} steps, by "
            f"{over:,.1f} KiB at most{said}."
        )
    return found


def timed_table(lines: list[dict]) -> str:
    """A row a timed case: lowtide and TRL's own checkpointing beside plain training."""
    lines = [line for line in lines if "wall_ratio" in line]
    if not lines:
        return "Not measured yet: `make integrations`."
    rows = [
        "| case | way | activations | CPU of the training thread | elapsed | predicted by the plans |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for line in lines:
        predicted = f"{100 * line['predicted_extra_share']:+.1f} %"
        rows += [
            f"| {line['case']} | lowtide | {100 * line['fraction']:.0f} % | {_more(line['cpu_ratio'])} | "
            f"{_more(line['wall_ratio'])} | {predicted} |",
            f"| | TRL's checkpointing | {100 * line['full_activation_share']:.0f} % | "
            f"{_more(line['checkpointed_cpu_ratio'])} | {_more(line['checkpointed_wall_ratio'])} | |",
        ]
    rows += ["", "Where lowtide's extra CPU time goes, as shares of plain training's:", ""]
    columns = ("preparing batches", "first step", "steps without a plan", "planned steps", "between steps")
    rows += [f"| case | {' | '.join(columns)} | steps planned |", "|---|" + "---:|" * (len(columns) + 1)]
    for line in lines:
        extra = line["extra_shares"]
        without = extra.get("planning", 0.0) + extra.get("online", 0.0)
        shares = (
            extra["preparing"], extra.get("first", 0.0), without, extra.get("planned", 0.0), extra["between steps"],
        )  # fmt: skip
        cells = " | ".join(f"{100 * share:+.1f} %" for share in shares)
        rows.append(f"| {line['case']} | {cells} | {line['planned_steps']} of {line['steps']} |")
    notes = [
        f"{line['case']}: bits {_same(line['bitwise_losses'] and line['bitwise_weights'])}, largest peak "
        f"{_percent(line['largest_peak_share'])} of the budget, planning on the training thread "
        f"{100 * line['planning_cpu_share']:.1f} % of the run, difference of two plain runs "
        f"{_more(line['plain_cpu_apart'])}, commit {line['commit']}."
        for line in lines
    ]
    first = lines[0]
    rows += [
        "",
        f"A Llama-shaped model, {first['layers']} layers of {first['hidden']}, vocabulary {first['vocabulary']:,}, "
        f"fp32, texts of up to 256 tokens. Plans are made while training goes on. TRL's fused loss has tiles "
        f"as wide as the vocabulary instead of 32768. {' '.join(notes)} {first['device']}, {first['threads']} thread, "
        f"torch {first['torch']}.",
    ]
    return "\n".join(rows)


def _same(equal: bool) -> str:
    return "equal" if equal else "**differ**"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _more(ratio: float) -> str:
    return f"{100 * ratio - 100:+.1f} %"
