"""docs/doctor.md's tables: what the doctor says of reproductions of its checks, and of models as they are."""

from __future__ import annotations

from collections import defaultdict


def zoo_table(lines: list[dict]) -> str:
    """One row per code that spoke, over ``doctor_zoo.py``'s set-ups."""
    spoke: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for line in lines:
        for code, told in line["findings"].items():
            spoke[code, told.partition(":")[0]].append(line)
    silent = sum(not line["findings"] and not line["notes"] for line in lines)
    kinds = len({(line["task"], line["type"]) for line in lines})
    checkpointed = sum(line["checkpointed"] for line in lines)
    seconds = sorted(line["cpu_s"] for line in lines)
    rows = [
        f"{kinds} architectures of transformers {lines[0]['transformers']}, {checkpointed} of them checkpointed too: "
        f"the doctor reports nothing on {silent} of {len(lines)} set-ups. A diagnosis takes "
        f"{seconds[len(seconds) // 2]:.1f} s of one core, {seconds[-1]:.1f} s at most.",
        "",
        "| code | severity | set-ups | architectures |",
        "|---|---|---:|---|",
    ]
    for (code, severity), found in sorted(spoke.items()):
        names = ", ".join(dict.fromkeys(line["type"] for line in found))
        rows.append(f"| {code} | {severity} | {len(found)} | {names} |")
    return "\n".join(rows)


def examples_table(lines: list[dict]) -> str:
    """A sentence on ``doctor_examples.py``."""
    told = [f"{line['example']}: {', '.join(line['findings'])}" for line in lines if line["findings"]]
    others = [line["example"] for line in lines if not line["findings"] and not line["notes"]]
    return f"Of `examples/`, {', '.join(others)} have no finding" + (f"; {'; '.join(told)}." if told else ".")


def bugs_table(lines: list[dict]) -> str:
    """One row per reproduction of ``doctor_bugs.py``; then what a whole look takes."""
    cases = [line for line in lines if "code" in line]
    if silent := [line["case"] for line in cases if not (line["found"] and line["mended_is_silent"])]:
        raise SystemExit(f"no longer shown, or reported after the fix too: {', '.join(silent)}.")
    rows = ["| code | shown in | what it says |", "|---|---|---|"]
    for line in sorted(cases, key=lambda line: line["case"]):
        evidence = line["evidence"].replace("|", "/").replace("\n", " ")
        rows.append(f"| {line['case']} | {line['library']} {line['version']} | {evidence} |")
    (whole,) = (line for line in lines if "checks" in line)
    return "\n".join([
        *rows, "",
        f"{len(cases)} set-ups. With the fix in place each has no finding. All {whole['checks']} checks take "
        f"{whole['seconds']:.1f} s of one core on {whole['case']}. {whole['device']}, python {whole['python']}, commit "
        f"{whole['commit']}.",
    ])  # fmt: skip
