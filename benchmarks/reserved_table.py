"""The table of what trainings were foreseen to reserve, beside what CUDA's allocator reserved."""

from __future__ import annotations

from collections import Counter

MIB = 2**20


def reserved_table(lines: list[dict]) -> str:
    """A row per precision and kind of segments; then, in one line each, by how much the others are off."""
    (found,) = lines
    compared = [line for line in found["lines"] if "error" not in line]
    rows = [
        "| variant | segments | trainings | exact | under a plan | exact | lowest | highest |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for variant, segments in dict.fromkeys((line["variant"], line["segments"]) for line in compared):
        mine = [x for x in compared if (x["variant"], x["segments"]) == (variant, segments)]
        plain, planned = ([x for x in mine if (x["plan"] == "none") is wanted] for wanted in (True, False))
        exact = [sum(off_bytes(x) == 0 for x in some) for some in (plain, planned)]
        off = [off_bytes(x) for x in mine]
        rows.append(
            f"| {variant} | {segments} | {len(plain)} | {exact[0]} | {len(planned)} | {exact[1]} "
            f"| {_mib(min(off))} | {_mib(max(off))} |"
        )
    exact = sum(off_bytes(line) == 0 for line in compared)
    low = sum(off_bytes(line) < -2 * MIB for line in compared)
    kinds = len({line["architecture"] for line in compared})
    commits = ", ".join(dict.fromkeys(line["commit"] for line in found["lines"]))
    note = (
        f"{kinds} architectures, {len(compared)} trainings, {exact} of them ({100 * exact / len(compared):.1f} %) "
        f"exact, {low} more than 2 MiB low. {found['device']}, traced for {found['target']}; torch {found['torch']}, "
        f"transformers {found['transformers']}, commit {commits}."
    )
    by_kind: dict[str, list[dict]] = {}
    for line in compared:
        if off_bytes(line):
            by_kind.setdefault(line["architecture"], []).append(line)
    named = ["| off | trainings | by how much |", "|---|---:|---|"]
    for kind, some in by_kind.items():
        counts = Counter(_mib(off_bytes(line)) for line in some)
        named.append(f"| {kind} | {len(some)} | {', '.join(f'{n} x {off}' for off, n in counts.items())} |")
    errors = [line for line in found["lines"] if "error" in line]
    named += [f"| {x['architecture']}, {x['variant']} | - | {x['error']} |" for x in errors]
    return "\n".join([*rows, "", note, *(["", *named] if len(named) > 2 else [])])


def off_bytes(line: dict) -> int:
    """Positive where more was foreseen than was reserved."""
    return line["foreseen_reserved_bytes"] - line["reserved_bytes"]


def _mib(size: int) -> str:
    return f"{size / MIB:+.0f} MiB" if size else "0"
