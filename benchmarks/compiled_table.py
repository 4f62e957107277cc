"""Tables of ``compiled.py``, ``compiled_cuda.py`` and ``compiled_full_size.py``: PyTorch's options, then lowtide."""

from __future__ import annotations

MIB = 2**20
COLUMNS = ("method", "activations", "of plain", "predicted", "time", "predicted", "first step, plan", "gradients")
NOBODY = (
    "The whole benchmark has not been run yet. `make compiled` runs it, in an hour, and writes\n"
    "`compiled_cpu.jsonl` into `benchmarks/results`; `python benchmarks/table.py` then puts the table here."
)


def compiled_table(lines: list[dict]) -> str:
    """A row per method, in the order run; a sentence where there are no results."""
    if not lines:
        return NOBODY
    rows = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 2) + "---|"]
    rows += ["| " + " | ".join([line["method"], *_cells(line)]) + " |" for line in lines]
    first = lines[0]
    rows += [
        "",
        f'{first["case"][0].upper()}{first["case"][1:]}. Models are compiled layer by layer; "whole graph" rows '
        "compile the model as one graph. Times are process CPU time, relative to compile alone by layer: medians of "
        f"{_each(lines, 'rounds')} interleaved rounds ± half the quartile range, with freed memory kept in the "
        "process. Peaks are the allocator's. Gradients are compared with compile alone, those of a whole graph with "
        "compile alone of the whole graph. The predicted time is that of the compiled part, relative to its own plain "
        "code. The first step begins with an empty cache of compiled code; lowtide's plans share one cache. "
        f"{first['device']}, {first['threads']} thread, torch {first['torch']}, transformers {first['transformers']}, "
        f"commit {_each(lines, 'commit')}.",
    ]
    return "\n".join(rows)


def _each(lines: list[dict], key: str) -> str:
    """What lines have there: more than one thing where several runs filled the table."""
    return " or ".join(dict.fromkeys(str(line[key]) for line in lines))


CUDA_COLUMNS = ("method", "activations", "of plain", "predicted", "off", "launches", "variants")
HOW = {"layers": "by layer", "whole": "as one graph"}


def compiled_cuda_table(lines: list[dict]) -> str:
    """A table for each case, and where it was counted; a sentence where there are no results."""
    if not lines:
        return (
            "Not counted yet: `.venv-cuda/bin/python benchmarks/compiled_cuda.py` runs PyTorch's options and\n"
            "lowtide's plans on PyTorch's CUDA build. What holds there today is in `tests/cuda/test_compiled.py`."
        )
    rows: list[str] = []
    for dtype, how in dict.fromkeys((line["dtype"], line["how"]) for line in lines):
        rows += ["", f"**{dtype}, {HOW[how]}**", ""] if rows else [f"**{dtype}, {HOW[how]}**", ""]
        rows += ["| " + " | ".join(CUDA_COLUMNS) + " |", "|---|" + "---:|" * (len(CUDA_COLUMNS) - 2) + "---|"]
        case = [line for line in lines if (line["dtype"], line["how"]) == (dtype, how)]
        rows += ["| " + " | ".join([line["method"], *_cuda_cells(line)]) + " |" for line in case]
    first = lines[0]
    where = (
        "Counted on a stand-in for a GPU: peaks are those of PyTorch's caching allocator, and kernels do nothing, so "
        "there are no times. lowtide chooses by the times of an H100 in its table"
        if first["stand_in"]
        else "On a GPU"
    )
    rows += [
        "",
        f"{first['case'][0].upper()}{first['case'][1:]}. {where}. lowtide's budgets are the peaks of PyTorch's "
        f"options. torch {first['torch']}, transformers {first['transformers']}, commit {first['commit']}.",
    ]
    return "\n".join(rows)


def _cuda_cells(line: dict) -> list[str]:
    launches = f"{line['launches']:,}" if "launches" in line else ""
    if line["status"] == "infeasible":
        more = line["activation_bytes"] - line["budget_bytes"]
        return [f"infeasible, least {line['activation_bytes'] / MIB:.1f} MiB: {more:,} B more", "", "", "", "", ""]
    cells = [f"{line['activation_bytes'] / MIB:.1f} MiB", f"{line['fraction']:.3f}"]
    if "predicted_activation_bytes" not in line:
        return [*cells, "", "", launches, ""]
    off = line["activation_bytes"] - line["predicted_activation_bytes"]
    variants = ", ".join(f"{count} x {name}" for name, count in line["variants"].items())
    return [*cells, f"{line['predicted_activation_bytes'] / MIB:.1f} MiB", f"{off:+,} B", launches, variants]


def _cells(line: dict) -> list[str]:
    seconds = f"{line['planning_s']:.0f} s" if "planning_s" in line else f"{line['first_step_s']:.0f} s"
    if line["status"] == "infeasible":
        return [f"infeasible, least {line['least_bytes'] / MIB:.1f} MiB", "", "", "", "", seconds, ""]
    quartiles = line["time_ratio_quartiles"]
    ours = "predicted_activation_bytes" in line
    return [
        f"{line['activation_bytes'] / MIB:.1f} MiB",
        f"{line['fraction']:.3f}",
        f"{line['predicted_activation_bytes'] / MIB:.1f} MiB" if ours else "",
        f"{100 * (line['time_ratio'] - 1):+.1f} % ± {50 * (quartiles[1] - quartiles[0]):.1f}",
        f"{100 * line['predicted_overhead']:+.1f} %" if ours else "",
        seconds,
        "equal" if line["bitwise_equal"] else "**differ**",
    ]


FULL_SIZE_COLUMNS = ("method", "peak", "above prediction", "step", "launches")


def compiled_full_size_table(lines: list[dict]) -> str:
    """PyTorch's options, and under each peak of theirs lowtide's plan for it."""
    by_method = {line["method"]: line for line in lines}
    rows = ["| " + " | ".join(FULL_SIZE_COLUMNS) + " |", "|---|" + "---:|" * (len(FULL_SIZE_COLUMNS) - 1)]
    for method, line in by_method.items():
        if not method.startswith("lowtide"):
            found = [line, *(by_method[name] for name in [f"lowtide, peak of {method}"] if name in by_method)]
            rows += ["| " + " | ".join([one["method"], *_full_size_cells(one)]) + " |" for one in found]
    first = lines[0]
    ours, theirs = (
        max(line["first_peaks_bytes"][0] for line in lines if line["method"].startswith(name)) / 2**30
        for name in ("lowtide", "full checkpointing")
    )
    rows += [
        "",
        f"The first step, before there is a plan or a state of AdamW, takes {ours:.2f} GiB; that of full checkpointing "
        f"takes {theirs:.2f}.",
        "",
        f"Peaks are PyTorch's own allocator's in a step after others, with weights, gradients and AdamW's state. Steps "
        f"have the times of a table (within {100 * first['error_fraction']:.0f} %): beside each other they say more "
        f"than alone. torch {first['torch']}, transformers {first['transformers']}, commits "
        f"{', '.join(dict.fromkeys(line['commit'] for line in lines))}.",
    ]
    return "\n".join(rows)


def _full_size_cells(line: dict) -> list[str]:
    if line["peak_bytes"] is None:
        return [line["error"], "", "", ""]
    off = line["peak_bytes"] - line["predicted_peak_bytes"] if "predicted_peak_bytes" in line else None
    predicted = "" if off is None else f"{off:+,} B"
    return [f"{line['peak_bytes'] / 2**30:.2f} GiB", predicted, f"{line['step_ms']:.0f} ms", f"{line['launches']:,}"]
