"""The committed case graphs: they load, are what was traced, and their plain peak is what the allocator measured."""

import gzip
import json

import pytest
from support.case_graphs import EXPECTED, FOLDER, load_case

from lowtide.graph import json_format
from lowtide.graph.costs import Costs
from lowtide.simulation.simulator import simulate_actions


def test_every_committed_file_belongs_to_an_expected_case():
    files = {path.name for path in FOLDER.glob("*.gz")}

    assert files == {f"{name}.{kind}" for name in EXPECTED for kind in ("json.gz", "costs.json.gz")}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2 * 2**20


@pytest.mark.parametrize("name", EXPECTED)
def test_a_case_graph_is_the_one_that_was_traced_and_its_plain_peak_the_allocators(name):
    graph, costs = load_case(name)
    peak_bytes = simulate_actions(graph, costs, {}).peak_bytes
    expected = EXPECTED[name]

    assert graph.fingerprint == expected["fingerprint"]
    assert len(graph.ops) == len(costs.op_ms) == expected["ops"]
    assert peak_bytes == expected["simulated_plain_peak_bytes"]
    assert peak_bytes == pytest.approx(expected["measured_plain_peak_bytes"], rel=1e-4)


def test_a_changed_graph_has_another_fingerprint_and_peak():
    """So that the test above can fail: the last activation that the toy stores made larger."""
    body = json.loads(gzip.decompress((FOLDER / "toy.json.gz").read_bytes()))
    stored = max(s for s in body["saved"] if body["storages"][s][1] == "activation")
    body["storages"][stored][0] += 2**20
    graph = json_format.from_dict(body)

    assert graph.fingerprint != EXPECTED["toy"]["fingerprint"]
    costs = Costs((1.0,) * len(graph.ops))
    assert simulate_actions(graph, costs, {}).peak_bytes > EXPECTED["toy"]["simulated_plain_peak_bytes"]


def test_costs_read_back_equal(tmp_path):
    _, costs = load_case("toy")
    json_format.save_costs(costs, tmp_path / "costs.json.gz")

    assert json_format.load_costs(tmp_path / "costs.json.gz") == costs
