"""The generated half of docs/supported.md, from the results of ``zoo.py``."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import zoo_models

PAGE = Path(__file__).parent.parent / "docs" / "supported.md"
MARK = "<!-- From here on: made by benchmarks/zoo.py from its results. -->"

SHOWN = {  # plans, on the page
    "all replayed": "all replayed",
    "full": "layers whole",
    "knapsack 0.5": "knapsack",
    "half": "exact at 50 %",
    "least": "exact at the least",
}
REASONS = {  # why an architecture was not tried, by what its error says
    "two plain steps": "Two plain steps from one state differ (it seeds generators itself)",
    "no loss": "It returns no loss",
    "ImportError": "Needs a package that is not installed",
    "ModuleNotFoundError": "Needs a package that is not installed",
}


def write(lines: list[dict]) -> None:
    """Put the results below the mark in docs/supported.md; what stands above is written by hand."""
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
    left = sum(specimen not in variants for specimen in zoo_models.specimens())
    waiting = f"; {left} classes have not been run yet" if left else ""
    last = max(lines, key=lambda line: line["date"])
    text = [
        f"{len(types)} model types in {len(built)} classes, {len(tried)} variants tried, **{len(equal)} bitwise equal "
        f"under every plan**{waiting} (torch {last['torch']}, "
        f"transformers {last['transformers']}, {last['date']}). {_carried_out(equal)}",
        "",
    ]
    for task in dict.fromkeys(task for task, _ in built):
        whole = sorted((k, found) for (t, k), found in built.items() if t == task and _all_equal(found))
        names = ", ".join(f"`{k}`" + ("*" if _blind(task, found) else "") for k, found in whole)
        text += [f"**{task.capitalize()}** ({len(whole)}): {names}", ""]
    if any(_blind(task, found) for (task, _), found in built.items()):
        text += ["\\* on text alone: where the model expects its image is not known here.", ""]
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
    """How often each plan was, and how low the exact ones went."""
    counts = Counter(name for line in equal for name in line.get("plans", ()))
    if not counts:
        return ""
    fractions = sorted(line["plans"]["least"] for line in equal if "least" in line.get("plans", ()))
    told = ", ".join(f"{SHOWN.get(name, name)} {count}" for name, count in counts.items())
    middle = f"; half of those leave at most {fractions[len(fractions) // 2]:.0%}" if fractions else ""
    return f"Plans carried out: {told}{middle}."


def _blind(task: str, found: dict[str, dict]) -> bool:
    """An image and text model that saw no image."""
    inputs = found.get("float32", {}).get("inputs", ["pixel"])
    return task == "image and text" and not any("pixel" in name or "patches" in name for name in inputs)


def _not_tried(
    variants: dict[tuple[str, str], dict[str, dict]], built: dict[tuple[str, str], dict[str, dict]]
) -> list[str]:
    """Architectures, and variants of the others, that do not run by themselves, by reason."""
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
    """A reason in words of the page."""
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
