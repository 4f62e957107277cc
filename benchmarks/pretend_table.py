"""docs/pretend.md's tables: the cases of ``pretend_cases`` beside what became of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from pretend_cases import CASES, SOURCES, Case

GIB = 2**30


def summary(lines: list[dict]) -> str:
    """How many there are, and how many ran."""
    ran = [line for line in lines if line["steps"] or line["out_of_memory"]]
    full = [line for line in lines if line["verdict"] == "does not fit"]
    scripts = {(case.source, case.name.split(",")[0]) for case, _ in _matched(lines)}
    seconds = sorted(line["seconds"] for line in ran)
    host = max(line["host_peak_bytes"] for line in ran)
    trained = f"{len(lines)} runs of {len(scripts)} scripts: {len(ran) - len(full)} trained"
    trained += f", {len(full)} did not fit on the device they were given" if full else ""
    trained += f", {len(lines) - len(ran)} failed, for the reason in the row" if len(lines) > len(ran) else ""
    return (
        f"{trained}. A run took {seconds[len(seconds) // 2]:.0f} s in the median and {seconds[-1]:.0f} s at most, on "
        f"two processor cores that others used too, and no more than {host / GIB:.1f} GiB of host memory in its "
        "largest process."
    )


def runs(lines: list[dict]) -> str:
    """A table per source."""
    return "\n\n".join(_sections(lines))


def not_run(lines: list[dict]) -> str:
    """What has a reason, and what has no result yet."""
    known = {line["name"] for line in lines}
    table = ["| script | why |", "|---|---|"]
    for case in CASES:
        if case.name not in known:
            table.append(f"| {_link(case)} {case.name} | {case.why_not or 'has not been run yet'} |")
    return "\n".join(table)


def commands(lines: list[dict]) -> str:
    """Each as it was typed."""
    typed = [_typed(case) for case, _ in _matched(lines)]
    versions = ", ".join(f"{name} {version}" for name, version in lines[-1]["versions"].items())
    return "\n".join(["```text", *typed, "```", "", f"Of these versions: {versions}."])


def _typed(case: Case) -> str:
    words = shlex.split(case.command)
    count = next(n for n, word in enumerate(words) if "=" not in word or not word.split("=")[0].isupper())
    before = " ".join([*words[:count], "lowtide pretend"])
    options = f" {case.options}" if case.options else ""
    return f"{before} --device {case.device}{options} -- {shlex.join(words[count:])}"


def _matched(lines: list[dict]) -> list[tuple[Case, dict]]:
    """Raises: SystemExit: a result without a case."""
    known = {line["name"]: line for line in lines}
    if unknown := sorted(known.keys() - {case.name for case in CASES if case.command}):
        raise SystemExit(f"no case is called {', '.join(unknown[:3])}. Remove its result.")
    return [(case, known[case.name]) for case in CASES if case.name in known]


def _sections(lines: list[dict]) -> Iterator[str]:
    found = _matched(lines)
    for source in dict.fromkeys(case.source for case, _ in found):
        members = [(case, line) for case, line in found if case.source == source]
        table = [
            "| script | device | allocated / reserved, GiB | kernels a step | seconds | host, GiB |",
            "|---|---|---:|---:|---:|---:|",
        ]
        table += [_row(case, line) for case, line in members]
        yield "\n".join([f"{_link(members[0][0])}:", "", *table])


def _row(case: Case, line: dict) -> str:
    device = line["device"] + (f", rank {line['rank']} of {line['ranks']}" if line["ranks"] > 1 else "")
    launches = f"{line['steps'][-1]['launches']:,}" if line["steps"] else ""
    took = f"{line['seconds']:.0f}" + (f" ({line['compile_s']:.0f} compiling)" if line["compile_s"] else "")
    remark = f". {case.remark[:1].upper()}{case.remark[1:]}" if case.remark else ""
    return (
        f"| **{case.name}**: {case.does}{remark} | {device} | {_result(line)} | {launches} | {took} | "
        f"{line['host_peak_bytes'] / GIB:.1f} |"
    )


def _result(line: dict) -> str:
    peaks = f"{line['peak_allocated_bytes'] / GIB:.2f} / {line['peak_reserved_bytes'] / GIB:.2f}"
    memory = line["out_of_memory"]
    if line["verdict"] == "does not fit":
        where = memory.get("script_line") or memory["line"]
        return (
            f"**out of memory** in step {memory['step']} at `{where}`: {memory['asked_bytes'] / GIB:.2f} asked for, "
            f"{memory['allocated_bytes'] / GIB:.2f} allocated"
        )
    return peaks if line["verdict"].startswith("fits") else f"{line['verdict']}"


def _link(case: Case) -> str:
    source = SOURCES[case.source]
    if source.package:
        name, _, version = source.package.partition("==")
        return f"[{case.source} {version}](https://pypi.org/project/{name}/{version}/)"
    at = f"/tree/{source.commit[:12]}" if source.commit else ""
    return f"[{source.repository}](https://github.com/{source.repository}{at})"
