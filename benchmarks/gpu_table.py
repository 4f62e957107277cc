"""The table of ``benchmarks/gpu.py``: peaks beside their predictions, times, and whether bits were equal."""

from __future__ import annotations

MIB = 2**20
COLUMNS = ("method", "allocated", "predicted", "reserved", "predicted", "step time", "predicted", "losses, weights")
NOBODY = (
    "Nobody has measured lowtide on a GPU yet. `make gpu` does, in under eight minutes, and writes\n"
    "`gpu.jsonl` into `benchmarks/results`; `python benchmarks/table.py` then puts the table here. Please open an\n"
    "issue with the file, whatever it says. `python benchmarks/gpu.py --device standin` runs the same code on the\n"
    "tests' stand-in for a device, which says nothing about speed."
)


def gpu_table(lines: list[dict]) -> str:
    """One table per model, its methods in the order run; a sentence where there are no results."""
    if not lines:
        return NOBODY
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
