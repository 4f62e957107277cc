"""Tables of what was foreseen: quoted numbers beside recomputed ones, peaks and times beside measured ones."""

from __future__ import annotations

import statistics
from collections import Counter

VERDICTS = {"right": "right", "wrong": "**wrong**", "depends": "it depends", "open": "open"}


def claims_table(lines: list[dict]) -> str:
    """A row per quoted number."""
    rows = ["| quoted | what it is | verdict | how it was found |", "|---|---|---|---|"]
    rows += [f"| {x['quoted']} | {x['found']} | {VERDICTS[x['verdict']]} | {x['how']} |" for x in lines]
    counts = Counter(line["verdict"] for line in lines)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return "\n".join([*rows, "", f"Of {len(lines)} numbers: {said}. {origin(lines)}"])


def peaks_table(lines: list[dict]) -> str:
    """A row per architecture and precision: the worst error over shapes and plans."""
    ran = [line for line in lines if "error" in line]
    precisions = list(dict.fromkeys(line["precision"] for line in ran))
    rows = [
        "| architecture | cases | equal to the byte | " + " | ".join(f"worst, {p}" for p in precisions) + " |",
        "|---|---:|---:|" + "---:|" * len(precisions),
    ]
    for name in dict.fromkeys(line["architecture"] for line in ran):
        mine = [line for line in ran if line["architecture"] == name]
        equal = sum(line["predicted_peak_bytes"] == line["measured_peak_bytes"] for line in mine)
        worst = [
            max((line["error"] for line in mine if line["precision"] == p), key=abs, default=None) for p in precisions
        ]
        cells = " | ".join("-" if error is None else percent(error) for error in worst)
        rows.append(f"| {name} | {len(mine)} | {equal} | {cells} |")
    errors = sorted(abs(line["error"]) for line in ran)
    differing = [line for line in ran if line["status"] != "ok"]
    if differing:
        raise SystemExit("gradients differ where they must not: no table is made of that.")
    refused = len(lines) - len(ran)
    median = percent(statistics.median(errors))
    note = (
        f"{len(ran)} cases: {sum(e == 0 for e in errors)} equal to the byte, median {median}, worst "
        f"{percent(errors[-1])}. Gradients bitwise equal in all of them. In {refused} more no plan exists: the budget "
        f"is below what every plan needs, or no layer repeats. {origin(lines)}"
    )
    return "\n".join([*rows, "", note])


def zoo_table(lines: list[dict]) -> str:
    """A row per variant, over all architectures; then those whose peaks differ, each with the reason that is known."""
    rows = [
        "| variant | traced on real tensors | equal to the byte | differ | worst | no hollow trace |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for variant in dict.fromkeys(line["variant"] for line in lines):
        mine = [line for line in lines if line["variant"] == variant and line["status"] != "not built"]
        equal = sum(line["status"] == "equal" for line in mine)
        off = [_off(line) for line in mine if line["status"] == "differs"]
        rows.append(
            f"| {variant} | {len(mine)} | {equal} ({100 * equal / len(mine):.1f} %) | {len(off)} | "
            f"{percent(max(off, key=abs, default=0.0))} | {len(mine) - equal - len(off)} |"
        )
    traced = [line for line in lines if line["status"] != "not built"]
    equal = sum(line["status"] == "equal" for line in traced)
    kinds = len({(line["task"], line["type"]) for line in traced})
    note = (
        f"{kinds} architectures, {len(traced)} traces, {equal} of them ({100 * equal / len(traced):.1f} %) equal to "
        f"the byte. {len(lines) - len(traced)} more cannot run in that variant on real tensors either. {origin(lines)}"
    )
    named = ["| what differs | variant | peak off | why |", "|---|---|---:|---|"]
    for line in sorted(traced, key=lambda line: (line["type"], line["variant"])):
        if line["status"] != "equal":
            off = percent(_off(line)) if line["status"] == "differs" else "-"
            named.append(f"| {line['type']} ({line['task']}) | {line['variant']} | {off} | {_why(line)} |")
    return "\n".join([*rows, "", note, "", *named])


def counted_table(lines: list[dict]) -> str:
    """A row per variant: peaks traced for a CUDA device beside those that its allocator counted; then what differs."""
    (found,) = lines
    compared = [line for line in found["lines"] if "error" not in line]
    rows = [
        "| variant | attention | steps | equal to the byte | under a plan | equal | worst |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for variant, attention in dict.fromkeys((line["variant"], line["attention"]) for line in compared):
        mine = [x for x in compared if (x["variant"], x["attention"]) == (variant, attention)]
        plain, planned = ([x for x in mine if (x["plan"] == "none") is wanted] for wanted in (True, False))
        equal = [sum(map(_is_equal, some)) for some in (plain, planned)]
        worst = max((x["traced_peak_bytes"] / x["counted_peak_bytes"] - 1 for x in mine), key=abs)
        rows.append(
            f"| {variant} | {attention} | {len(plain)} | {equal[0]} | {len(planned)} | {equal[1]} | {percent(worst)} |"
        )
    equal = sum(map(_is_equal, compared))
    kinds = len({line["architecture"] for line in compared})
    note = (
        f"{kinds} architectures, {len(compared)} comparisons, {equal} of them ({100 * equal / len(compared):.1f} %) "
        f"equal to the byte. {found['device']}, traced for {found['target']}; torch {found['torch']}, transformers "
        f"{found['transformers']}, commit {found['commit']}."
    )
    named = ["| what differs | variant | attention | bytes off | first op apart |", "|---|---|---|---:|---|"]
    for line in found["lines"]:
        if "error" in line or not _is_equal(line):
            off = "-" if "error" in line else f"{line['traced_peak_bytes'] - line['counted_peak_bytes']:+,}"
            why = line.get("error") or _apart_in_words(line)
            named.append(f"| {line['architecture']} | {line['variant']} | {line['attention']} | {off} | {why} |")
    return "\n".join([*rows, "", note, *(["", *named] if len(named) > 2 else [])])


def _is_equal(line: dict) -> bool:
    return line["traced_peak_bytes"] == line["counted_peak_bytes"]


def _apart_in_words(line: dict) -> str:
    on_device = line.get("traced_on_device_peak_bytes")
    if not line.get("ops_apart") and on_device == line["traced_peak_bytes"]:
        return "none: a trace on the device says the same, so memory is taken that no operator shows"
    return line["ops_apart"][0].partition(" {")[0] if line.get("ops_apart") else "none"


def _off(line: dict) -> float:
    return line["hollow_peak_bytes"] / line["real_peak_bytes"] - 1


def _why(line: dict) -> str:
    if line["status"] != "differs":
        return f"{line['status']}: {line['reason']}".replace("|", "/")
    first = line.get("first_difference")
    apart = [] if first is None else [f"first apart: {first[0]}, without memory {first[1]}"]
    return "; ".join([*line["assumed"][:2], *apart]).replace("|", "/") or "no op differs; cause not found"


def large_table(lines: list[dict]) -> str:
    """A row per large model: what planning it takes."""
    rows = [
        "| model | tokens | kernels | ops | plain peak | seconds | memory |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    rows += [
        f"| {x['model']} | {x['tokens']:,} | {x['kernels']} | {x['ops']:,} | {x['plain_peak_bytes'] / 2**30:,.0f} GiB "
        f"| {x['process_s']:.1f} | {x['process_peak_bytes'] / 2**30:.2f} GiB |"
        for x in lines
    ]
    return "\n".join([*rows, "", origin(lines)])


def plans_table(lines: list[dict]) -> str:
    """A row per plan: how far predictions are off."""
    ran = [line for line in lines if "error" in line]
    rows = ["| plan | cases | median | worst | peak of the plain step's, median |", "|---|---:|---:|---:|---:|"]
    plain = {_step(line): line for line in ran if line["plan"] == "none"}
    for plan in dict.fromkeys(line["plan"] for line in ran):
        mine = [line for line in ran if line["plan"] == plan]
        errors = [abs(line["error"]) for line in mine]
        shares = [_activations(line) / _activations(plain[_step(line)]) for line in mine if _step(line) in plain]
        name = {"none": "plain step", "full": "every layer"}.get(plan, f"{plan.replace('%', ' %')} of the activations")
        rows.append(
            f"| {name} | {len(mine)} | {percent(statistics.median(errors))} | {percent(max(errors))} | "
            f"{100 * statistics.median(shares):.0f} % |"
        )
    return "\n".join(rows)


def ranks_table(lines: list[dict]) -> str:
    """A row per model and way to divide it: the worst error over ranks and precisions."""
    rows = ["| model | divided | ranks and precisions | equal to the byte | worst |", "|---|---|---:|---:|---:|"]
    for model, way in dict.fromkeys((line["model"], line["way"]) for line in lines):
        mine = [line for line in lines if (line["model"], line["way"]) == (model, way)]
        equal = sum(line["predicted_peak_bytes"] == line["measured_peak_bytes"] for line in mine)
        worst = max((line["error"] for line in mine), key=abs)
        rows.append(f"| {model} | {way} | {len(mine)} | {equal} | {percent(worst)} |")
    return "\n".join([*rows, "", origin(lines)])


def _step(line: dict) -> tuple:
    return line["architecture"], tuple(line["shape"]), line["precision"]


def _activations(line: dict) -> int:
    return line["measured_peak_bytes"] - line["resident_bytes"]


def foreseen_times_table(lines: list[dict]) -> str:
    """A row per model: predicted and measured milliseconds in both dtypes."""
    *cases, total = lines
    dtypes = list(dict.fromkeys(line["dtype"] for line in cases))
    rows = [
        "| model | " + " | ".join(f"{d}, predicted / measured | off" for d in dtypes) + " |",
        "|---|" + "---:|---:|" * len(dtypes),
    ]
    for name in dict.fromkeys(line["case"] for line in cases):
        by = {line["dtype"]: line for line in cases if line["case"] == name}
        cells = [
            f"{by[d]['predicted_ms']:.0f} / {by[d]['measured_ms']:.0f} ms | {percent(by[d]['error'])}" for d in dtypes
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    note = f"Median {percent(total['median_error'])}, worst {percent(total['worst_error'])}. {origin(cases)}"
    return "\n".join([*rows, "", note])


def percent(value: float) -> str:
    """``0.0004 -> "0.04 %"``; exact zero is 0."""
    if 0 < abs(value) < 5e-5:
        return "under 0.01 %"
    return f"{100 * value:.2f} %" if value else "0"


def origin(lines: list[dict]) -> str:
    first = lines[0]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    return f"{first['device']}, torch {first['torch']}, transformers {first['transformers']}, commit {commits}."
