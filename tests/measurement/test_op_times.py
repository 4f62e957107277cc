"""Times of ops: measured on a clock that the test sets, estimated with a warning where an op cannot run."""

import time
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.device.names import device_name
from lowtide.errors import LowtideError
from lowtide.graph.step_graph import RUN, Frame, Op, StepGraph, Storage
from lowtide.measurement import op_times
from lowtide.measurement.op_inputs import describe
from lowtide.measurement.op_times import RECORD_US, REPLAY_US, WATCH_US, EstimateWarning, measure

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


class Clock(TorchDispatchMode):
    """Processor time spent by ops and modes only: a matmul by its size, a mode 4 us, and 20 us in cold caches."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now, self.cold = 0.0, False
        for name in ("process_time", "perf_counter"):
            patch.setattr(time, name, lambda: self.now)
        clock = self

        class SlowMode(op_times.BaseTorchDispatchMode):
            def __torch_dispatch__(self, *call):
                clock.now += 20e-6 if clock.cold else 4e-6
                return super().__torch_dispatch__(*call)

        patch.setattr(op_times, "BaseTorchDispatchMode", SlowMode)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.now += 1e-9 * args[0].numel() * args[1].shape[1] if func is aten.mm.default else 1e-6
        self.cold = func is aten.add_.Tensor and args[0].numel() > 2**20  # the sweep
        return func(*args, **(kwargs or {}))


def test_a_matmul_takes_its_time_and_equal_signatures_equal_time(monkeypatch):
    with Clock(monkeypatch):
        costs = measure(graph_of(mm(32), mm(256), mm(32)))

    small, large = 1e-6 * 32**3, 1e-6 * 256**3
    assert costs.op_ms == pytest.approx((small, large, small))
    assert costs.source == "measured"
    assert costs.device_name == device_name("cpu")


def test_the_tapes_own_work_costs_more_where_ops_leave_caches_full_of_their_data(monkeypatch):
    with Clock(monkeypatch):
        small = measure(graph_of(mm(8)))
        large = measure(graph_of(mm(8), storage_bytes=2**24))

    assert (small.dispatch_us, large.dispatch_us) == pytest.approx((WATCH_US + 4, WATCH_US + 20))
    assert (small.record_us, large.record_us) == pytest.approx((RECORD_US, 5 * RECORD_US))
    assert (small.replay_us, large.replay_us) == pytest.approx((REPLAY_US, 5 * REPLAY_US))


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
