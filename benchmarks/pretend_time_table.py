"""Tables of published training rates beside what ``lowtide pretend`` says of the same scripts."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

from pretend_time_rows import TimeRow, rows
from published_table import source_name

from lowtide.estimation.device_table import device_named
from lowtide.pretending.outcome_text import time_text
from lowtide.pretending.step_time import StepTime, stated_error

# What differs, and two rows by what their keys hold; published and predicted ratios of the first to the second.
COMPARISONS = (
    ("torch.compile, torchtitan on 8", "selective op, compile on 8 x h100", "selective op on 8 x h100"),
    ("torch.compile, torchtitan on 128", "selective op, compile on 128 x h100", "selective op on 128 x h100"),
    ("torch.compile, torchtune", "Llama 3.2 3B, 2 x 4096, bf16, compile", "Llama 3.2 3B, 2 x 4096, bf16 on"),
    ("128 ranks for 8, torchtitan", "selective op on 128 x h100", "selective op on 8 x h100"),
    ("128 ranks for 8, compiled", "selective op, compile on 128 x h100", "selective op, compile on 8 x h100"),
    ("64 ranks for 8, MPT 13b", "MPT 13b, FSDP, 1 x 2 x 2048, bf16, reduced in fp32 on 64 x h100",
     "MPT 13b, FSDP, 1 x 2 x 2048, bf16, reduced in fp32 on 8 x h100"),
    ("checkpointing, BERT", "BERT-large, 4 x 1 x 512, fp32, checkpointing", "BERT-large, 4 x 1 x 512, fp32 on"),
    ("four small batches for one, BERT", "BERT-large, 4 x 1 x 512, fp32 on", "BERT-large, 1 x 4 x 512, fp32 on"),
    ("H100 for A100, MPT 7b", "MPT 7b, FSDP, 1 x 6 x 2048, bf16, reduced in fp32 on 8 x h100",
     "MPT 7b, FSDP, 2 x 6 x 2048, bf16, reduced in fp32 on 8 x a100-80gb"),
    ("H100 for A100, MPT 7b of 4,096", "MPT 7b, FSDP, 2 x 16 x 4096, bf16, reduced in fp32, checkpointing on 8 x h100",
     "MPT 7b, FSDP, 2 x 16 x 4096, bf16, reduced in fp32, checkpointing on 8 x a100-80gb"),
    ("H100 for A100, MPT 13b of 4,096",
     "MPT 13b, FSDP, 3 x 10 x 4096, bf16, reduced in fp32, checkpointing on 8 x h100",
     "MPT 13b, FSDP, 3 x 10 x 4096, bf16, reduced in fp32, checkpointing on 8 x a100-80gb"),
    ("H100 for A100, MPT 1b of 512", "MPT 1b, FSDP, 4 x 56 x 512, bf16, reduced in fp32 on 8 x h100",
     "MPT 1b, FSDP, 4 x 56 x 512, bf16, reduced in fp32 on 8 x a100-80gb"),
    ("H100 for A100, MPT 1b of 8,192", "MPT 1b, FSDP, 4 x 3 x 8192, bf16, reduced in fp32 on 8 x h100",
     "MPT 1b, FSDP, 4 x 3 x 8192, bf16, reduced in fp32 on 8 x a100-80gb"),
)  # fmt: skip
_CLOSE = 0.03
_OTHERS_WAIT = (
    "one rank runs: of more ranks each has a smaller share of the optimizer's work, which is counted, and waits longer "
    "for the slowest, which is not"
)
# Why a comparison is farther off than asked.
_WHY_OFF = {
    "torch.compile, torchtune": "eager it is right; our recipe is not torchtune's own modules, and Inductor is "
    "today's: what the one of then made of them is not known",
    "128 ranks for 8, torchtitan": _OTHERS_WAIT,
    "64 ranks for 8, MPT 13b": _OTHERS_WAIT,
    "H100 for A100, MPT 7b": "the row on H100 is told too low; with the same tables the four other pairs are within "
    "3 %, and no cause is known",
}
_FAMILIES = {"a100": "A100", "h100": "H100", "h100 500 W": "H100 of 500 W", "v100": "V100"}


def summary(lines: list[dict]) -> str:
    """A row per family of devices: how far off without and with a measured row."""
    found = _matched(lines)
    table = ["| devices | rows | median | 9 of 10 within | worst | rows | median | 9 of 10 within | worst |",
             "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    groups = {words: [pair for pair in found if pair[0].family == family] for family, words in _FAMILIES.items()}
    for words, members in {**groups, "all": found}.items():
        plain = [abs(line["predicted"] / row.published - 1) for row, line in members]
        held_out = [abs(line["anchored"] / row.published - 1) for row, line in members if not row.is_anchor]
        table.append(f"| {words} | {_spread(plain)} | {_spread(held_out)} |")
    line = lines[0]
    return "\n".join([
        *table, "",
        "The first four columns: nothing is measured. The last four: one published row of the family (MPT 7b, 6 x "
        "2048; BERT in fp32) says how fast matrix products are, and the others are told with it.",
        "",
        f"torch {line['torch']}, commit {line['commit']}, {line['date']}.",
    ])  # fmt: skip


def example(lines: list[dict]) -> str:
    """What the command says of one row."""
    row, line = _one(_matched(lines), "selective op on 8 x h100")
    device = device_named(row.device)
    time = StepTime(
        **{name: line[name] for name in ("step_ms", "busy_ms", "host_ms", "communication_ms", "launch_bound", "mfu",
                                         "exposed_communication_ms")},
        hfu=line.get("hfu", line["mfu"]), waited_ms=0.0, lost_ms={}, by_kind_ms={}, slowest=(), flops=1.0,
        model_flops=1.0, tokens=row.per_step, speed=1.0, is_anchored=False, error_fraction=stated_error(device, None),
    )  # fmt: skip
    return "\n".join(f"    {text}".rstrip() for text in time_text(time, row.device).splitlines())


def comparisons(lines: list[dict]) -> str:
    """Ratios of two rows that differ in one thing; no measured row is used."""
    found = _matched(lines)
    table = ["| what differs | published | predicted | error | |", "|---|---:|---:|---:|---|"]
    errors, notes = [], dict[str, str]()
    for words, first, second in COMPARISONS:
        (a, a_line), (b, b_line) = _one(found, first), _one(found, second)
        published, predicted = a.published / b.published, a_line["predicted"] / b_line["predicted"]
        errors.append(abs(predicted / published - 1))
        mark = notes.setdefault(_WHY_OFF[words], "abcdef"[len(notes)]) if errors[-1] > _CLOSE else ""
        table.append(
            f"| {words} | {published:.3f} | {predicted:.3f} | {100 * (predicted / published - 1):+.1f} % | {mark} |"
        )
    within = sum(error <= _CLOSE for error in errors)
    said = f"Median {_percent(statistics.median(errors))}; {within} of {len(errors)} within 3 %."
    explained = [f"- {mark}: {why}." for why, mark in notes.items()]
    return "\n".join([*table, "", *explained, "", said])


def times(lines: list[dict]) -> str:
    """A table per source."""
    groups: dict[str, list[tuple[TimeRow, dict]]] = defaultdict(list)
    for row, line in _matched(lines):
        groups[row.source].append((row, line))
    parts = []
    for source, members in groups.items():
        table = ["| configuration | devices | published | predicted | error | with a measured row | kernels, ms | "
                 "exposed communication, ms | host, ms |", "|---|---|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
        for row, line in members:
            anchored = "anchor" if row.is_anchor else f"{100 * (line['anchored'] / row.published - 1):+.1f} %"
            table.append(
                f"| {row.configuration} | {row.ranks} x {row.device} | {_number(row.published)} | "
                f"{_number(line['predicted'])} | {100 * (line['predicted'] / row.published - 1):+.1f} % | {anchored} | "
                f"{line['busy_ms']:,.0f} | {line['exposed_communication_ms']:,.0f} | {line['host_ms']:,.0f} |"
            )
        guessed = {row.guessed for row, _ in members if row.guessed}
        said = "".join(f"\n\nGuessed: {words}." for words in sorted(guessed))
        parts.append(f"[{source_name(source)}]({source}), {members[0][0].unit}:\n\n" + "\n".join(table) + said)
    return "\n\n".join(parts)


def _matched(lines: Iterable[dict]) -> list[tuple[TimeRow, dict]]:
    known = {line["row"]: line for line in lines}
    return [(row, known[row.key]) for row in rows() if row.key in known]


def _one(found: list[tuple[TimeRow, dict]], words: str) -> tuple[TimeRow, dict]:
    (one,) = [pair for pair in found if words in pair[0].key]
    return one


def _spread(errors: list[float]) -> str:
    if not errors:
        return "0 | | | "
    most = sorted(errors)[max(0, -(-9 * len(errors) // 10) - 1)]
    return f"{len(errors)} | {_percent(statistics.median(errors))} | {_percent(most)} | {_percent(max(errors))}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
