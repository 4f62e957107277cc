"""Autograd Functions over NumPy kernels that no dispatcher sees: some may run again, some must be kept.

``WORKS`` and ``KEPT`` are calls of them, for ``between``; of the latter, by why they are kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support.training_steps import Net
from support.unseen_memory import memory_of
from torch.autograd import Function


def kernel(f: Callable[..., np.ndarray], *inputs: torch.Tensor) -> torch.Tensor:
    """``f`` of the inputs' memory, unseen, in memory that is seen to be made."""
    made = torch.empty_like(inputs[0])
    memory_of(made)[:] = f(*(memory_of(t) for t in inputs))
    return made


class Scales(Function):
    """y = x * sin(x), and sin(x) stored. The forward of most Functions here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        sine = kernel(np.sin, x)
        ctx.save_for_backward(x, sine)
        return kernel(np.multiply, x, sine)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, sine = ctx.saved_tensors
        return kernel(lambda g, x, s: g * (s + x * np.cos(x)), g, x, sine), *[None] * 5


def between(call: Callable[[Net, torch.Tensor], torch.Tensor]) -> Net:
    """Two linear layers with ``call`` between them."""

    def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](call(self, self.layers[0](x)).sin()).exp()

    return Net(forward)


class Several(Function):
    """Two outputs, one of them not differentiable; other tensors stored if no weight needs a gradient."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...]) -> Any:
        assert type(shape) is tuple
        return kernel(np.multiply, x, weight.expand(shape)), kernel(np.sign, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.shape = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, output[1])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:
        x, weight, sign = ctx.saved_tensors
        assert sign.abs().max() == 1
        return g * weight, None if x is None else (g * x).sum(0), None


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        inner = Scales.apply(x)
        ctx.save_for_backward(x, inner)
        return kernel(np.exp, inner * 0.1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, inner = ctx.saved_tensors
        return g * (0.1 * inner).exp() * 0.1 * (x.sin() + x * x.cos())


class FromNumpy(Function):
    """Its memory is NumPy's, so no op makes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = torch.from_numpy(np.sin(memory_of(x)))
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.saved_tensors[0]


class DropsOut(Function):
    """Its kernel is seeded by PyTorch's generator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float) -> torch.Tensor:
        seed = int(torch.randint(2**31, ()))
        kept = torch.empty(x.shape)
        memory_of(kept)[:] = np.random.default_rng(seed).random(x.shape) > p
        ctx.save_for_backward(kept)
        return kernel(np.multiply, x, kept)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.saved_tensors[0], None


class Casts(Function):
    """Computes in autocast's type."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = (x @ weight.t()).float()
        ctx.save_for_backward(weight)
        return kernel(np.tanh, product)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g @ ctx.saved_tensors[0], None


class SpendsContext(Function):
    """Keeps Python objects in its context, and backward changes one and takes another away."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        sine = kernel(np.sin, x)
        ctx.save_for_backward(x, sine)
        ctx.left, ctx.names = [sum, max], {"power": 1.0}
        return kernel(np.multiply, x, sine)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, sine = ctx.saved_tensors
        ctx.left.pop()
        ctx.names["power"] *= 2
        del ctx.names
        return kernel(lambda g, x, s: g * (s + x * np.cos(x)), g, x, sine)


class WritesOverStored(Function):
    """Its backward returns its gradients in the memory of what it stored, as Liger's SwiGLU does."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, x)
        return kernel(lambda gate, x: np.tanh(gate) * x, gate, x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        gate, x = ctx.saved_tensors
        tanh = np.tanh(memory_of(gate))
        memory_of(gate)[:] = memory_of(g) * memory_of(x) * (1 - tanh * tanh)
        memory_of(x)[:] = memory_of(g) * tanh
        return gate, x


class TakesFunction(Scales):
    """Is given the function that it computes with, as kernels of LoRA are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[np.ndarray], np.ndarray]) -> torch.Tensor:
        return kernel(function, Scales.forward(ctx, x))


def halved(x: np.ndarray) -> np.ndarray:
    return x / 2


def with_a_closure(self: Net, x: torch.Tensor) -> torch.Tensor:
    factor = np.float32(0.5)
    return TakesFunction.apply(x, lambda x: x * factor)


def under_autocast(self: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        h = Casts.apply(x, self.layers[2].weight)
    return h.float()


def twice(self: Net, x: torch.Tensor) -> torch.Tensor:
    return Scales.apply(x) * Scales.apply(x.cos())


def several(self: Net, x: torch.Tensor) -> torch.Tensor:
    y, sign = Several.apply(x, self.layers[2].bias, tuple(x.shape))
    return y + sign


WORKS = {
    "once": lambda self, x: Scales.apply(x),
    "twice": twice,
    "several outputs": several,
    "nested": lambda self, x: Nested.apply(x),
    "memory of NumPy": lambda self, x: FromNumpy.apply(x),
    "random": lambda self, x: DropsOut.apply(x, 0.5),
    "autocast": under_autocast,
    "is given a function": lambda self, x: TakesFunction.apply(x, halved),
    "is given a lambda": lambda self, x: TakesFunction.apply(x, lambda x: x * np.float32(0.5)),
    "changes its context in backward": lambda self, x: SpendsContext.apply(x),
    "writes over what it stored in backward": lambda self, x: WritesOverStored.apply(x * 2.0, x.cos()),
}


class WritesUnseen(Scales):
    """Scales its input in place and does not say so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        memory_of(x)[:] *= 0.5
        return Scales.forward(ctx, x)


class MarksDirty(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        memory_of(x)[:] *= 0.5
        ctx.mark_dirty(x)
        cosine = kernel(np.cos, x)
        ctx.save_for_backward(cosine)
        return x, kernel(np.sin, x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor) -> Any:
        return 0.5 * (g + h * ctx.saved_tensors[0])


_own = np.random.default_rng(0)


class OwnGenerator(Scales):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        noise = kernel(lambda x: _own.random(x.shape), x)
        ctx.save_for_backward(x, noise)
        return kernel(np.multiply, x, noise)


class NumpysGenerator(Scales):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        noise = kernel(lambda x: np.random.rand(*x.shape), x)
        random.random()
        ctx.save_for_backward(x, noise)
        return kernel(np.multiply, x, noise)


class Counts(Scales):
    """Not deterministic: each run adds another number."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Counts.runs += 1
        noise = kernel(lambda x: x + np.float32(Counts.runs), x)
        ctx.save_for_backward(x, noise)
        return kernel(np.multiply, x, noise)


class Asks(Scales):
    """Cannot run with any other context than autograd's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert ctx.name() == "AsksBackward"
        return Scales.forward(ctx, x)


class ReadsAside(Scales):
    """Reads a tensor of the step that it is not given."""

    aside: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return Scales.forward(ctx, x + ReadsAside.aside.detach())


def reads_aside(self: Net, x: torch.Tensor) -> torch.Tensor:
    ReadsAside.aside = x.cos()
    return ReadsAside.apply(x)


class InContext(Scales):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.sine = kernel(np.sin, x)
        ctx.save_for_backward(x)
        return kernel(np.multiply, x, ctx.sine)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * (ctx.sine + x * x.cos())


KEPT = {
    "writes in place without saying so": lambda self, x: WritesUnseen.apply(x * 1),
    "writes its inputs in place": lambda self, x: sum(MarksDirty.apply(x * 1)),
    "draws from a generator of its own (_own)": lambda self, x: OwnGenerator.apply(x),
    "draws from Python's or NumPy's generator": lambda self, x: NumpysGenerator.apply(x),
    "gives other bits when it runs again": lambda self, x: Counts.apply(x),
    "reads what it is not given": reads_aside,
    "is given a SimpleNamespace, which may change before backward": lambda self, x: Scales.apply(x, SimpleNamespace()),
    "is given a function, which may change before backward": with_a_closure,
    "is given a list, which may change before backward": lambda self, x: Scales.apply(x, [x]),
    "cannot run again (AttributeError: '_StandIn' object has no attribute 'name')": lambda self, x: Asks.apply(x),
    "keeps tensors as attributes of its context": lambda self, x: InContext.apply(x),
}


def restart() -> None:
    """What the Functions draw from, and count, begins anew."""
    global _own
    _own, Counts.runs = np.random.default_rng(1), 0
    np.random.seed(1)
    random.seed(1)


def drawn() -> tuple[float, float, float]:
    """A number of each generator that is not PyTorch's: equal where each has been drawn from as often."""
    return np.random.rand(), random.random(), float(_own.random())
