"""Estimated op times: work counted exactly, times that behave like a roofline, a machine that measures itself."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

import lowtide
from lowtide import cli
from lowtide.estimation import calibration, op_work
from lowtide.estimation.device_table import device_named
from lowtide.estimation.op_classes import _WORDS, class_of
from lowtide.estimation.op_work import Work, work_of
from lowtide.estimation.roofline import call_ms, compute_s, memory_s
from lowtide.graph import json_format
from lowtide.measurement.op_inputs import describe

aten = torch.ops.aten


@pytest.fixture(scope="module")
def graph():
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256))
    return lowtide.trace(model, (torch.randn(512, 256),))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.addmm.default", "matmul"),
        ("aten._grouped_mm.default", "matmul"),
        ("aten.native_layer_norm_backward.default", "norm"),
        ("aten._scaled_dot_product_flash_attention.default", "attention"),
        ("aten.convolution_backward.default", "conv"),
        ("aten.masked_fill.Scalar", "elementwise"),
        ("aten.embedding_dense_backward.default", "gather"),
        ("aten._softmax_backward_data.default", "softmax"),
        ("aten.gelu.default", "transcendental"),
        ("aten._to_copy.default", "copy"),
        ("aten.never_heard_of.default", "elementwise"),
    ],
)
def test_ops_have_the_class_of_what_they_do(name, kind):
    assert class_of(name) == kind
    assert kind in {name for name, _ in _WORDS}


def test_flops_are_exact_and_nothing_is_allocated_for_them():
    # 2^46 bytes each: rebuilding them would not fit anywhere.
    huge = {"t": [1 << 22, 1 << 22], "stride": [1 << 22, 1], "dtype": "float32", "device": "cpu"}

    work = work_of({"op": "aten.mm.default", "args": [huge, huge], "kwargs": {}})

    assert work.flops == 2 * (1 << 22) ** 3
    assert work.read_bytes == 2 * 4 * (1 << 44)


def laid(*sizes, order=None, dtype="bfloat16", gap=1):
    """A tensor's signature; ``order``: its dimensions, the innermost first."""
    strides, step = [0] * len(sizes), gap
    for i in order or reversed(range(len(sizes))):
        strides[i], step = step, step * sizes[i]
    return {"t": list(sizes), "stride": strides, "dtype": dtype, "device": "cuda"}


@pytest.mark.parametrize(
    ("op", "tensors", "access"),
    [
        ("aten.add.Tensor", (laid(64, 32), laid(64, 32)), ""),
        ("aten.add.Tensor", (laid(64, 32, order=(0, 1)), laid(64, 32, order=(0, 1))), ""),
        ("aten.add.Tensor", (laid(64, 32), laid(64, 32, order=(0, 1))), "strided"),
        ("aten.mul.Tensor", (laid(64, 32), laid(32)), "strided"),
        ("aten.mul.Tensor", (laid(64, 32), laid()), ""),
        ("aten.neg.default", (laid(64, 32, gap=2),), "strided"),
        ("aten.add.Tensor", (laid(64, 32), laid(64, 32, dtype="float32")), "strided"),
        ("aten.copy_.default", (laid(64, 32), laid(64, 32, dtype="float32")), "cast"),
        ("aten.copy_.default", (laid(64, 32), laid(64, 32)), ""),
        ("aten.native_dropout_backward.default", (laid(64, 32), laid(64, 32, dtype="bool")), ""),
        ("aten.native_layer_norm.default", (laid(64, 32), {"l": [32]}, laid(32), laid(32), 1e-5), ""),
        ("aten._foreach_add_.List", ({"l": [laid(64, 32), laid(8)]}, {"l": [laid(64, 32), laid(8)]}), ""),
        ("aten.cat.default", ({"l": [laid(64, 16), laid(64, 32, gap=2)]},), "strided"),
        ("aten.cat.default", ({"l": [laid(64, 16), laid(64, 32)]},), ""),
    ],
)
def test_how_an_elementwise_op_finds_its_numbers(op, tensors, access):
    work = work_of({"op": op, "args": list(tensors), "kwargs": {}})

    assert work.access == access
    assert work.elements == (0 if not access else 64 * 48 if "cat" in op else 64 * 32)


def test_what_is_bound_by_finding_its_numbers_takes_as_long_as_that_on_a_device_that_was_measured():
    known, other = device_named("h200"), device_named("a100")
    plain, cast = ({"op": "aten.copy_.default", "args": [laid(8192, 4096), laid(8192, 4096, dtype=dtype)], "kwargs": {}}
                   for dtype in ("bfloat16", "float32"))  # fmt: skip

    assert call_ms(cast, 0, known) == pytest.approx(8192 * 4096 / known.elements_per_s["cast"] * 1e3)
    assert call_ms(plain, 0, known) < call_ms(cast, 0, known) / 1.5
    assert not other.elements_per_s and call_ms(cast, 0, other) < 1.6 * call_ms(plain, 0, other)  # its bytes alone


@pytest.mark.parametrize(
    ("tokens", "width", "words", "is_odd"), [(8192, 1024, 50257, True), (8192, 1024, 50258, False), (8191, 8, 8, False)]
)
def test_products_with_rows_of_an_odd_length_are_of_a_class_of_their_own(tokens, width, words, is_odd):
    weight = laid(words, width)
    turned = {**weight, "t": [width, words], "stride": [1, width]}
    above = laid(tokens, words)
    above_turned = {**above, "t": [words, tokens], "stride": [1, words]}
    x = laid(tokens, width)
    products = [(x, turned), (above, weight), (above_turned, x)]
    works = [work_of({"op": "aten.mm.default", "args": list(pair), "kwargs": {}}) for pair in products]

    assert [work.is_odd for work in works] == [is_odd] * 3
    in_32_bits = [{**t, "dtype": "float32"} for t in products[0]]
    assert not work_of({"op": "aten.mm.default", "args": in_32_bits, "kwargs": {}}).is_odd
    times = [call_ms({"op": "aten.mm.default", "args": list(pair), "kwargs": {}}, 0, device_named("h200"))
             for pair in products]  # fmt: skip
    even = work_of({"op": "aten.mm.default", "args": [x, laid(width, words + words % 2)], "kwargs": {}})
    if is_odd:
        assert min(times) > 5 * compute_s(even, device_named("h200")) * 1e3


def test_shares_that_were_measured_on_a_device_are_those_of_the_closest_class():
    device = dataclasses.replace(
        device_named("a100"), shares={"norm": ((1, 0.5),), "norm_backward": ((1, 0.25),), "matmul.float32": ((1, 0.9),)}
    )
    forward, backward = Work("norm", "float32", 0, 0), Work("norm", "float32", 0, 0, variant="backward")
    moved = 1 << 30

    assert memory_s(forward, moved, device) == pytest.approx(moved / device.bandwidth_bytes_per_s / 0.5)
    assert memory_s(backward, moved, device) == pytest.approx(moved / device.bandwidth_bytes_per_s / 0.25)
    product = Work("matmul", "float32", 10**12, 0, variant="nt")
    assert compute_s(product, device) == pytest.approx(10**12 / device.flops_per_s("float32") / 0.9)
    in_16_bits = dataclasses.replace(product, dtype="bfloat16")
    assert compute_s(in_16_bits, device) == compute_s(in_16_bits, device_named("a100"))
    assert memory_s(product, moved, device) == memory_s(product, moved, device_named("a100"))


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention_is_counted_where_the_registry_cannot(monkeypatch, kv_heads):
    """PyTorch 2.11's has no formula for fewer heads of keys, so attention took its bytes alone."""
    q, k, many = laid(2, 8, 128, 64), laid(2, kv_heads, 256, 64), laid(2, 8, 256, 64)
    stats, seed = laid(2, 8, 128, dtype="float32"), laid(2, dtype="int64")
    name = "aten._scaled_dot_product_flash_attention{}.default"

    def flops(keys):
        forward = [q, keys, keys, 0.0, False]
        backward = [q, q, keys, keys, q, stats, None, None, 128, 256, 0.0, False, seed, seed]
        return [work_of({"op": name.format(of), "args": args, "kwargs": {}}).flops
                for of, args in (("", forward), ("_backward", backward))]  # fmt: skip

    registered = flops(many)
    assert registered == [2 * 2 * 8 * 128 * 256 * (n * 64) for n in (2, 5)]

    def without(*_args, **_kwargs):
        raise AssertionError("heads differ")

    monkeypatch.setattr(op_work, "flop_registry", dict.fromkeys(flop_registry, without))
    assert flops(k) == registered


def test_attention_on_cpu_counts_two_products_forward_and_five_backward():
    q = torch.rand(2, 3, 8, 16, device="cpu")
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, log_sum = forward(q, q, q)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    product = 2 * 2 * 3 * 8 * 8 * 16
    assert work_of(describe(forward, [q, q, q], {})).flops == 2 * product
    assert work_of(describe(backward, [q, q, q, q, out, log_sum, 0.0, False], {})).flops == 5 * product


@pytest.mark.parametrize(("queries", "keys", "scores"), [(4, 4, 10), (6, 4, 18), (2, 8, 3)])
def test_causal_attention_counts_the_scores_up_to_each_query(queries, keys, scores):
    q, k = torch.rand(2, 3, queries, 16), torch.rand(2, 3, keys, 16)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default

    whole, causal = (work_of(describe(forward, [q, k, k, 0.0, is_causal], {})).flops for is_causal in (False, True))
    assert causal == whole * scores // (queries * keys) == 2 * 2 * 2 * 3 * scores * 16
    assert work_of(describe(forward, [q, k, k], {"is_causal": True})).flops == causal


def test_backward_of_causal_attention_counts_them_too():
    q = torch.rand(2, 3, 8, 16, device="cpu")
    out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    whole, causal = (
        work_of(describe(backward, [q, q, q, q, out, log_sum, 0.0, is_causal], {})).flops for is_causal in (False, True)
    )
    assert causal == whole * 36 // 64


def test_large_matrix_products_have_shares_of_their_own_on_a100_and_h100():
    weights = torch.nn.Sequential(nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16, device="meta"))
    graph = lowtide.trace(weights, torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta"), device="cuda")

    shares = []
    for name in ("a100-80gb", "h100", "rtx3090"):
        device = device_named(name)
        op = next(op for op in graph.ops if op.name == "aten.mm.default")
        at_peak_ms = 1e3 * 2 * 8192**3 / device.matrix_flops["bfloat16"]
        shares.append(at_peak_ms / lowtide.estimate(graph, device=name).op_ms[op.id])
    assert shares == pytest.approx([0.69, 0.52, 0.75], rel=0.02)


def test_experts_count_the_rows_that_each_of_them_takes():
    x, weights, offsets = torch.rand(32, 8), torch.rand(4, 8, 16), torch.tensor([8, 16, 24, 32], dtype=torch.int32)

    assert work_of(describe(aten._grouped_mm.default, [x, weights, offsets], {})).flops == 2 * 32 * 8 * 16


def test_an_expanded_tensor_is_read_once():
    x = torch.rand(8, 1).expand(8, 100)

    assert work_of(describe(aten.add.Tensor, [x, x], {})).read_bytes == 2 * 8 * 4


def test_transposed_operands_are_told_apart():
    x = torch.rand(4, 8)

    assert work_of(describe(aten.mm.default, [x, x.t()], {})).variant == "nt"
    assert work_of(describe(aten.mm.default, [x.t(), x], {})).variant == "tn"


def test_faster_devices_have_shorter_steps_and_the_error_is_stated():
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256))
    graph = lowtide.trace(model, (torch.randn(4096, 256),))  # with few rows both wait for the host
    h100, t4 = (lowtide.estimate(graph, device=name) for name in ("h100", "t4"))

    assert 0 < h100.plain_step_ms < t4.plain_step_ms
    assert h100.source == "estimated" and h100.device_name == "NVIDIA H100 SXM 80 GB"
    assert 0 < h100.error_fraction < 1
    assert len(h100.op_ms) == len(graph.ops)
    assert h100.links["host"].fetch_bytes_per_s < 64e9


def test_a_large_product_takes_its_flops_at_the_matrix_rate():
    model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    graph = lowtide.trace(model, (torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True),))
    signatures = [
        {**s, "args": [{**a, "t": [8192, 8192], "stride": [8192, 1]} if isinstance(a, dict) else a for a in s["args"]]}
        if "mm" in s["op"]
        else s
        for s in graph.signatures
    ]
    (op,) = [op for op in graph.forward_ops if "mm" in op.name]
    costs = lowtide.estimate(dataclasses.replace(graph, signatures=tuple(signatures)), device="h100")

    at_peak_ms = 2 * 8192**3 / 989.4e12 * 1e3
    assert at_peak_ms < costs.op_ms[op.id] < 2 * at_peak_ms


def test_estimated_costs_plan_and_survive_json(graph):
    costs = lowtide.estimate(graph, device="a100-80gb")

    assert json_format.costs_from_dict(json_format.costs_to_dict(costs)) == costs
    assert lowtide.solve(graph, costs, budget="95%").predicted_peak_bytes > 0


def test_an_unknown_device_is_a_named_error(graph):
    with pytest.raises(lowtide.LowtideError, match="Nearest: h100"):
        lowtide.estimate(graph, device="h-100-sxmm")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_SQUARES", (64, 256))
        patch.setattr(calibration, "_COUNTS", (1 << 10, 1 << 17))
        patch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        before = torch.get_rng_state(), torch.get_num_threads()
        patch.setattr(calibration, "_CONVOLUTIONS", ((3, 64, 64, 7, 2), (64, 64, 24, 3, 1)))
        patch.setattr(calibration, "_CALL_S", 0.005)
        assert cli.main(["calibrate", "--json"]) == 0
        device = device_named("here")
        assert torch.equal(torch.get_rng_state(), before[0]) and torch.get_num_threads() == before[1]
    return device


def test_this_machine_measures_itself_and_predicts_its_step(calibrated, graph):
    costs = lowtide.estimate(graph, device=calibrated)
    measured = lowtide.measure(graph)

    # The bound is wide: the tests' machine may be busy. benchmarks/estimate.py has the numbers.
    assert 0.4 < costs.plain_step_ms / measured.plain_step_ms < 2.5
    assert all(rate > 0 for points in calibrated.rates.values() for _, rate in points)


def test_more_work_takes_longer_on_the_measured_machine(calibrated):
    def step_ms(rows):
        model = nn.Linear(512, 512)
        return lowtide.estimate(lowtide.trace(model, (torch.randn(rows, 512),)), device=calibrated).plain_step_ms

    assert step_ms(128) < step_ms(512) < step_ms(2048)
