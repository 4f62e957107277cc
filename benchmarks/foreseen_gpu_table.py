"""Tables of ``benchmarks/foreseen_gpu.py`` and ``operator_shares.py``: what was foreseen, and what a GPU then took."""

from __future__ import annotations

import statistics

MIB = 2**20
_FEWEST_MS = 1.0  # classes that take less are left out
# Their operators were in no profile, so no share was set by them.
NOT_PROFILED = ("llama 1b, checkpointed", "llama 7b, LoRA")
COLUMNS = ("training", "allocated", "foreseen", "reserved", "foreseen", "step, ms", "foreseen before", "after",
           "kernels, ms", "host, ms")  # fmt: skip


def foreseen_table(lines: list[dict]) -> str:
    """A row per training: peaks, and the step with the tables as they were before and after the calibration."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    for line in lines:
        took, first, now = line["measured"], line["first"], line["foreseen"]
        cells = [line["case"] + (" *" if line["case"] in NOT_PROFILED else "")]
        for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
            cells += [f"{took[name] / MIB:,.1f} MiB", _off(now[name] - took[name])]
        cells += [f"{took['step_ms']:.1f}", *(_error(told["step_ms"], took["step_ms"]) for told in (first, now))]
        cells += [f"{now[name]:.1f}" for name in ("busy_ms", "host_ms")]
        rows.append("| " + " | ".join(cells) + " |")
    before, after = (
        [abs(line[name]["step_ms"] / line["measured"]["step_ms"] - 1) for line in lines]
        for name in ("first", "foreseen")
    )
    gpu, first, now = lines[0]["measured"], lines[0]["first"], lines[0]["foreseen"]
    return "\n".join([
        *rows, "",
        f"Steps, before: median {_percent(statistics.median(before))}, worst {_percent(max(before))}. After: median "
        f"{_percent(statistics.median(after))}, worst {_percent(max(after))}. *: no share was set by it.",
        "",
        f"{gpu['device']}, torch {gpu['torch']}, transformers {gpu['transformers']}. Foreseen with torch "
        f"{now['torch']}, tables of commit {first['commit']} before and {now['commit']} after, {lines[0]['date']}.",
    ])  # fmt: skip


def shares_table(lines: list[dict]) -> str:
    """A row per class: the share of the data sheet's rate that it reached, and what the table said and says."""
    rows = ["| class | took, ms | share reached | foreseen before, ms | after |", "|---|---:|---:|---:|---:|"]
    for line in lines:
        if "class" in line and line["measured_ms"] >= _FEWEST_MS:
            share = line["at_peak_ms"] / line["measured_ms"]
            told = f"{line['before_ms']:.1f} | {line['foreseen_ms']:.1f}"
            rows.append(f"| {line['class']} | {line['measured_ms']:.1f} | {share:.2f} | {told} |")
    held_out = [line for line in lines if "held_out" in line]
    told = "; ".join(
        f"{line['held_out']} {_error(line['told_ms'], line['measured_ms'])} "
        f"({_error(line['before_ms'], line['measured_ms'])})"
        for line in held_out
    )
    return "\n".join([
        *rows, "",
        f"Each case's kernels with every class as much faster or slower than before as it was in the other "
        f"{len(held_out) - 1} cases, and in parentheses as before: {told}.",
    ])  # fmt: skip


def _off(count: int) -> str:
    return "equal" if not count else f"{count:+,} B" if abs(count) < MIB else f"{count / MIB:+.1f} MiB"


def _error(told: float, took: float) -> str:
    return f"{100 * (told / took - 1):+.1f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
