"""The generated half of docs/supported.md, from the zoo's results."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from pathlib import Path

from zoo import architectures

PAGE = Path(__file__).parents[2] / "docs" / "supported.md"
MARK = "<!-- From here on: made by `make zoo` from its results. -->"

SHOWN = {  # plans, on the page
    "all replayed": "all replayed",
    "full": "layers whole",
    "knapsack 0.5": "knapsack",
    "half": "exact at 50 %",
    "least": "exact at the least",
}
HALF = 0.5
MOST_SHOWN = 6
REASONS = {  # why an architecture was not tried, by what its error says
    "two plain steps": "Two plain steps from one state differ (it seeds generators itself)",
    "no loss": "It returns no loss",
    "producing a cache": "This version of transformers refuses every configuration of it",
    "ImportError": "Needs a package that is not installed",
    "ModuleNotFoundError": "Needs a package that is not installed",
}


def write(lines: list[dict]) -> None:
    """Write the results below the mark in docs/supported.md; the text above it is written by hand."""
    above = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(above + MARK + "\n\n" + "\n".join(page(lines)) + "\n")


def page(lines: list[dict]) -> list[str]:
    """The generated part."""
    variants: dict[tuple[str, str], dict[str, dict]] = defaultdict(dict)
    for line in lines:
        variants[line["task"], line["type"]][line["variant"]] = line
    built = {key: found for key, found in variants.items() if found.get("float32", {}).get("status") != "not built"}
    tried = [line for found in built.values() for line in found.values() if line["status"] != "not built"]
    equal = [line for line in tried if line["status"] == "equal"]
    types = {kind for _, kind in built}
    left = sum(name not in variants for name in architectures.names())
    waiting = f"; {left} classes have not been run yet" if left else ""
    first, last = (choose(lines, key=lambda line: line["date"]) for choose in (min, max))
    dates = " to ".join(dict.fromkeys((first["date"], last["date"])))
    text = [
        f"{len(types)} model types in {len(built)} classes, {len(tried)} variants tried, **{len(equal)} bitwise equal "
        f"under every plan**{waiting} (torch {last['torch']}, "
        f"transformers {last['transformers']}, {dates}). {_carried_out(equal)}",
        "",
    ]
    text += _peaks(equal)
    for task in dict.fromkeys(task for task, _ in built):
        whole = {k: found for (t, k), found in sorted(built.items()) if t == task and _all_equal(found)}
        text += [f"### {task[0].upper()}{task[1:]} ({len(whole)})", "", *_table(task, whole), ""]
    if any(_blind(task, found) for (task, _), found in built.items()):
        text += ["\\* Trained on text alone: the position of the image in the batch is not known here.", ""]
    others = [
        (kind, task, line)
        for (task, kind), found in sorted(built.items())
        for line in found.values()
        if line["status"] not in ("equal", "not built")
    ]
    text += ["## Not equal, refused or failed", ""]
    if others:
        text += ["| model type | task | variant | what happens |", "|---|---|---|---|"]
        text += [f"| `{kind}` | {task} | {line['variant']} | {_what(line)} |" for kind, task, line in others]
    else:
        text.append("None.")
    text += _not_tried(variants, built)
    return text


def _carried_out(equal: list[dict]) -> str:
    """How often each plan was carried out, and what prevented the one at half."""
    counts = Counter(name for line in equal for name in line.get("plans", ()))
    if not counts:
        return ""
    counted = ", ".join(f"{shown} {counts[name]}" for name, shown in SHOWN.items() if counts[name])
    text = f"Plans carried out: {counted}."
    without = [line for line in equal if "floor" in line]
    if without:
        proven = sum(line["floor"] > HALF for line in without)
        text += (
            f" In {len(without)} variants the tightest known budget is above 50 %, so no plan was tried at 50 %; "
            f"for {proven} of them it is proven that none exists. The ops that run at their least peak: "
            f"{_at_peak(without)}."
        )
    return text


def _at_peak(lines: list[dict]) -> str:
    """The operators that run at the least peak, most frequent first."""
    found: Counter[str] = Counter()
    for line in lines:
        op, _, when = line["in_the_way"].rpartition("(")[2].rstrip(")").partition(", ")
        found[f"`{op.removeprefix('aten.').partition('.')[0]}` {when}"] += 1
    most = found.most_common(MOST_SHOWN)
    rest = len(lines) - sum(count for _, count in most)
    return ", ".join(f"{name} {count}" for name, count in most) + (f", others {rest}" if rest else "")


def _peaks(equal: list[dict]) -> list[str]:
    """Predicted and measured peaks over all plans."""
    seen = [
        (measured / predicted - 1, name, line)
        for line in equal
        for name, (predicted, measured) in line.get("peaks", {}).items()
    ]
    if not seen:
        return []
    within = {share: sum(abs(off) <= share for off, _, _ in seen) for share in (0.0, 0.001, 0.01)}
    off, name, line = max(seen, key=lambda found: abs(found[0]))
    return [
        f"Measured peaks of {len(seen)} plans: {within[0.0]} equal the predicted peak to the byte, {within[0.001]} are "
        f"within 0.1 %, {within[0.01]} within 1 %. The worst is `{line['type']}` ({line['variant']}, "
        f"{SHOWN.get(name, name)}), off by {off:+.2%}.",
        "",
    ]


def _table(task: str, classes: dict[str, dict[str, dict]]) -> list[str]:
    """A row per class, a column per variant."""
    names = list(dict.fromkeys(name for found in classes.values() for name in found))
    rows = [f"| model type | class | {' | '.join(names)} |", "|---|---|" + "---:|" * len(names)]
    for kind, found in classes.items():
        name = next((line["class"] for line in found.values() if "class" in line), "")
        figures = [_figure(found[variant]) if variant in found else "" for variant in names]
        rows.append(f"| `{kind}`{'*' if _blind(task, found) else ''} | {name} | {' | '.join(figures)} |")
    return rows


def _figure(line: dict) -> str:
    """The fraction left at the tightest budget."""
    if line["status"] == "not built":
        return "-"
    if "least" not in line.get("plans", {}):
        return "*replayed*"
    proven = line.get("floor", 0.0) > HALF
    return f"{math.ceil(100 * line['plans']['least'])} %" + (" †" if proven else "")  # what is above half shows it


def _blind(task: str, found: dict[str, dict]) -> bool:
    """Whether an image and text model was given no image."""
    inputs = found.get("float32", {}).get("inputs", ["pixel"])
    return task == "image and text" and not any("pixel" in name or "patches" in name for name in inputs)


def _not_tried(
    variants: dict[tuple[str, str], dict[str, dict]], built: dict[tuple[str, str], dict[str, dict]]
) -> list[str]:
    """Architectures and variants that do not run without lowtide either, by reason."""
    whole: dict[str, list[str]] = defaultdict(list)
    for (task, kind), found in sorted(variants.items()):
        if (task, kind) not in built:
            whole[_why(found["float32"]["reason"])].append(f"`{kind}` ({task})")
    text = ["", f"## Not tried ({sum(map(len, whole.values()))})", ""]
    text += [f"- {why}: {', '.join(kinds)}" for why, kinds in sorted(whole.items())]
    parts: dict[str, list[str]] = defaultdict(list)
    for (_, kind), found in sorted(built.items()):
        for line in found.values():
            if line["status"] == "not built":
                parts[line["variant"]].append(f"`{kind}`")
    if parts:
        text += [
            "",
            "Variants that fail without lowtide too (a dtype that autocast mixes, layers that PEFT does not know):",
        ]
        text += ["", *(f"- {variant}: {', '.join(kinds)}" for variant, kinds in sorted(parts.items()))]
    return text


def _why(reason: str) -> str:
    """The page's words for a reason."""
    for part, why in REASONS.items():
        if part in reason:
            return why
    return "No small configuration or batch is known"


def _all_equal(found: dict[str, dict]) -> bool:
    return all(line["status"] in ("equal", "not built") for line in found.values())


def _what(line: dict) -> str:
    if line["status"] == "differs":
        plans = "; ".join(f"{plan}: {', '.join(names)}" for plan, names in line["differing"].items())
        return f"differs ({plans})"
    return f"{line['status']}: {line.get('reason', '')}".replace("|", "/")
