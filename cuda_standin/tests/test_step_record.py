"""What is recorded of a step: all that the host asks of the device, in its order, and the host's own time."""

import json
import time

import pytest

from cuda_standin import control

torch = pytest.importorskip("torch")


@pytest.fixture
def recorded(tmp_path):
    """Runs a function, and returns its record."""

    def run(function):
        control.begin_step_record()
        try:
            function()
        finally:
            control.end_step_record(tmp_path / "step.json")
        return json.loads((tmp_path / "step.json").read_text())

    return run


def kinds(record):
    return [entry[0] for entry in record["entries"]]


def operators(record, entries=None):
    found = record["entries"] if entries is None else entries
    return [record["signatures"][entry[3]]["op"] for entry in found if entry[0] == "op"]


def test_an_operator_has_its_arguments_layouts_its_bytes_and_its_kernels(recorded):
    x = torch.ones(8, 4, device="cuda", dtype=torch.bfloat16)

    record = recorded(lambda: torch.add(x, x.t().contiguous().t(), alpha=2))

    _, _, stream, number, written, kernels, *_ = record["entries"][-1]
    assert record["signatures"][number] == {
        "op": "aten.add.Tensor",
        "args": [{"t": [8, 4], "stride": [4, 1], "dtype": "bfloat16", "device": "cuda"},
                 {"t": [8, 4], "stride": [1, 8], "dtype": "bfloat16", "device": "cuda"}],
        "kwargs": {"alpha": 2},
    }  # fmt: skip
    assert (stream, written, kernels) == (0, 64, 1)


def test_what_is_written_in_place_counts_and_views_are_no_entries(recorded):
    x = torch.ones(8, 4, device="cuda")

    record = recorded(lambda: x.view(4, 8)[:2].mul_(2))

    assert operators(record) == ["aten.mul_.Tensor"]
    assert record["entries"][0][4] == 64


def test_what_an_operator_calls_is_part_of_it(recorded):
    q = torch.ones(1, 2, 64, 16, device="cuda", dtype=torch.bfloat16)

    record = recorded(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))

    assert operators(record) == ["aten._scaled_dot_product_flash_attention.default"]


def test_streams_events_and_waits_are_told_apart(recorded):
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()

    def run():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul(2)
        done = side.record_event()
        torch.cuda.current_stream().wait_event(done)
        done.synchronize()
        side.synchronize()
        torch.cuda.synchronize()

    record = recorded(run)

    assert kinds(record) == ["event", "wait", "op", "event", "wait", "host_event", "host_stream", "host_device"]
    streams = [entry[2] for entry in record["entries"]]
    assert streams[0] == 0 and streams[1] == streams[2] == streams[3] == streams[6] != 0 and streams[4] == 0
    events = [entry[3] for entry in record["entries"]]
    assert events[0] == events[1] and events[3] == events[4] == events[5]


def test_copies_say_where_to_and_whether_the_host_has_to_wait(recorded):
    x, pageable = torch.ones(1 << 12, device="cuda"), torch.ones(1 << 12)
    pinned = pageable.pin_memory()

    def run():
        x.copy_(pinned, non_blocking=True)
        x.copy_(pageable)
        pinned.copy_(x, non_blocking=True)
        x.cpu()
        torch.zeros_like(x).copy_(x)

    entries = [entry for entry in recorded(run)["entries"] if entry[0] not in ("op", "host_stream")]

    assert [(kind, size, is_pinned) for kind, _, _, size, is_pinned, *_ in entries] == [
        ("to_device", 1 << 14, 1), ("to_device", 1 << 14, 0), ("to_host", 1 << 14, 1), ("to_host", 1 << 14, 0),
        ("on_device", 1 << 14, 1),
    ]  # fmt: skip


def test_a_number_that_is_read_makes_the_host_wait(recorded):
    x = torch.ones(4, device="cuda")

    assert kinds(recorded(lambda: x.sum().item())) == ["op", "to_host", "host_stream"]


def test_backward_is_told_from_forward(recorded):
    x = torch.ones(4, 4, device="cuda", requires_grad=True)

    record = recorded(lambda: torch.mm(x, x).sum().backward())

    by_thread = {record["signatures"][entry[3]]["op"]: entry[6] for entry in record["entries"] if entry[0] == "op"}
    assert by_thread["aten.sum.default" if "aten.sum.default" in by_thread else "aten.sum.dim_IntList"] == 0
    assert [entry[6] for entry in record["entries"] if entry[0] == "op"][-2:] == [1, 1]


def test_a_graph_is_recorded_when_it_is_captured_and_told_when_it_is_replayed(recorded):
    control.record_graphs()
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        y += 1

    record = recorded(graph.replay)

    (kind, _, _, number, *_) = record["entries"][0]
    assert kind == "replay" and len(record["entries"]) == 1
    assert operators(record, record["graphs"][str(number)]) == ["aten.mul.Tensor", "aten.add_.Tensor"]


def test_the_hosts_clock_stands_still_while_values_are_computed():
    x = torch.ones(1024, 1024, device="cuda")
    x @ x
    began, wall = control.host_clock_ns(), time.perf_counter_ns()
    for _ in range(20):
        x @ x
    host, wall = control.host_clock_ns() - began, time.perf_counter_ns() - wall

    assert 0 < host < wall / 5


def test_nothing_is_recorded_before_and_after(recorded):
    x = torch.ones(4, device="cuda")
    x.mul(2)
    record = recorded(lambda: None)
    x.mul(3)

    assert record["entries"] == []
    assert recorded(lambda: x.mul(4))["entries"][0][0] == "op"


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    control.begin_step_record()
    with pytest.raises(OSError, match="cannot be written"):
        control.end_step_record(tmp_path / "no such folder" / "step.json")


def test_a_convolution_that_goes_over_the_rows_of_a_batch_takes_the_host_little(recorded):
    images, weight = (torch.ones(size, device="cuda") for size in ((1024, 3, 8, 8), (8, 3, 3, 3)))
    torch.nn.functional.conv2d(images, weight)

    began = time.perf_counter_ns()
    record = recorded(lambda: torch.nn.functional.conv2d(images, weight))
    wall = time.perf_counter_ns() - began

    assert operators(record) == ["aten._slow_conv2d_forward.default"]
    assert record["entries"][0][5] >= 1024 and record["took_ns"] < wall / 3


def test_a_collective_says_its_bytes_ranks_and_machines(python, tmp_path):
    source = f"""
import json, torch
from cuda_standin import control, process_group
with process_group.lone_rank(32):
    import torch.distributed as dist
    dist.init_process_group("nccl")
    mesh = dist.device_mesh.init_device_mesh("cuda", (4, 8), mesh_dim_names=("across", "inside"))
    groups = [mesh["across"].get_group(), mesh["inside"].get_group(), dist.new_group([0, 8, 9]), None]
    x, many = torch.ones(1000, device="cuda"), torch.ones(32000, device="cuda")
    control.begin_step_record()
    for group in groups:
        dist.all_reduce(x, group=group)
    dist.all_gather_into_tensor(many, x)
    control.end_step_record({str(tmp_path / "step.json")!r})
"""
    python(source, STANDIN_DEVICES="8")
    record = json.loads((tmp_path / "step.json").read_text())
    found = [entry for entry in record["entries"] if entry[0] == "collective"]

    told = [record["signatures"][entry[3]] for entry in found]
    assert [(call["op"], call["ranks"], call["nodes"]) for call in told] == [
        ("all_reduce", 4, 4), ("all_reduce", 8, 1), ("all_reduce", 3, 2), ("all_reduce", 32, 4), ("all_gather", 32, 4),
    ]  # fmt: skip
    assert {entry[4] for entry in found} == {4000}
    communicators = [entry[5] for entry in found]
    assert len(set(communicators[:4])) == 4 and communicators[3] == communicators[4]
