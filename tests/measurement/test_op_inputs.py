"""An operator call becomes JSON and comes back as a call of the same shapes."""

import json
import math

import pytest
import torch

from lowtide.measurement.op_inputs import NotRebuildableError, describe, rebuild, tensor_bytes

DEVICE = torch.get_default_device().type
aten = torch.ops.aten

CALLS = [
    (aten.mm.default, (torch.randn(2, 3), torch.randn(3, 4)), {}),
    (aten.mm.default, (torch.randn(3, 2).t(), torch.randn(4, 3).t()), {}),
    (aten.add.Tensor, (torch.randn(1, 3).expand(5, 3), 1), {"alpha": 2}),
    (aten.cat.default, ([torch.randn(2), torch.randn(3)],), {}),
    (aten.embedding.default, (torch.randn(10, 4), torch.tensor([[1, 9]])), {}),
    (aten._to_copy.default, (torch.randn(3),), {"dtype": torch.bfloat16, "device": torch.device(DEVICE)}),
    (aten.clone.default, (torch.randn(1, 2, 3, 3),), {"memory_format": torch.channels_last}),
    (aten.masked_fill.Scalar, (torch.randn(3), torch.tensor([True, False, True]), -math.inf), {}),
    (aten.clamp.default, (torch.randn(3), math.nan, None), {}),
    (aten.index.Tensor, (torch.randn(4, 4), [None, torch.tensor([3])]), {}),
    (aten.view.default, (torch.randn(2, 3), torch.Size([3, 2])), {}),
    (aten.mul.Scalar, (torch.randn(3, dtype=torch.complex64), 1 + 2j), {}),
    (aten.gelu.default, (torch.randn(3),), {"approximate": "tanh"}),
    (aten.zeros.default, ([2, 0],), {"layout": torch.strided, "pin_memory": False}),
    (aten.sum.default, (torch.randn(0, 3),), {}),
    (aten.relu.default, (torch.randn(()),), {}),
    (aten.bernoulli.default, (torch.rand(3),), {"generator": torch.Generator(DEVICE)}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_a_call_comes_back_from_json_with_results_of_the_same_layout(call):
    func, args, kwargs = call
    signature = describe(func, args, kwargs)

    again, new_args, new_kwargs = rebuild(json.loads(json.dumps(signature, allow_nan=False)), DEVICE)
    expected, got = func(*args, **kwargs), again(*new_args, **new_kwargs)

    assert again is func
    assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
    new_kwargs |= {k: v for k, v in kwargs.items() if k == "generator"}  # rebuilt as None, the default one
    assert describe(func, new_args, new_kwargs) == signature


def test_equal_calls_have_equal_signatures_whatever_the_values():
    one, two = (describe(aten.mm.default, (torch.randn(2, 2), torch.randn(2, 2)), {}) for _ in range(2))

    assert one == two
    assert one == {
        "op": "aten.mm.default",
        "args": [{"t": [2, 2], "stride": [2, 1], "dtype": "float32", "device": DEVICE}] * 2,
        "kwargs": {},
    }


def test_what_torch_takes_beside_tensors_is_described():
    size = [torch.Size([2, 3]), (1, [2]), {"a": 1.5}, 2 - 1j, -math.inf]

    described = describe("some.op.default", size, {})["args"]

    assert described == [
        {"l": [2, 3]},
        {"l": [1, {"l": [2]}]},
        {"d": {"a": 1.5}},
        {"complex": [2.0, -1.0]},
        {"inf": "-inf"},
    ]


def test_an_expanded_tensor_takes_the_memory_it_spans_not_its_shape():
    signature = describe(aten.relu.default, (torch.randn(1, 3).expand(1000, 3),), {})

    _, (x,), _ = rebuild(signature, DEVICE)

    assert tensor_bytes(signature) == x.untyped_storage().nbytes() == 12


def test_synthetic_values_are_probabilities_zero_indices_and_true():
    args = (
        torch.randn(600_001),
        torch.tensor([5, 6]),
        torch.tensor([False]),
        torch.zeros(4, dtype=torch.float8_e4m3fn),
    )
    _, (x, i, b, f), _ = rebuild(describe(aten.relu.default, args, {}), DEVICE)

    assert x.min() >= 0.75 and x.max() <= 1 and 0.07 < x.std() < 0.075
    assert x[-10:].unique().numel() == 10
    assert i.tolist() == [0, 0]
    assert b.tolist() == [True]
    assert f.dtype == torch.float8_e4m3fn


def test_rebuilding_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()

    rebuild(describe(aten.relu.default, (torch.randn(3),), {}), DEVICE)
    torch.set_rng_state(before)
    rebuild(describe(aten.relu.default, (torch.empty(3),), {}), DEVICE)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        (describe(aten.relu.default, (object(),), {}), "builtins.object"),
        (describe(aten.relu.default, (torch.eye(2, device="cpu").to_sparse(),), {}), "torch.Tensor"),
        ({"op": "aten.nothing.default", "args": []}, "not an operator"),
        ({"op": "os.system", "args": ["true"]}, "not an operator"),
        ({"op": "nonsense", "args": []}, "not an operator"),
        ({"op": "_c10d_functional.all_reduce.default", "args": []}, "collective"),
        ({"op": "aten.relu.default", "args": [{"t": [1], "stride": [1], "dtype": "Tensor", "device": "cpu"}]}, "dtype"),
        ({"op": "aten.relu.default", "args": [{"what": 1}]}, "no way to make one"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["op"],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(signature, reason):
    with pytest.raises(NotRebuildableError, match=reason):
        rebuild(signature, "cpu")
