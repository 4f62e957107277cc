"""The list in ``docs/limits.md``: what each entry point costs, every number from a committed result."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

from foresight_table import percent

RESULTS = Path(__file__).parent / "results"


def costs_table(_: list[dict]) -> str:
    """An item per entry point: what it costs, and the page that has the whole measurement."""
    items = [wrapped(f"- {call}: {cost()} ([measured]({page})).") for call, cost, page in ROWS]
    devices = sorted({f"{line['device']}, torch {line['torch']}" for name in SOURCES for line in _lines(name)})
    return "\n".join([*items, "", wrapped(f"One thread each: {'; '.join(devices)}.", indent="")])


def wrapped(text: str, indent: str = "  ") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def _fit_with_batch() -> str:
    lines = [line for line in _lines("decoder_cpu") if line["malloc"] == "default"]
    plain = next(line for line in lines if line["method"] == "none")
    solved = max(line["solve_s"] for line in lines if line["case"] == plain["case"] and line.get("solve_s"))
    return (
        f"before training, for a decoder whose plain step takes {plain['time_ms'] / 1e3:.1f} s, "
        f"{plain['trace_s']:.1f} s to trace, {plain['measure_s']:.1f} s to time ops, at most {solved:.1f} s to solve"
    )


def _first_steps() -> str:
    ratios = [line["step_cpu_ratio_by_phase"] for line in _lines("real_steps_cpu")]
    found = (f"{_span([r[phase] for r in ratios])} plain ones" for phase in ("first", "planning"))
    return "the first step takes as long as {}, each further step before a plan as {}".format(*found)


def _planned_steps() -> str:
    lines = _lines("real_steps_cpu")
    ratios = [line["step_cpu_ratio_by_phase"]["planned"] for line in lines]
    peak = max(line["largest_peak_share"] for line in lines)
    return (
        f"recomputation included, a planned step takes {_span(ratios, 2)} of a plain one's time at "
        f"{100 * lines[0]['fraction']:.0f} % of the activations; the largest peak of all steps was "
        f"{100 * peak:.1f} % of its budget"
    )


def _replays() -> str:
    lines = _lines("overhead_cpu")
    us = [x["forward_us"] + x["backward_us"] for x in lines if x["method"] == "lowtide, all replayed"]
    kept = [x for x in lines if x["method"] == "fit, keeps everything"]
    shortest = min(kept, key=lambda x: x["plain_us"])
    return (
        f"{_span(us)} us for each op that runs again, beyond the op; a plan that drops nothing costs at most "
        f"{100 * max(x['step_ratio'] for x in kept) - 100:.0f} % (in steps of {shortest['plain_us'] / 1e3:.1f} ms)"
    )


def _compile() -> str:
    lines = [line for line in _lines("compiled_cpu") if "first_step_s" in line]
    alone = next(line["first_step_s"] for line in lines if line["method"] == "compile alone")
    ours = {line["first_step_s"] for line in lines if line["method"].startswith("lowtide")}
    alone_s = f"that of `torch.compile` alone {alone:.0f} s with none"
    return f"the first step takes {_span(sorted(ours))} s with kernels in the cache, {alone_s}"


def _checkpoint() -> str:
    found = {line["method"]: line["time_ratio"] for line in _lines("checkpoint_calls_cpu")}
    ours, theirs = (100 * found[name] - 100 for name in ("lowtide.checkpoint", "torch.utils.checkpoint"))
    return f"{ours:.0f} % of a step's time with every layer checkpointed; `torch.utils.checkpoint` costs {theirs:.0f} %"


def _callbacks() -> str:
    lines = [line for line in _lines("integrations_cpu") if "wall_ratio" in line]
    extra = " and ".join(f"{100 * line['cpu_ratio'] - 100:.0f} %" for line in lines)
    plans = " and ".join(f"{100 * line['predicted_extra_share']:.0f} %" for line in lines)
    return f"as `fit` without a batch: {extra} of two TRL runs' time, of which the plans' recomputation is {plans}"


def _offload() -> str:
    found = {(line["way"], line["budget"]): line.get("elapsed_ratio") for line in _lines("offload_cpu")}
    pairs = [
        f"{ratio:.2f} at {budget.replace('%', ' %')} (recomputing: {found['recompute', budget]:.2f})"
        for (way, budget), ratio in found.items()
        if way == "disk" and ratio and found.get(("recompute", budget))
    ]
    return f"a step that moves tensors to disk takes, of the plain step's time, {', '.join(pairs)}"


def _plan() -> str:
    lines = _lines("hollow_large_cpu")
    models = " and ".join(dict.fromkeys(line["model"] for line in lines))
    most = max(line["process_peak_bytes"] for line in lines) / 2**30
    errors = [abs(line["error"]) for line in _lines("foresight_cpu") if "error" in line]
    return (
        f"{_span([line['process_s'] for line in lines])} s and at most {most:.1f} GiB for {models}; on a CPU, "
        f"predicted peaks were off by {percent(max(errors))} at most"
    )


def _advise() -> str:
    return f"{_span([line['cpu_s'] for line in _lines('advice')])} s of one core for the five questions of its page"


def _doctor() -> str:
    seconds = sorted(line["cpu_s"] for line in _lines("doctor_zoo_cpu"))
    median, most = seconds[len(seconds) // 2], seconds[-1]
    return f"{median:.1f} s of one core at the median of {len(seconds)} set-ups, {most:.1f} s at most"


def _span(values: list[float], digits: int = 0) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


ROWS: tuple[tuple[str, Callable[[], str], str], ...] = (
    ("`fit(model, batch)`", _fit_with_batch, "how-to/fit-a-budget.md"),
    ("`fit(model)`, before the plan", _first_steps, "how-to/watch-real-steps.md"),
    ("`fit`, under the plan", _planned_steps, "how-to/watch-real-steps.md"),
    ("`apply` and `fit`, each op", _replays, "benchmarks.md"),
    ("`offload=`", _offload, "offload.md"),
    ("callbacks", _callbacks, "integrations.md"),
    ("`compile`", _compile, "compiled.md"),
    ("`checkpoint`", _checkpoint, "how-to/checkpoint-by-hand.md"),
    ("`lowtide plan`", _plan, "foresight.md"),
    ("`lowtide advise`", _advise, "how-to/will-it-fit.md"),
    ("`lowtide doctor`", _doctor, "doctor.md"),
)
SOURCES = (
    "decoder_cpu", "real_steps_cpu", "overhead_cpu", "offload_cpu", "integrations_cpu", "compiled_cpu",
    "checkpoint_calls_cpu", "hollow_large_cpu", "foresight_cpu", "advice", "doctor_zoo_cpu",
)  # fmt: skip
