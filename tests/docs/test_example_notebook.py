"""The example notebook runs, and shows what a run shows."""

import json
import re
from pathlib import Path

import pytest
import torch
from run_notebook import executed

PATH = Path(__file__).parents[2] / "examples" / "first_budget.ipynb"


@pytest.fixture(scope="module")
def committed():
    return json.loads(PATH.read_text())


@pytest.fixture(scope="module")
def ran(committed):
    threads = torch.get_num_threads()
    try:
        return executed(committed)
    finally:
        torch.set_num_threads(threads)


def outputs(notebook):
    """By cell id the text and the HTML that it shows."""
    found = {}
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            found[cell["id"]] = "".join(output.get("text", ())), "".join(data.get("text/html", ()))
    return found


def test_a_run_shows_what_the_file_shows_but_for_the_machines_numbers(committed, ran):
    def without_numbers(notebook):
        return {name: re.sub(r"[\d.]+", "#", text) for name, (text, _) in outputs(notebook).items()}

    assert without_numbers(ran) == without_numbers(committed)
    assert len(outputs(committed)) == 6


def test_the_planned_peak_is_about_half_of_the_plain_one(committed, ran):
    for notebook in (committed, ran):
        plain, planned = map(float, re.findall(r"([\d.]+) MiB", outputs(notebook)["budget"][0]))
        assert 0.4 * plain < planned < 0.6 * plain


def test_gradients_are_equal_and_the_fit_and_the_front_are_drawn(committed, ran):
    for notebook in (committed, ran):
        found = outputs(notebook)
        assert found["verify"][0] == "gradients equal to the last bit: True\n"
        assert "The plan is in force" in found["shown"][1] and "<svg" in found["shown"][1]
        assert "Trade-off" in found["front"][1]
