"""Generators are a seed and an offset, apart from the CPU's."""

import pytest
import torch
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from accelerator.schedules import LATE


def test_the_state_is_a_seed_and_an_offset(device):
    torch.manual_seed(5)  # seeds every device
    generator = device.module.default_generators[0]

    torch.rand(10, device="standin")

    state = generator.get_state()
    assert state.dtype == torch.uint8 and state.view(torch.int64).tolist() == [5, 12]


def test_a_state_set_again_gives_the_same_numbers(device):
    state = device.module.get_rng_state()
    first, second = torch.randn(5, device="standin"), torch.randn(5, device="standin")
    device.module.set_rng_state(state)

    assert torch.randn(5, device="standin").equal(first)
    assert not first.equal(second)


def test_numbers_are_those_of_when_the_op_was_called(device):
    with device.schedule(LATE, LATE):
        state = device.module.get_rng_state()
        late = torch.rand(5, device="standin")
        device.module.set_rng_state(state)
        again = torch.rand(5, device="standin")
        assert again.equal(late)


def test_the_cpu_generator_is_left_alone(device):
    before = torch.get_rng_state()
    masked = dropout(torch.ones(64, device="standin"))
    torch.randperm(9, device="standin")
    assert torch.get_rng_state().equal(before)
    assert 0 < masked.eq(0).sum() < 64


def test_a_generator_of_its_own(device):
    first, second = (torch.Generator("standin").manual_seed(1) for _ in range(2))
    before = device.module.get_rng_state()
    assert torch.rand(3, device="standin", generator=first).equal(torch.rand(3, device="standin", generator=second))
    assert device.module.get_rng_state().equal(before)


def test_a_generator_of_another_device_is_refused(device):
    with pytest.raises(RuntimeError, match="Expected a 'standin' device type for generator"):
        torch.zeros(3, device="standin").normal_(generator=torch.Generator())


def test_a_checkpoint_draws_the_same_mask_again(device):
    values = torch.ones(64, device="standin", requires_grad=True)
    masked = checkpoint(lambda v: dropout(v * 1), values, use_reentrant=False)
    masked.sum().backward()
    assert values.grad.equal(masked.detach())
