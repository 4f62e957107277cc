"""Measured times: larger is longer, equal is equal, what cannot run is estimated and said so."""

import warnings

import pytest
import torch

from lowtide.errors import LowtideError
from lowtide.graph.step_graph import RUN, Frame, Op, StepGraph, Storage
from lowtide.measurement import allocator
from lowtide.measurement.op_inputs import describe
from lowtide.measurement.op_times import EstimateWarning, measure

aten = torch.ops.aten


def mm(size: int) -> dict:
    return describe(aten.mm.default, (torch.empty(size, size), torch.empty(size, size)), {})


def graph_of(*signatures: dict, device: str = "cpu", storage_bytes: int = 4096) -> StepGraph:
    """One op for each signature, all reading one input; equal signatures share an entry."""
    distinct = [s for i, s in enumerate(signatures) if s not in signatures[:i]]
    num = len(signatures)
    return StepGraph(
        device=device,
        device_name="a desk",
        resident={"batch": storage_bytes},
        signatures=tuple(distinct),
        frames=(Frame(-1, "", 0),),
        storages=(
            Storage(0, storage_bytes, "input"),
            *(Storage(i + 1, storage_bytes, "activation", op=i) for i in range(num)),
        ),
        ops=tuple(
            Op(i, s["op"], 0, False, reads=(0,), makes=(i + 1,), signature=distinct.index(s))
            for i, s in enumerate(signatures)
        ),
        saved=(),
        events=tuple((RUN, i) for i in range(num)),
    )


OPAQUE = {"op": "aten.relu.default", "args": [{"opaque": "torch.ScriptObject"}], "kwargs": {}}


def test_the_larger_matmul_takes_longer_and_equal_signatures_equal_time():
    costs = measure(graph_of(mm(32), mm(256), mm(32)))

    small, large, small_again = costs.op_ms
    assert large > 5 * small > 0
    assert small == small_again
    assert costs.source == "measured"
    assert costs.device_name == allocator.device_name("cpu")


def test_the_overhead_of_a_dispatch_mode_is_measured_in_microseconds():
    costs = measure(graph_of(mm(8)))

    assert 0 < costs.dispatch_us < 500
    assert costs.record_us > 0 and costs.replay_us > 0


def test_the_tapes_own_work_costs_more_where_ops_leave_caches_full_of_their_data():
    def like(storage_bytes):
        return measure(graph_of(mm(8), storage_bytes=storage_bytes))

    small, large = like(4096), like(2**24)

    assert large.dispatch_us > small.dispatch_us
    assert large.record_us > small.record_us and large.replay_us > small.replay_us


def test_what_can_be_measured_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(graph_of(mm(8)))


def test_an_op_that_cannot_be_rebuilt_is_estimated_from_its_bytes_with_one_warning():
    with pytest.warns(EstimateWarning) as caught:
        small = measure(graph_of(OPAQUE, OPAQUE, mm(8)))
    with pytest.warns(EstimateWarning):
        large = measure(graph_of(OPAQUE, storage_bytes=2**30))

    assert len(caught) == 1
    assert str(caught[0].message) == (
        "2 of 3 op times are estimates from the bytes they move, not measured:\n"
        "  aten.relu.default: an argument is torch.ScriptObject: no way to make one."
    )
    assert small.op_ms[0] == small.op_ms[1] > 0
    assert large.op_ms[0] > 100 * small.op_ms[0]


def test_an_op_that_raises_on_synthetic_inputs_is_estimated():
    not_square = describe(aten.linalg_cholesky_ex.default, (torch.empty(3, 2),), {})

    with pytest.warns(EstimateWarning, match="linalg_cholesky_ex"):
        costs = measure(graph_of(not_square))

    assert costs.op_ms[0] > 0


def test_inputs_that_do_not_fit_are_never_made():
    huge = {"op": "aten.relu.default", "args": [{"t": [2**50], "stride": [1], "dtype": "float32", "device": "cpu"}]}

    with pytest.warns(EstimateWarning, match="not free here"):
        measure(graph_of(huge))


def test_an_op_that_takes_probabilities_is_measured():
    draw = describe(aten.bernoulli.default, (torch.rand(100),), {})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure(graph_of(draw)).op_ms[0] > 0


def test_an_op_that_changes_shapes_in_place_is_called_no_view_twice():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure(graph_of(describe(aten.unsqueeze_.default, (torch.rand(3), 0), {}))).op_ms[0] > 0


def test_the_random_state_and_the_grad_mode_are_as_before():
    drop = describe(aten.native_dropout.default, (torch.empty(100), 0.5, True), {})
    draw = describe(aten.normal_.default, (torch.empty(9),), {})
    before = torch.get_rng_state()

    measure(graph_of(drop, draw))

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


def test_progress_counts_distinct_signatures():
    seen = []

    measure(graph_of(mm(8), mm(16), mm(8)), progress=lambda done, total: seen.append((done, total)))

    assert seen == [(1, 2), (2, 2)]


def test_a_graph_without_signatures_is_estimated_whole():
    graph = graph_of(mm(8))
    bare = StepGraph(**{f: getattr(graph, f) for f in graph.__dataclass_fields__} | {"signatures": ()})

    with pytest.warns(EstimateWarning, match="carries no signatures"):
        assert measure(bare).op_ms[0] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_graph_for_a_device_that_is_not_here_is_refused_with_the_way_out():
    with pytest.raises(LowtideError, match="Measure where the device is"):
        measure(graph_of(mm(8), device="cuda"))


def test_no_repeats_is_an_error():
    with pytest.raises(ValueError, match="repeats=0"):
        measure(graph_of(mm(8)), repeats=0)
