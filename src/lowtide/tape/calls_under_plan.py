"""A call of an autograd Function that a plan takes as one op: what is known of it before and after it has run."""

from typing import Any

from torch import Tensor, nn

from lowtide.device.generators import GeneratorStates
from lowtide.step.function_calls import ObservedFunctionCall, why_not_same
from lowtide.step.operators import fingerprint
from lowtide.step.subclasses import plain_tensors
from lowtide.tape.program import TapedOp


class CallUnderPlan:
    """Made before the call runs.

    The first call of a kind is proven: it runs again at once, and nothing is dropped unless all is the same.
    """

    __slots__ = ("_generators", "_inputs", "_kind", "call", "how", "op")

    def __init__(self, op: TapedOp, call: ObservedFunctionCall) -> None:
        self.op, self.call = op, call
        self.how = call.how
        self._generators = GeneratorStates(call.tensors)
        self._kind = self.how.kind(call.args)
        # A kernel may write these unseen; a second run would then find other inputs.
        self._inputs = None if self._kind in op.calls else [fingerprint(t) for t in call.tensors]

    def writes_inputs(self, ctx: Any) -> bool:
        """Whether it says that it has changed inputs, or is seen to have."""
        unseen = self._inputs is not None and self._inputs != [fingerprint(t) for t in self.call.tensors]
        return bool(ctx.dirty_tensors) or unseen

    def is_proven(self, results: list[Tensor], model: nn.Module | None) -> bool:
        """Whether another run of a call of this kind gives the same."""
        calls = self.op.calls
        verdict = calls.verdict(self._kind)
        if verdict is None:
            buffers = [] if model is None else list(plain_tensors(*model.buffers()))
            verdict = self.how.why_not_again()
            verdict = verdict or why_not_same(self.how, self.call.tensors, results, self._generators, buffers)
            calls.learn(self._kind, verdict)
        return not verdict

    @property
    def is_to_be_proven(self) -> bool:
        """No call of this kind has been."""
        return self._inputs is not None

    @property
    def is_never_the_same(self) -> bool:
        """So many other numbers have come at this place that each call is proven."""
        return self.op.calls.is_never_the_same(self._kind)

    def generators_if_moved(self) -> GeneratorStates | None:
        """The states of random generators before the call, if it has drawn from one."""
        return self._generators if self._generators.have_moved() else None
