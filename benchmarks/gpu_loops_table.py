"""The tables of ``benchmarks/gpu_loops.py``: training loops with fit, and compiled layers, on a GPU."""

from __future__ import annotations

GIB, MIB = 2**30, 2**20


def fit_table(lines: list[dict]) -> str:
    """One table per model: peak beside budget, time beside plain, and whether losses and weights have plain's bits."""
    blocks = []
    for part in ("fit", "fit, deterministic"):
        mine = [line for line in lines if line["part"] == part]
        plain = mine[0]
        rows = [
            f"**{plain['case']}**{', deterministic kernels' if part != 'fit' else ''}; a plain step takes "
            f"{plain['step_ms']:.0f} ms",
            "",
            "| method | peak | predicted | step | predicted | host | without a plan | losses, weights |",
            "|---|---:|---:|---:|---:|---:|---:|---|",
        ]
        rows += ["| " + " | ".join(_fitted(line, plain, part)) + " |" for line in mine]
        blocks.append("\n".join(rows))
    return "\n\n".join([*blocks, _origin(lines)])


def _fitted(line: dict, plain: dict, part: str) -> list[str]:
    def ratio(name: str) -> str:
        return f"{line[name] / plain['step_ms']:.2f}" if name in line else ""

    equal = line["losses_equal"] and line["weights_equal"]
    return [
        line["method"],
        f"{line['peak_bytes'] / GIB:.2f} GiB",
        f"{line['predicted_peak_bytes'] / GIB:.2f} GiB" if "predicted_peak_bytes" in line else "",
        ratio("step_ms"),
        f"{1 + line['predicted_overhead']:.2f}" if "predicted_overhead" in line else "",
        f"{line['host_ms'] / plain['step_ms']:.2f}",
        ratio("without_a_plan_ms"),
        "" if part == "fit" else "equal" if equal else "DIFFERENT",
    ]


def compiled_gpu_table(lines: list[dict]) -> str:
    """PyTorch's options and lowtide at their peaks."""
    mine = [line for line in lines if line["part"] == "compiled"]
    plain = mine[0]
    rows = [
        f"**{plain['case']}**, compiled layer by layer; compiled alone {plain['step_ms']:.1f} ms",
        "",
        "| method | activations | predicted | step | predicted | loss, gradients |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for line in mine:
        predicted = line.get("predicted_activation_bytes")
        cells = [
            line["method"],
            f"{line['activation_bytes'] / MIB:,.0f} MiB",
            "" if predicted is None else f"{predicted / MIB:,.0f} MiB",
            f"{line['step_ms'] / plain['step_ms']:.3f}",
            "" if predicted is None else f"{1 + line['predicted_overhead']:.3f}",
            "equal" if line["bits_equal"] else "other bits",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([*rows, "", _origin(mine)])


def _origin(lines: list[dict]) -> str:
    first = lines[0]
    told = " Written down from what the script's first form printed." if first.get("note") else ""
    return (
        f"{first['gpu']}, torch {first['torch']}, transformers {first['transformers']}, commit {first['commit']}, "
        f"{first['date']}. Medians, by events; the host's time has its waits for the device in it.{told}"
    )
