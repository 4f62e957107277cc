"""What CUDA's kernels allocate by formula, beside what the caching allocator counted for the same calls."""

import json
from contextlib import contextmanager

import op_workspaces
import pytest
import torch

from lowtide.hollow import attention_workspaces, cuda_workspaces, reductions
from lowtide.hollow.cuda_workspaces import workspace_bytes
from lowtide.hollow.devices import TargetDevice, target_of
from lowtide.measurement.op_inputs import operator_named, rebuild

KNOWN = json.loads(op_workspaces.RESULTS.read_text())
# CUB's sizes are known for one kind of device, and to a KiB.
CUB = {"aten.sort.default", "aten.cumsum.default", "aten.index_put.default", "aten.embedding_dense_backward.default"}
DEVICES = {"h100": "h100", "a100": "a100-80gb", "l4": "l4"}


@contextmanager
def cudnn(enabled):
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def differing(device):
    """Calls whose formula gives other bytes than were counted."""
    target, found = target_of(DEVICES[device]), []
    with cudnn(False):
        for signature, counted in zip(KNOWN["calls"], KNOWN[device]["bytes"], strict=True):
            if counted is None or operator_named(signature["op"]) is None:
                continue  # that device has no such kernel, or this PyTorch no such operator
            func, args, _ = rebuild(signature, "meta")
            formula = workspace_bytes(func, tuple(args), target)
            near = signature["op"] in CUB and (device != "h100" or abs(formula - counted) <= 1024)
            if formula != counted and not near:
                found.append((signature["op"], counted, formula, signature["args"]))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_the_formulas_give_what_the_allocator_counted(device):
    wrong = differing(device)

    assert not wrong, f"{len(wrong)} of {len(KNOWN['calls'])}: " + "\n".join(map(str, wrong[:5]))


def test_the_table_has_every_formula_and_calls_that_need_memory():
    listed = {signature["op"] for signature in KNOWN["calls"]}
    packets = {op.rpartition(".")[0] for op in listed}

    for device in DEVICES:
        assert sum((count or 0) > 0 for count in KNOWN[device]["bytes"]) > len(KNOWN["calls"]) / 3
    for rule in ("aten.sum", "aten._softmax_backward_data", "aten.mm", "aten.index_put", "aten._grouped_mm",
                 "aten.convolution_backward", "aten._scaled_dot_product_efficient_attention_backward"):  # fmt: skip
        assert rule in packets and rule in cuda_workspaces._RULES


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (reductions, "_output_vector", lambda dims, kept: 1),
        (reductions, "_MOST_VALUES", 1 << 20),
        (attention_workspaces, "_splits", lambda *_: 1),
        (attention_workspaces, "_rounded_width", lambda width: width),
        (cuda_workspaces, "_is_taken_by_blas", lambda matrix: True),
        (cuda_workspaces, "_SMALL_EMBEDDING", 1 << 30),
        (cuda_workspaces, "_copy", lambda value, target, memory_format=None: 0),
    ],
)
def test_each_formula_is_seen_by_the_table(monkeypatch, module, name, broken):
    monkeypatch.setattr(module, name, broken)

    assert differing("h100")


def test_the_gradient_of_a_bias_takes_what_it_is_known_to_take():
    """100.7 MB for [4096, 3072] on an H100: 4 times the gradient in bfloat16, twice in float32."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(4096, 3072, dtype=dtype, device="meta")
        found = workspace_bytes(torch.ops.aten.sum.dim_IntList, (x, [0], True), target_of("h100"))
        assert round(found / 1e6, 1) == 100.7


def test_parts_of_a_reduction_of_more_than_2_gib_are_divided_alone():
    """Counted once by PyTorch 2.14's allocator."""
    counted = {
        (1 << 16, 1 << 14, 4): 268435968, (1 << 15, 1 << 15, 4): 268436480, (1 << 16, 20_000, 2): 327761408,
        (1 << 17, 1 << 14, 2): 536936960, (30_000, 40_000, 2): 307361792,
    }  # fmt: skip

    for (rows, columns, itemsize), size in counted.items():
        found = reductions.reduction_bytes(
            (rows, columns), (columns, 1), [0], target_of("h100"), element_bytes=itemsize
        )
        assert found == size


def test_without_known_multiprocessors_and_on_other_ops_nothing_is_taken():
    x = torch.empty(4096, 3072, device="meta")

    assert workspace_bytes(torch.ops.aten.sum.dim_IntList, (x, [0]), TargetDevice("cuda")) == 0
    assert workspace_bytes(torch.ops.aten.add.Tensor, (x, x), target_of("h100")) == 0


def test_cudnn_takes_what_nobody_tells():
    x, weight = torch.empty(2, 16, 32, 32, device="meta"), torch.empty(32, 16, 3, 3, device="meta")
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    with cudnn(True):
        assert workspace_bytes(torch.ops.aten.convolution.default, args, target_of("h100")) == 0
    with cudnn(False):
        assert workspace_bytes(torch.ops.aten.convolution.default, args, target_of("h100")) == 16 * 9 * 32 * 32 * 4


def test_a_convolution_copies_what_comes_in_another_memory_format():
    """A gradient from a sequence of patches has its channels last, whatever the image and the kernel have."""
    x, weight = torch.empty(8, 4, 32, 32, device="meta"), torch.empty(32, 4, 4, 4, device="meta")
    grad = torch.empty(8, 64, 32, device="meta").transpose(1, 2).view(8, 32, 8, 8)
    rest = ([32], [4, 4], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
    last, backward = {"memory_format": torch.channels_last}, torch.ops.aten.convolution_backward.default

    with cudnn(True):
        found = [
            workspace_bytes(backward, (grad, *given, *rest), target_of("h100"))
            for given in ((x, weight), (x.to(**last), weight), (x.double(), weight.double().to(**last)))
        ]
    assert found == [grad.nbytes, weight.nbytes, grad.nbytes + 2 * weight.nbytes]
