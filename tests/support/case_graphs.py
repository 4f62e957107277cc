"""The committed step graphs of real models (``tests/graphs``), and what is known of them."""

import json
from pathlib import Path

from lowtide.graph import json_format
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph

FOLDER = Path(__file__).parents[1] / "graphs"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def load_case(name: str) -> tuple[StepGraph, Costs]:
    return json_format.load(FOLDER / f"{name}.json.gz"), json_format.load_costs(FOLDER / f"{name}.costs.json.gz")
