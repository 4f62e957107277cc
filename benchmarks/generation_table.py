"""Tables of generation: a KV cache within a budget, and what differs between training and generation."""

from __future__ import annotations

import statistics

from foresight_table import origin, percent

_PLACES = {"cpu": "a file in the page cache", "standin": "host memory of the stand-in"}


def cache_table(lines: list[dict]) -> str:
    """A row per link, prompt and budget of a KV cache: bytes and milliseconds a token, predicted and measured."""
    rows = [
        "| layers away lie in | link, GB/s | prompt | budget | predicted | measured | a token, plain | predicted | "
        "measured | off |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for x in lines:
        cells = (
            _PLACES[x["place"]],
            f"{x['fetch_gb_per_s']:.3g}",
            f"{x['prompt']:,}",
            f"{x['budget']:.0%}",
            *(f"{x[f'{how}_bytes'] / 2**20:.1f} MiB" for how in ("predicted", "measured")),
            *(f"{x[f'{how}_ms']:.1f} ms" for how in ("plain", "predicted", "measured")),
            percent(x["predicted_ms"] / x["measured_ms"] - 1),
        )
        rows.append(f"| {' | '.join(cells)} |")
    offs = [abs(x["predicted_ms"] / x["measured_ms"] - 1) for x in lines]
    return "\n".join(
        [*rows, "", f"Times: median {percent(statistics.median(offs))}, worst {percent(max(offs))}. {origin(lines)}"]
    )


def gap_table(lines: list[dict]) -> str:
    """A row per precision: the gap of log-probabilities, and the peaks of a step and of generation."""
    rows = [
        "| precision | gap, plain | gap, planned | step, plain | step, planned | generation, plain | planned |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for x in lines:
        if not x["same_tokens"]:
            raise SystemExit("a planned model generates other tokens: no table is made of that.")
        peaks = " | ".join(
            f"{x[f'{name}_{what}_peak_bytes'] / 2**20:.1f} MiB"
            for what in ("step", "generation")
            for name in ("plain", "planned")
        )
        rows.append(f"| {x['precision']} | {x['plain_gap']:.2g} | {x['planned_gap']:.2g} | {peaks} |")
    return "\n".join([*rows, "", f"Both generate the same tokens. {origin(lines)}"])
