"""The table of ``benchmarks/host_time.py``: host time of a step by method, and from where on kernels hide it."""

from __future__ import annotations

COLUMNS = ("method", "host ms a step", "of plain", "us more an op", "activations", "launches", "waits")
_DECIDED = "lowtide, 35 %"  # the plan that adds most


def host_time_table(lines: list[dict]) -> str:
    """One table per model; below them the step time from which on a plan costs no time of its own."""
    blocks = []
    for case in dict.fromkeys(line["case"] for line in lines):
        mine = [line for line in lines if line["case"] == case]
        first = mine[0]
        plain_ms = first["host_ms"]
        rows = [
            f"**Llama, {first['layers']} layers of {first['width']}**, batch {first['batch']} x {first['sequence']}, "
            f"{first['dtype']}, {first['plain_ops']:,} ops in a plain step",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|---|" + "---:|" * (len(COLUMNS) - 1),
            *("| " + " | ".join(_cells(line, plain_ms)) + " |" for line in mine),
        ]
        blocks.append("\n".join(rows))
    blocks += [_hidden_from(lines), _origin(lines[0])]
    return "\n\n".join(blocks)


def _cells(line: dict, plain_ms: float) -> list[str]:
    low, high = line["host_ms_quartiles"]
    more = "" if line["host_ms"] == plain_ms else f"{line['more_us_per_op']:+.1f}"
    return [
        line["method"],
        f"{line['host_ms']:.1f} ({low:.1f} to {high:.1f})",
        f"{line['host_ms'] / plain_ms:.2f}",
        more,
        f"{line['activation_bytes'] / 2**20:.0f} MiB" if "activation_bytes" in line else "",
        str(line.get("launches", "")),
        str(line.get("waits", "")),
    ]


def _hidden_from(lines: list[dict]) -> str:
    told = []
    for case in dict.fromkeys(line["case"] for line in lines):
        ms = {line["method"]: line["host_ms"] for line in lines if line["case"] == case}
        told.append(f"{ms[_DECIDED]:.0f} ms for {case} (plain {ms['plain']:.0f} ms)")
    return (
        "A GPU works while the host runs ahead. So the host time of a plan is hidden behind the kernels where forward "
        f"and backward take longer on the GPU than on the host: from {' and '.join(told)} on, for the plan that "
        "recomputes most. Below that the host decides how long a step takes."
    )


def _origin(first: dict) -> str:
    return (
        "CUDA's build of PyTorch on a stand-in for a GPU, whose kernels do nothing: these are no times of a GPU. "
        "Processor time of the process, median and quartiles, methods in turns; what a GPU's driver needs for a launch "
        "is not in it. Waits: how often the host waited for the device; plain's is transformers' own. "
        f"{first['device']}, torch {first['torch']}, transformers {first['transformers']}, commit {first['commit']}, "
        f"{first['date']}."
    )
