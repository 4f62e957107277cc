"""Proof at birth: an op whose output is to be dropped runs twice, and is dropped only if both give the same bits."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from lowtide.device.generators import GeneratorStates
from lowtide.step.bits import same_bits
from lowtide.step.execution_state import GeneratorState
from lowtide.step.operators import fills_its_storage, fingerprint, omitted_in_replay
from lowtide.tape.program import TapedOp
from lowtide.tape.recipes import nth_tensor

_PYTORCHS_OWN = "aten."


class RunTwice(NamedTuple):
    """What came of it.

    Attributes:
        result: What the step goes on with.
        is_same: Both runs gave the same bits, as far as they are to be dropped.
        held_both: Both results were there at a time, which takes memory that the plan does not know.
    """

    result: Any
    is_same: bool
    held_both: bool


def run_twice(op: TapedOp, args: tuple, kwargs: dict, rng: GeneratorState | GeneratorStates | None) -> RunTwice:
    """Run ``op`` and run it again, from the same states of random generators.

    Of one of PyTorch's own ops with one result a fingerprint stays in place of the first result. Such an op keeps
    nothing between two runs, so the second result is as good as the first. Another op may, and its first result counts.
    """
    result = op.kernel(*args, **kwargs)
    skipped = omitted_in_replay(op.func, args)
    again = [None if i in skipped else a for i, a in enumerate(args)]
    first = None
    if op.name.startswith(_PYTORCHS_OWN) and type(result) is torch.Tensor and fills_its_storage(result):
        first, result = fingerprint(result), None
    with nullcontext() if rng is None else rng.restored():
        second = op.kernel(*again, **kwargs)
    if first is not None:
        return RunTwice(second, fingerprint(second) == first, held_both=False)
    same = all(same_bits(nth_tensor(result, n), nth_tensor(second, n)) for n, _ in op.drops)
    return RunTwice(result, same, held_both=True)
