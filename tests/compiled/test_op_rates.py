"""Times of ops that code is priced by."""

import torch

from lowtide.compiled import op_rates
from lowtide.compiled.generated_code import BufferSpec


def test_an_op_that_draws_is_timed_without_a_number_of_trainings_own():
    spec = BufferSpec((8, 8), (8, 1), torch.float32)
    before = torch.get_rng_state()

    assert op_rates._operator_ms(torch.ops.aten.bernoulli.p, (spec, 0.25), {}, spec.bytes, torch.device("cpu")) > 0
    assert torch.equal(torch.get_rng_state(), before)
