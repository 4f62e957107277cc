"""What each entry of a record takes on a device, and what is said of the step: records written by hand."""

import pytest

from lowtide.estimation.device_table import device_named
from lowtide.estimation.roofline import LAUNCH_US
from lowtide.pretending.links import links_of
from lowtide.pretending.op_times import OpTimes
from lowtide.pretending.settings import Measured, PretendError, measured
from lowtide.pretending.step_record import Entry, StepRecord, step_record
from lowtide.pretending.step_time import step_time

A100 = device_named("a100-80gb")


def tensor(*shape, dtype="bfloat16"):
    stride, step = [], 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= size
    return {"t": list(shape), "stride": stride, "dtype": dtype, "device": "cuda"}


def call(op, *args, **kwargs):
    return {"op": op, "args": list(args), "kwargs": kwargs}


def record(*steps, graphs=None, host_ms=1.0, tf32=False):
    """Of ``(kind, signature or None, numbers...)``, 10 us of the host apart."""
    signatures, entries = [], []
    for i, (kind, told, *numbers) in enumerate(steps):
        if told is not None:
            signatures.append(told)
            numbers.insert(0, len(signatures) - 1)
        entries.append(Entry(kind, 10_000 * i, 0, *numbers))
    return StepRecord(tuple(entries), tuple(signatures), graphs or {}, 1_000_000, int(host_ms * 1e6), tf32)


def times_of(made, device=A100):
    times = OpTimes(made, device, links_of(device))
    return [times.op_time(entry) for entry in made.entries]


MM = call("aten.mm.default", tensor(8192, 8192), tensor(8192, 8192))


def test_a_product_takes_its_arithmetic_at_less_than_the_data_sheets_rate():
    (time,) = times_of(record(("op", MM, 2 * 8192**2, 0)))

    assert time.flops == 2 * 8192**3 and time.kind == "matmul"
    at_peak_us = time.flops / A100.flops_per_s("bfloat16") * 1e6
    assert at_peak_us < time.us(1.0) < 2 * at_peak_us
    assert time.us(0.5) == pytest.approx(2 * time.us(1.0))


def test_float32_products_are_faster_where_they_may_be_rounded():
    product = call("aten.mm.default", tensor(4096, 4096, dtype="float32"), tensor(4096, 4096, dtype="float32"))
    (exact,), (rounded,) = (times_of(record(("op", product, 4 * 4096**2, 0), tf32=tf32)) for tf32 in (False, True))

    assert rounded.us(1.0) < exact.us(1.0) / 3


def test_what_moves_bytes_takes_what_it_reads_and_writes():
    one = tensor(1 << 28)
    add, copied = times_of(record(("op", call("aten.add.Tensor", one, one), 1 << 29, 1),
                                  ("op", call("aten.copy_.default", one, one), 1 << 29, 1)))  # fmt: skip

    assert add.memory_us == pytest.approx(1.5 * copied.memory_us)  # copy_ does not read what it writes
    assert add.us(0.1) == add.us(1.0)


def test_an_op_without_kernels_is_a_copy_or_a_memset_that_has_an_entry_of_its_own():
    made = record(("op", call("aten.zero_.default", tensor(1 << 20)), 1 << 21, 0), ("fill", None, 1 << 21))

    assert len(OpTimes(made, A100, links_of(A100)).tasks()) == 1


def test_nothing_is_shorter_than_its_launches():
    (time,) = times_of(record(("op", call("aten._foreach_add_.Scalar", {"l": [tensor(1)] * 3}, 1), 6, 3)))

    assert time.us(1.0) == 3 * LAUNCH_US


def test_a_loss_reads_one_number_of_each_row():
    logits, ids = tensor(8192, 50304, dtype="float32"), tensor(8192, dtype="int64")
    (time,) = times_of(record(("op", call("aten.nll_loss_forward.default", logits, ids, None, 1, -100), 8, 1)))

    assert time.us(1.0) < 50


def test_convolutions_of_pytorchs_own_kernels_count_their_products():
    images, weight = tensor(8, 64, 56, 56), tensor(128, 64, 3, 3)
    made = 8 * 128 * 56 * 56
    forward = call(
        "aten._slow_conv2d_forward.default", images, weight, {"l": [3, 3]}, None, {"l": [1, 1]}, {"l": [1, 1]}
    )
    backward = call("aten._slow_conv2d_backward.output_mask", tensor(8, 128, 56, 56), images, weight, {"l": [3, 3]})
    there, back = times_of(record(("op", forward, 2 * made, 16), ("op", backward, 2 * made, 32)))

    assert there.flops == 2 * made * 64 * 9
    assert back.flops == 2 * there.flops


def test_kernels_of_triton_take_the_bytes_of_their_tensors_or_what_their_template_computes():
    moves = {"op": "triton", "name": "triton_poi_fused_add_0", "shapes": [[[1 << 28], 2]] * 3, "again_bytes": 0}
    product = {"op": "triton", "name": "triton_tem_fused_mm_1", "again_bytes": 0,
               "shapes": [[[4096, 1024], 2], [[1024, 2048], 2], [[4096, 2048], 2]]}  # fmt: skip
    attention = {"op": "triton", "name": "triton_tem_fused_flex_attention_2", "again_bytes": 0,
                 "shapes": [[[2, 16, 4096, 128], 2]] * 4}  # fmt: skip
    moving, multiplying, attending = times_of(record(*(("kernel", told) for told in (moves, product, attention))))

    plain = times_of(record(("op", call("aten.add.Tensor", tensor(1 << 28), tensor(1 << 28)), 1 << 29, 1)))[0]
    assert moving.us(1.0) == pytest.approx(plain.us(1.0))
    assert multiplying.flops == 2 * 4096 * 1024 * 2048
    assert attending.flops == 2 * 2 * 16 * 4096 * 4096 * 128  # half of the scores, two products


def test_a_graph_is_launched_at_once_and_its_kernels_follow_one_another():
    work = call("aten.add.Tensor", tensor(1 << 20), tensor(1 << 20))
    captured = tuple(Entry("op", i, 5, 0, 1 << 21, 1) for i in range(50))
    made = StepRecord((Entry("replay", 0, 0, 9),), (work,), {9: captured}, 1000, 1000)
    tasks = OpTimes(made, A100, links_of(A100)).tasks()

    assert len(tasks) == 50 and {task.stream for task in tasks} == {0}
    assert tasks[0].launches > 0 and not any(task.launches for task in tasks[1:])


def test_the_host_takes_what_it_takes_where_nothing_is_recorded():
    made = record(("op", MM, 1 << 27, 1), ("op", MM, 1 << 27, 1), host_ms=5.0)

    assert [task.at_us for task in OpTimes(made, A100, links_of(A100)).tasks()] == [0.0, pytest.approx(50.0)]


def test_a_step_says_its_share_of_the_data_sheet_with_and_without_what_is_computed_again():
    made = record(("op", MM, 1 << 27, 1, 0), *[("op", MM, 1 << 27, 1, 1)] * 3)

    time = step_time(made, A100)

    assert time.flops == 4 * 2 * 8192**3 and time.model_flops == 3 * 2 * 8192**3
    assert time.hfu == pytest.approx(time.flops / time.step_ms * 1e3 / 312e12, rel=0.01)
    assert time.mfu == pytest.approx(0.75 * time.hfu)
    assert time.slowest[0][0] == "aten.mm" and time.slowest[0][2] == 4


def test_tokens_are_those_that_the_largest_embedding_is_asked_for():
    ids = tensor(4, 128, dtype="int64")
    positions = call("aten.index_select.default", tensor(128, 64), 0, tensor(128, dtype="int64"))
    tokens = call("aten.index_select.default", tensor(1000, 64), 0, tensor(512, dtype="int64"))
    made = record(("op", positions, 1, 1), ("op", tokens, 1, 1), ("op", tokens, 1, 1))

    assert step_time(made, A100).tokens == 2 * 512
    assert step_time(made, A100, tokens=7).tokens == 7
    assert step_time(record(("op", call("aten.embedding.default", tensor(1000, 64), ids), 1, 1)), A100).tokens == 512
    assert step_time(record(("op", MM, 1, 1)), A100).tokens is None


def test_a_measured_step_says_how_fast_products_are():
    made = record(*[("op", MM, 1 << 27, 1)] * 10)
    plain = step_time(made, A100)

    anchored = step_time(made, A100, anchor=Measured(1.25 * plain.step_ms, "ms"))

    assert anchored.step_ms == pytest.approx(1.25 * plain.step_ms, rel=2e-3)
    assert anchored.speed == pytest.approx(0.8, rel=0.02) and anchored.is_anchored
    assert step_time(made, A100, anchor=Measured(anchored.speed, "speed")).step_ms == anchored.step_ms


@pytest.mark.parametrize("ms", [0.01, 1e6])
def test_a_measured_step_that_no_speed_explains_is_refused(ms):
    with pytest.raises(PretendError, match="Was it this script"):
        step_time(record(*[("op", MM, 1 << 27, 1)] * 10), A100, anchor=Measured(ms, "ms"))


def test_a_rate_needs_to_know_of_what():
    with pytest.raises(PretendError, match="--tokens"):
        step_time(record(("op", MM, 1, 1)), A100, anchor=measured("100 tokens/s"))


def test_what_was_measured_can_be_written_in_several_ways():
    assert measured("10,643 tokens/s") == Measured(10643, "tokens/s")
    assert measured("187 ms") == Measured(187, "ms") and measured("1.5 s") == Measured(1500, "ms")
    assert measured("8 images / s").step_ms(16) == 2000
    assert measured("speed 0.83") == Measured(0.83, "speed")


def test_a_record_is_read_from_its_file():
    body = {"took_ns": 9, "signatures": [MM], "graphs": {"3": [["op", 1, 0, 0, 2, 1, 0, 0]]},
            "entries": [["replay", 5, 0, 3, 0, 0, 0, 0]]}  # fmt: skip

    made = step_record(body, {"host_ns": [8, 7], "tf32": True})

    assert made.host_ns == 7 and made.tf32 and made.graphs[3][0].kind == "op" and made.entries[0].a == 3
