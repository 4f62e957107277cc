"""Draw the figures of the pages from committed results; ``--check`` fails where a file differs from them.

python benchmarks/figures.py [--check | --plan]

``--plan`` solves for the figures first and writes ``results/figures.jsonl``: what each plan recomputes, its bound, and
one real step of the tutorial. What is drawn of a plan is simulated from that, on the graphs and op times of
``tests/graphs``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from figure_charts import memory_figure, trade_off_figure, tutorial_figure
from figure_data import ROOT, Results, plan_all
from figure_diagrams import flow_figure, life_figure
from figure_pretend import pretend_figure

DOCS = ROOT / "docs"


def drawn(results: Results) -> dict[Path, str]:
    """Every figure, by the file that holds it."""
    figures = DOCS / "figures"
    return {
        figures / "memory_over_one_step.svg": memory_figure(results),
        figures / "time_against_memory.svg": trade_off_figure(results),
        figures / "tutorial_step.svg": tutorial_figure(results),
        figures / "life_of_a_fit.svg": life_figure(),
        figures / "pretended_llama_1b.svg": pretend_figure(),
        DOCS / "flow.svg": flow_figure(),
    }


def differing(figures: dict[Path, str]) -> list[Path]:
    """The files that are not what would be drawn now."""
    return [path for path, text in figures.items() if not path.exists() or path.read_text() != text]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a figure differs")
    parser.add_argument("--plan", action="store_true", help="solve first, half a minute")
    args = parser.parse_args()
    if args.plan:
        plan_all()
    figures = drawn(Results.read())
    for path in differing(figures):
        if args.check:
            shown = path.relative_to(ROOT)
            print(f"{shown} is not what the results give. Run: make figures", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(figures[path])
    return int(args.check and bool(differing(figures)))


if __name__ == "__main__":
    sys.exit(main())
