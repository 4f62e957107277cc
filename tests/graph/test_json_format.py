"""A graph or costs file is read back equal, or refused with the name of the field that is wrong."""

import copy
import gzip
import json
from dataclasses import replace

import pytest

from lowtide.errors import GraphFormatError
from lowtide.graph import json_format
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import DROP, FREE, PACK, RELEASE, RUN, UNPACK, Frame, Op, StepGraph, Storage, to_dict


def linear_and_relu() -> StepGraph:
    """y = relu(x @ w), then its backward: three storages are resident, four are made, two are stored."""
    storages = (
        Storage(0, 4096, "parameter"),
        Storage(1, 1024, "input"),
        Storage(2, 1024, "activation", op=0),
        Storage(3, 1024, "activation", op=1, fixed="returned by the model"),
        Storage(4, 1024, "backward", op=2),
        Storage(5, 4096, "backward", op=3),
    )
    ops = (
        Op(0, "aten.mm.default", 1, False, reads=(1, 0), makes=(2,), workspace_bytes=64),
        Op(1, "aten.relu.default", 2, False, reads=(2,), makes=(3,), signature=1),
        Op(2, "aten.threshold_backward.default", 0, True, reads=(3,), makes=(4,), signature=1),
        Op(3, "aten.mm.default", 0, True, reads=(1, 4), makes=(5,)),
    )
    events = (
        (RUN, 0), (PACK, 0), (RUN, 1), (FREE, 2), (PACK, 1),
        (UNPACK, 1), (RUN, 2), (DROP, 1), (RELEASE, 1), (FREE, 3),
        (UNPACK, 0), (RUN, 3), (DROP, 0), (RELEASE, 0), (FREE, 4), (FREE, 5),
    )  # fmt: skip
    return StepGraph(
        device="cpu",
        device_name="a desk",
        resident={"parameters": 4096, "batch": 1024},
        signatures=({"op": "aten.mm.default", "args": []}, {"op": "aten.relu.default", "args": []}),
        frames=(Frame(-1, "", 0), Frame(0, "linear", 0), Frame(0, "relu", 0)),
        storages=storages,
        ops=ops,
        saved=(1, 3),
        events=events,
        calls=("float32[16,16]",),
        written_parameters=("linear.weight",),
        recorded_ms={1: 0.25},
        provenance={"torch": "2.13.0"},
    )


@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_a_saved_graph_loads_with_the_same_fingerprint(tmp_path, name):
    graph = linear_and_relu()

    json_format.save(graph, tmp_path / name)
    again = json_format.load(tmp_path / name)

    assert again == graph
    assert again.fingerprint == graph.fingerprint


def test_a_gz_name_means_a_gzip_file_and_equal_graphs_equal_bytes(tmp_path):
    for name in ("one.json.gz", "two.json.gz"):
        json_format.save(linear_and_relu(), tmp_path / name)

    assert json.loads(gzip.decompress((tmp_path / "one.json.gz").read_bytes()))["version"] == 2
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()


FLAT = to_dict(linear_and_relu())["events"]

# (what is broken, where in the JSON, the value put there, the field the message must name)
DEFECTS = [
    ("other version", ["version"], 99, "version"),
    ("no version", ["version"], None, "version"),
    ("unknown field", ["colour"], "blue", "colour"),
    ("negative storage", ["storages", 2, 0], -1, "storages[2].bytes"),
    ("fractional storage", ["storages", 2, 0], 1.5, "storages[2].bytes"),
    ("unknown kind", ["storages", 2, 1], "cloud", "storages[2].kind"),
    ("made by no op", ["storages", 2, 2], 99, "storages[2].op"),
    ("parameter with a maker", ["storages", 0, 2], 0, "storages[0].op"),
    ("activation without a maker", ["storages", 2, 2], None, "storages[2].op"),
    ("storage row too short", ["storages", 2], [1, "input"], "storages[2]"),
    ("storage that may be kept inexactly", ["storages", 2], [1, "activation", 0, 0, "", "float32"], "storages[2]"),
    ("negative workspace", ["ops", 0, 6], -64, "ops[0].workspace_bytes"),
    ("negative RNG state", ["ops", 0, 7], -1, "ops[0].rng_bytes"),
    ("negative resident", ["resident", "batch"], -5, "resident.batch"),
    ("negative optimizer step", ["optimizer_step_bytes"], -5, "optimizer_step_bytes"),
    ("unknown frame", ["ops", 0, 1], 3, "ops[0].frame"),
    ("unknown signature", ["ops", 1, 8], 2, "ops[1].signature"),
    ("unknown storage read", ["ops", 1, 3], [77], "ops[1].reads[0]"),
    ("negative storage id", ["ops", 1, 3], [-1], "ops[1].reads[0]"),
    ("bool for an id", ["ops", 1, 3], [True], "ops[1].reads[0]"),
    ("unknown storage written", ["ops", 1, 5], [77], "ops[1].writes[0]"),
    ("read before it is made", ["ops", 0, 3], [3], "ops[0].reads"),
    ("op that reads what it makes", ["ops", 1, 3], [3], "ops[1].reads"),
    ("written before it is made", ["ops", 0, 5], [3], "ops[0].writes"),
    ("made twice", ["ops", 1, 4], [3, 2], "ops[1].makes"),
    ("maker that does not make it", ["ops", 1, 4], [], "ops[2].reads"),
    ("maker of what nobody reads", ["ops", 3, 4], [], "storages[5].op"),
    ("unknown saved storage", ["saved", 0], 6, "saved[0]"),
    ("parent after its child", ["frames", 1, 0], 2, "frames[1].parent"),
    ("frame that is its own parent", ["frames", 1, 0], 1, "frames[1].parent"),
    ("negative ordinal", ["frames", 1, 2], -1, "frames[1].ordinal"),
    ("half an event", ["events"], [RUN], "events"),
    ("unknown event", ["events", 0], 6, "events[0].kind"),
    ("event of an unknown op", ["events", 1], 4, "events[0] (run)"),
    ("event of an unknown saved tensor", ["events", 3], 2, "events[1] (pack)"),
    ("event of an unknown storage", ["events", 7], 6, "events[3] (free)"),
    ("op run out of order", ["events", 1], 1, "events[0] (run)"),
    ("packed before it is made", ["saved", 0], 5, "events[1] (pack)"),
    ("dropped before unpacked", ["events", 10], DROP, "events[5] (drop)"),
    ("released twice", ["events", 24], RELEASE, "events[13] (release)"),
    ("unpacked after release", ["events"], FLAT[:18] + [RELEASE, 0] + FLAT[20:], "events[10] (unpack)"),
    ("freed twice", ["events", 31], 4, "events[15] (free)"),
    ("ops that never run", ["events"], [RUN, 0], "events"),
    ("ids that are no list", ["ops", 1, 3], "2", "ops[1].reads"),
    ("signature that is no object", ["signatures", 0], "mm", "signatures[0]"),
    ("call that is no text", ["calls", 0], 3, "calls[0]"),
    ("unknown region", ["region"], "moon", "region"),
    ("device that is no text", ["device"], None, "device"),
    ("provenance that is no text", ["provenance", "torch"], 2, "provenance.torch"),
    ("written parameter that is no text", ["written_parameters", 0], 2, "written_parameters[0]"),
    ("recorded time of an unknown signature", ["recorded_ms", 0, 0], 2, "recorded_ms[0].signature"),
    ("recorded time that is none", ["recorded_ms", 0, 1], -1.0, "recorded_ms[0].ms"),
    ("completes a later op", ["ops", 1, 10], 1, "ops[1].completes_inplace"),
    ("flag that is no flag", ["ops", 0, 2], 2, "ops[0].backward"),
]


@pytest.mark.parametrize(("path", "value", "field"), [d[1:] for d in DEFECTS], ids=[d[0] for d in DEFECTS])
def test_a_defect_is_refused_by_the_name_of_its_field(path, value, field):
    body = copy.deepcopy(to_dict(linear_and_relu()))
    target = body
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value

    with pytest.raises(GraphFormatError) as caught:
        json_format.from_dict(body)

    assert f"field '{field}'" in str(caught.value)


@pytest.mark.parametrize("field", sorted(to_dict(linear_and_relu())))
def test_a_missing_field_is_named(field):
    body = to_dict(linear_and_relu())
    del body[field]

    with pytest.raises(GraphFormatError, match=f"'{field}'"):
        json_format.from_dict(body)


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_refused_by_name(version):
    with pytest.raises(GraphFormatError) as caught:
        json_format.from_dict(to_dict(linear_and_relu()) | {"version": version})

    assert str(caught.value) == (
        f"not a graph: field 'version' is {version}, not 2, the version known here. "
        "Trace the step again, or restore the file."
    )


def test_the_message_says_what_the_value_is_and_the_way_out():
    body = to_dict(linear_and_relu())
    body["storages"][2][0] = -1

    with pytest.raises(GraphFormatError) as caught:
        json_format.from_dict(body)

    assert str(caught.value) == (
        "not a graph: field 'storages[2].bytes' is -1, not an integer of 0 or more. "
        "Trace the step again, or restore the file."
    )


@pytest.mark.parametrize("body", [None, [], "graph", 3], ids=str)
def test_what_is_no_object_is_no_graph(body):
    with pytest.raises(GraphFormatError, match="not an object"):
        json_format.from_dict(body)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_a_truncated_file_is_refused(tmp_path, name, share):
    path = tmp_path / name
    json_format.save(linear_and_relu(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])

    with pytest.raises(GraphFormatError, match="is not whole JSON|is not a whole gzip file"):
        json_format.load(path)


def test_nesting_without_end_is_refused_not_a_crash(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text("[" * 200_000)

    with pytest.raises(GraphFormatError, match="is not whole JSON"):
        json_format.load(path)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        json_format.load(tmp_path / "none.json")


def test_costs_survive_a_round_trip_through_json():
    costs = Costs(op_ms=(0.5, 1.25), dispatch_us=5.5, record_us=10.0, replay_us=8.0, device_name="a desk", move_us=3.0)

    assert json_format.costs_from_dict(json.loads(json.dumps(json_format.costs_to_dict(costs)))) == costs


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0, 10**400, "1", None, True], ids=lambda t: str(t)[:8])
@pytest.mark.parametrize("field", ["op_ms", "dispatch_us", "record_us", "replay_us", "move_us"])
def test_a_time_that_is_no_time_is_refused_by_name(field, time):
    body = json_format.costs_to_dict(Costs(op_ms=(1.0, 2.0)))
    body[field] = [1.0, time] if field == "op_ms" else time

    with pytest.raises(GraphFormatError) as caught:
        json_format.costs_from_dict(body)

    assert f"field '{field}" in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("version", 3), ("source", "other"), ("op_ms", 3), ("device_name", 4)])
def test_costs_of_another_kind_are_refused_by_name(field, value):
    body = json_format.costs_to_dict(Costs(op_ms=(1.0,))) | {field: value}

    with pytest.raises(GraphFormatError, match=f"not costs: field '{field}'"):
        json_format.costs_from_dict(body)


def test_costs_of_packing_are_refused_by_name():
    body = json_format.costs_to_dict(Costs(op_ms=(1.0,))) | {"links": {"int8": [1e9, 1e9, 0.0]}}

    with pytest.raises(GraphFormatError, match="field 'links' is 'int8', not one of host, disk"):
        json_format.costs_from_dict(body)


def test_retained_backwards_come_back_and_are_checked():
    graph = replace(linear_and_relu(), retained_backwards=((0, 1),))
    body = to_dict(graph)
    assert json_format.from_dict(body) == graph
    assert "retained_backwards" not in to_dict(replace(graph, retained_backwards=()))
    for wrong in ([[1, 0]], [[0, 1], [1, 1]], [[0, 99]], [[0]], 3):
        with pytest.raises(GraphFormatError, match="retained_backwards"):
            json_format.from_dict(body | {"retained_backwards": wrong})
