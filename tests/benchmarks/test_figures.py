"""The committed figures are those of the committed results, need no other file, and say what they show."""

import copy
import re
from xml.etree import ElementTree

import figures
import pytest
from figure_data import AS_SMALL, HALF, MIB, Results
from figure_style import LETTER, NARROW

DRAWN = figures.drawn(Results.read())
SVG = "{http://www.w3.org/2000/svg}"


def test_the_committed_figures_are_those_of_the_results():
    assert figures.differing(DRAWN) == []


def test_a_figure_of_other_results_is_found():
    lines = copy.deepcopy(Results.read().lines)
    (half,) = (line for line in lines if line.get("budget") == HALF)
    half["save"].append(half["recompute"].pop())  # one tensor more is kept

    changed = figures.differing(figures.drawn(Results(lines)))

    assert {path.name for path in changed} == {"memory_over_one_step.svg", "time_against_memory.svg"}


def test_results_of_another_graph_are_refused():
    lines = [{**line, "graph_fingerprint": "0"} for line in Results.read().lines]

    with pytest.raises(SystemExit, match=r"figures.jsonl is of another decoder8_4096. Run: .* --plan"):
        figures.drawn(Results(lines))


@pytest.mark.parametrize(("method", "plan"), [
    ("none", ("none", "")), ("transformers full", ("full", "")), ("lowtide 0.50", ("exact", HALF)),
    ("lowtide at full's peak", ("exact", AS_SMALL)),
])  # fmt: skip
def test_peaks_in_the_picture_are_those_that_were_measured(method, plan):
    results = Results.read()

    assert abs(results.plan(*plan).timeline.peak_bytes - results.measured[method]["peak_bytes"]) < 0.2 * MIB


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_figure_needs_no_other_file_and_says_what_it_shows(path):
    root = ElementTree.fromstring(DRAWN[path])

    assert len(root.find(f"{SVG}title").text) > 20 and len(root.find(f"{SVG}desc").text) > 100
    assert not re.search(r"href|url\(|@import|<script|<image", DRAWN[path])
    assert "prefers-color-scheme: dark" in DRAWN[path]


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_all_text_of_both_layouts_lies_inside(path):
    root = ElementTree.fromstring(DRAWN[path])
    _, _, width, height = map(float, root.get("viewBox").split())
    for group in root.findall(f"{SVG}g"):
        wide = group.get("class") == "wide"
        right, bottom = (width, height) if wide else (NARROW, height * NARROW / width)
        texts = group.findall(f"{SVG}text")
        assert len(texts) > 5
        for text in texts:
            length = LETTER * float(text.get("font-size") or group.get("font-size")) * len(text.text)
            start = float(text.get("x")) - {"middle": 0.5, "end": 1.0}.get(text.get("text-anchor"), 0.0) * length
            assert start >= -2 and start + length <= right + 2, text.text
            assert 8 <= float(text.get("y")) <= bottom - 2, text.text
