"""Published GPU measurements beside what lowtide says of the same configuration, without a GPU.

    cd benchmarks
    python published.py                rows that have no result yet; a quarter of an hour of one core for all
    python published.py --again BERT   rows whose key holds the word, once more; "" is all

Each configuration is re-created (``published_recipes.py``), traced without memory, and put through the forecaster of
``lowtide plan``. What is compared: bytes that the allocator counts, bytes that it reserves, what ``nvidia-smi`` shows
for the process (reserved and the context), or a rate.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from provenance import HERE, provenance
from published_recipes import RECIPES, Recipe
from published_rows import ALLOCATED, DRIVER, RESERVED, TIME, Row, rows
from torch import nn

from lowtide.estimation.device_table import device_named
from lowtide.foresight.forecaster import Forecaster
from lowtide.foresight.subjects import Subject, in_autocast
from lowtide.foresight.training_setup import TrainingSetup
from lowtide.hollow.devices import target_of

RESULTS = HERE / "results" / "published.json"
LIBRARIES = ("torch", "transformers", "bitsandbytes")


class RecipeSubject(Subject):
    """What a recipe trains."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.name, self.recipe = "recipe", recipe

    def build(self, setup: TrainingSetup) -> tuple[nn.Module, Any, Callable[..., Any] | None]:
        model, step = self.recipe.model().to(self.recipe.dtype).train(), self.recipe.step
        if self.recipe.autocast is not None:
            step = in_autocast(target_of(setup.device), str(self.recipe.autocast).removeprefix("torch."), step)
        return model, self.recipe.batch, step


def predicted(row: Row) -> dict[str, Any]:
    """What is said of a row's configuration, in the row's unit."""
    recipe = RECIPES[row.recipe](**row.options)
    subject = RecipeSubject(recipe)
    setup = TrainingSetup(device_named(row.gpu), **recipe.setup)
    forecast = Forecaster(subject).forecast(setup, budget=None)
    if row.kind == TIME:
        assert forecast.step_ms is not None
        return {"predicted": recipe.done / forecast.step_ms.expected * 1e3}
    more = 0
    with subject._without_memory(target_of(setup.device)):
        more = recipe.other_bytes(recipe.model())
    size = {ALLOCATED: forecast.allocated_bytes, RESERVED: forecast.reserved_bytes,
            DRIVER: (forecast.reserved_bytes or 0) + forecast.by_part["context"]}[row.kind]  # fmt: skip
    assert size is not None
    return {"predicted": (size + more) / row.scale, "by_part": forecast.by_part}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", help="a word of the key: kind, configuration or GPU")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    shared = {**provenance(), "versions": versions()}
    known = {line["row"]: line for line in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    for row in rows():
        if row.key in known if args.again is None else args.again not in row.key:
            continue
        line = predicted(row)
        line["error"] = line["predicted"] / row.published - 1
        print(f"{row.published:>12.2f} {line['predicted']:>12.2f} {100 * line['error']:>7.2f} %  {row.key}", flush=True)
        known[row.key] = {"benchmark": "published", "row": row.key, **line, **shared}
        lines = [json.dumps(known[row.key]) for row in rows() if row.key in known]
        RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return 0


def versions() -> dict[str, str]:
    """Of the libraries that decide what a step saves."""
    found = {}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
