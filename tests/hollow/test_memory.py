"""Hollow tensors: what the private constructor of PyTorch is relied on for, and that nothing of a model moves."""

import gc
import weakref

import pytest
import torch
from torch import nn

import lowtide
from lowtide.hollow.memory import UNKNOWN, hollow, is_hollow, mark_origin, origin_of


def test_a_storage_over_an_address_is_a_cpu_storage_of_any_size_that_frees_nothing():
    """Pins ``torch._C._construct_storage_from_data_pointer``, which is private."""
    address = torch.zeros(16)

    storage = torch._C._construct_storage_from_data_pointer(address.data_ptr(), torch.device("cpu"), 10 << 40)

    assert (storage.nbytes(), storage.device.type, storage.data_ptr()) == (10 << 40, "cpu", address.data_ptr())
    died = weakref.ref(storage)
    del storage
    assert died() is None
    assert address.sum() == 0


def test_a_hollow_tensor_is_a_plain_tensor_with_a_storage_of_its_own():
    one, two = (hollow((1 << 20, 1 << 20), (1 << 20, 1), torch.float32) for _ in range(2))

    assert type(one) is torch.Tensor
    assert one.untyped_storage().nbytes() == 1 << 42
    assert one.untyped_storage()._cdata != two.untyped_storage()._cdata
    assert one.data_ptr() != two.data_ptr()
    assert is_hollow(one) and is_hollow(one[3:5].t()) and not is_hollow(torch.ones(3))


def test_a_stray_read_finds_zeros_and_a_stray_write_hurts_nobody():
    tensor, mine = hollow((1000,), (1,), torch.float32), torch.ones(1000)

    assert tensor.numpy().sum() == 0
    tensor.numpy()[:] = 7

    assert mine.sum() == 1000


def test_where_values_come_from_outlives_pythons_hold_on_a_storage():
    tensor = torch.zeros(3)
    mark_origin(tensor, UNKNOWN)
    gc.collect()

    assert origin_of(tensor[1:]) == UNKNOWN
    assert origin_of(torch.zeros(3)) == ""


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_traced_without_memory_is_as_it_was(fails):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.LSTM(64, 8))
    model[0].weight.grad = torch.ones(64, 64)
    before = {name: (t, t.detach().clone()) for name, t in model.state_dict(keep_vars=True).items()}
    batch, generator = torch.randn(3, 64), torch.get_rng_state()

    def step(model, batch):
        loss = model(batch)[0].square().mean()
        return 1 / 0 if fails else loss

    if fails:
        with pytest.raises(lowtide.StepError, match="division by zero"):
            lowtide.trace(model, batch, step=step, device="cpu")
    else:
        assert lowtide.trace(model, batch, step=step, device="cpu").resident["gradients"]

    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert model[0].weight.grad.sum() == 64 * 64
    assert not any(map(is_hollow, model[3]._flat_weights))
    assert torch.equal(torch.get_rng_state(), generator)
