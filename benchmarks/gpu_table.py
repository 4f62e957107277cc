"""The table of ``benchmarks/gpu.py``: peaks beside their predictions, times, and whether bits were equal."""

from __future__ import annotations

MIB = 2**20
COLUMNS = ("method", "allocated", "predicted", "reserved", "predicted", "step time", "predicted", "losses, weights")
SHOWN = {
    "plain": "plain",
    "lowtide, 50 %": "**lowtide**, half the activations",
    "lowtide, 25 %": "**lowtide**, a quarter",
    "torch checkpoint, every layer": "checkpoint every layer",
    "lowtide, at the peak of every layer": "**lowtide**, as small as that",
}


def gpu_table(lines: list[dict]) -> str:
    """One table per model, its methods in the order run."""
    blocks = []
    for case, standin in dict.fromkeys((line["case"], _is_stand_in(line)) for line in lines):
        mine = [line for line in lines if (line["case"], _is_stand_in(line)) == (case, standin)]
        first = mine[0]
        plain_ms = next(
            (
                f", plain step {m['time_ms']:.0f} ms"
                for m in mine
                if m["method"] == "plain" and "time_ms" in m and not standin
            ),
            ", on a stand-in for a GPU, whose times say nothing" if standin else "",
        )
        rows = [
            f"**{case}**, {first['layers']} layers of {first['width']}, batch {first['batch']} x {first['sequence']}, "
            f"{first['dtype']}{plain_ms}",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|---|" + "---:|" * (len(COLUMNS) - 2) + "---|",
        ]
        rows += ["| " + " | ".join(_cells(line)) + " |" for line in mine]
        blocks.append("\n".join(rows))
    first = lines[0]
    told = [("driver", first["driver"]), ("runtime", first["runtime"]), ("torch", first["torch"])]
    versions = ", ".join(f"{name} {version}" for name, version in told if version)
    blocks.append(
        f"{first['device']}, {versions}, commit {first['commit']}, {first['date']}. Peaks are the allocator's own, of "
        "a few steps from the same weights; times are of forward and backward, in turns, by events."
    )
    return "\n\n".join(blocks)


def gpu_summary(lines: list[dict]) -> str:
    """README's table: five methods on the first model."""
    by = {line["method"]: line for line in lines if line["case"] == lines[0]["case"]}
    plain = by["plain"]
    rows = ["| method | peak memory | predicted | step time | predicted |", "|---|---:|---:|---:|---:|"]
    for method, name in SHOWN.items():
        line = by[method]
        peaks = f"{_gib(line['peak_bytes'])} | {_gib(line.get('predicted_peak_bytes'))}"
        time = f"{line['time_ms']:.0f} ms" if method == "plain" else _percent(line["overhead"])
        rows.append(f"| {name} | {peaks} | {time} | {_percent(line.get('predicted_overhead'))} |")
    all_equal = all(line["losses_equal"] and line["weights_equal"] for line in by.values())
    exact = all(line["peak_bytes"] == line.get("predicted_peak_bytes", line["peak_bytes"]) for line in by.values())
    kept = "all weights keep" if all_equal else "NOT all weights keep"
    told = "to the byte" if exact else "but NOT to the byte"
    rows += [
        "",
        f"{plain['device']}, decoder of {plain['layers']} layers of {plain['width']}, batch {plain['batch']} x "
        f"{plain['sequence']}, {plain['dtype']}. With deterministic kernels {kept} plain's bits; peaks are as "
        f"predicted {told} "
        "([all methods, and what went less well](docs/gpu.md)). On CPUs: [benchmarks](docs/benchmarks.md).",
    ]
    return "\n".join(rows)


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f} GiB"


def _cells(line: dict) -> list[str]:
    if line["status"] != "ok":
        least = f": the least is {_mib(line['least_bytes'])}" if "least_bytes" in line else ""
        return [line["method"], line["status"] + least, *[""] * (len(COLUMNS) - 2)]
    equal = line["losses_equal"] and line["weights_equal"]
    return [
        line["method"],
        _mib(line["peak_bytes"]),
        _mib(line.get("predicted_peak_bytes")),
        _mib(line["reserved_bytes"]),
        _mib(line.get("predicted_reserved_bytes")),
        "" if _is_stand_in(line) else _percent(line.get("overhead")),
        _percent(line.get("predicted_overhead")),
        "equal" if equal else "DIFFERENT",
    ]


def _is_stand_in(line: dict) -> bool:
    """Of the tests' accelerator or the CUDA stand-in: its times are never shown."""
    return bool(line.get("standin"))


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / MIB:.1f} MiB"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %"
