"""What outputs look like, beside what kernels make."""

import pytest
import torch

from lowtide.hollow.output_specs import _REDUCED_IN_PLACE, OutputSpecs


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("func", [*_REDUCED_IN_PLACE, torch.ops.aten.huber_loss.default], ids=str)
def test_a_loss_lies_in_as_much_memory_as_its_kernel_leaves_it(func, reduction):
    """Not corrected by a kernel that has run: those of large batches do not."""
    scores = torch.rand(64, 32)
    args = scores, torch.ones(64, 1), *[None] * (_REDUCED_IN_PLACE.get(func, 2) - 2), reduction
    if func is torch.ops.aten.binary_cross_entropy.default:
        args = scores, torch.ones_like(scores), *args[2:]
    real = func(*args)

    (spec,) = OutputSpecs(scores.device.type).of(func, args, {}).outputs

    assert spec.size == real.shape
    assert spec.storage_bytes == real.untyped_storage().nbytes()
