"""Guards around random generators of a kernel's own: wherever its code has them from, the numbers are plain's."""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.function_cases import Scales, between, kernel
from support.training_steps import Net
from torch import nn
from torch.autograd import Function

import lowtide
from lowtide.step import other_generators
from lowtide.step.other_generators import OwnGenerators, set_state, state_of
from lowtide.tape.online.online_calls import KnownCalls

pytestmark = pytest.mark.usefixtures("one_thread")


class Holder:
    def __init__(self, generator: Any) -> None:
        self.generator, self.inner = generator, types.SimpleNamespace(generator=generator)

    def draw(self, shape: Any) -> Any:
        return self.generator.random(shape)


class Slotted:
    __slots__ = ("generator",)


RNG = np.random.default_rng(0)
PYTHONS = random.Random(0)
LEGACY = np.random.RandomState(0)
TORCHS = torch.Generator()
DRAW = RNG.random
HOLDER, SLOTTED = Holder(RNG), Slotted()
SLOTTED.generator = RNG
MODULE = types.ModuleType("kmod")
MODULE.OWN, MODULE.inside = RNG, types.ModuleType("kmod.inside")
MODULE.inside.OWN = RNG
SEVERAL, HIDDEN = [RNG], "generator"


class Draws(Scales):
    """Stores noise, and scales by it."""

    @staticmethod
    def run(ctx: Any, x: torch.Tensor, draw: Callable[[Any], Any]) -> torch.Tensor:
        noise = kernel(lambda x: draw(x.shape), x)
        ctx.save_for_backward(x, noise)
        return kernel(np.multiply, x, noise)


def of(draw: Callable[[Any], Any]) -> Any:
    """A Function whose forward names ``draw`` as its own closure."""

    class Noise(Draws):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return Draws.run(ctx, x, draw)

    return lambda self, x: Noise.apply(x)


class OfItsClass(Draws):
    generator = RNG

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return Draws.run(ctx, x, OfItsClass.generator.random)


class Default(Draws):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, generator: Any = RNG) -> torch.Tensor:
        return Draws.run(ctx, x, generator.random)


class CallsAnother(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = OfItsClass.apply(x)
        ctx.save_for_backward(made)
        return kernel(np.sin, made)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.saved_tensors[0]


class TakesFunction(Draws):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, draw: Any) -> torch.Tensor:
        return Draws.run(ctx, x, draw)


def module_level(shape: Any) -> Any:
    return RNG.random(shape)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.children_ = nn.ModuleList([Draw()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children_:
            x = child(x)
        return self.up(x)


class Draw(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise(x.sin())

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=TORCHS)


class Case(NamedTuple):
    call: Any
    names: str  # what the reason calls it
    generator: Any = RNG
    opaque: Any = None


CASES = {
    "a global": Case(of(lambda shape: RNG.random(shape)), "RNG"),
    "a method of a global": Case(of(lambda shape: DRAW(shape)), "DRAW"),
    "a module": Case(of(lambda shape: MODULE.OWN.random(shape)), "MODULE.OWN"),
    "a module of a module": Case(of(lambda shape: MODULE.inside.OWN.random(shape)), "MODULE."),
    "an object": Case(of(lambda shape: HOLDER.generator.random(shape)), "HOLDER.generator"),
    "an object's method": Case(of(lambda shape: HOLDER.draw(shape)), "HOLDER.generator"),
    "an object in an object": Case(of(lambda s: HOLDER.inner.generator.random(s)), "HOLDER."),
    "an object with slots": Case(of(lambda shape: SLOTTED.generator.random(shape)), "SLOTTED.generator"),
    "a list": Case(of(lambda shape: SEVERAL[0].random(shape)), "SEVERAL[0]"),
    "an attribute with a hidden name": Case(of(lambda s: getattr(HOLDER, HIDDEN).random(s)), "HOLDER"),
    "a class": Case(lambda self, x: OfItsClass.apply(x), "OfItsClass.generator"),
    "a default": Case(lambda self, x: Default.apply(x), "defaults of Default.forward[0]"),
    "a Function inside": Case(lambda self, x: CallsAnother.apply(x), "OfItsClass.generator"),
    "a function that is given": Case(lambda self, x: TakesFunction.apply(x, module_level), "RNG"),
    "Python's": Case(of(lambda s: np.float32([PYTHONS.random() for _ in range(s[0])])[:, None]), "PYTHONS", PYTHONS),
    "NumPy's older": Case(of(lambda shape: LEGACY.random(shape)), "LEGACY", LEGACY),
    "PyTorch's": Case(of(lambda s: torch.rand(s, generator=TORCHS).numpy()), "TORCHS", TORCHS),
    "a named module": Case(lambda self, x: self.experts(x), "TORCHS", TORCHS, ["experts"]),
}  # fmt: skip


def made(case: Case) -> tuple[Net, Net, torch.Tensor]:
    torch.manual_seed(0)
    model = between(case.call)
    model.experts = Experts()
    return model, copy.deepcopy(model), torch.randn(512, 8)


def losses(net: nn.Module, x: torch.Tensor, case: Case, start: Any, call: Any = None, fit: Any = None) -> Any:
    set_state(case.generator, start)
    found = []
    for _ in range(3):
        net.zero_grad()
        loss = (net(x) if call is None else call(net, x)).square().mean()
        loss.backward()
        found.append((loss.item(), net.layers[0].weight.grad.sum().item()))
        if fit is not None:
            fit.wait()
    return found


@pytest.mark.parametrize("with_batch", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_fit_leaves_a_generator_to_the_step(name, with_batch):
    case = CASES[name]
    model, bare, x = made(case)
    start = state_of(case.generator)
    fit = lowtide.fit(model, x if with_batch else None, budget="90%", opaque=case.opaque or ())

    assert losses(bare, x, case, start) == losses(model, x, case, start, fit=fit)
    assert [r for r in fit.status().reasons if f"draws from a generator of its own ({case.names}" in r]
    fit.remove()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.opaque])
def test_checkpointing_leaves_a_generator_to_the_step(name, monkeypatch):
    monkeypatch.setattr("lowtide.tape.online.dropping._known_calls", KnownCalls())
    case = CASES[name]
    model, bare, x = made(case)
    start = state_of(case.generator)

    assert losses(bare, x, case, start) == losses(model, x, case, start, call=lowtide.checkpoint)


@pytest.mark.parametrize("name", ["a module", "an attribute with a hidden name", "a named module"])
def test_a_proof_takes_its_numbers_from_the_step_without_the_search(name, monkeypatch):
    monkeypatch.setattr(other_generators, "is_generator", lambda value: False)
    case = CASES[name]
    model, bare, x = made(case)
    start = state_of(case.generator)
    fit = lowtide.fit(model, budget="90%", opaque=case.opaque or ())

    assert losses(bare, x, case, start) != losses(model, x, case, start, fit=fit)
    fit.remove()


def test_what_is_held_and_moves_in_a_proof_is_put_back(monkeypatch):
    case = CASES["an attribute with a hidden name"]
    model, bare, x = made(case)
    start = state_of(case.generator)
    monkeypatch.setattr(OwnGenerators, "restore_moved", lambda self: [])
    fit = lowtide.fit(model, budget="90%")

    assert losses(bare, x, case, start) != losses(model, x, case, start, fit=fit)
    fit.remove()


# -- the search --------------------------------------------------------------------------------------------------------


def found_in(*roots: tuple[str, Any]) -> tuple[list[str], list[str]]:
    own = OwnGenerators(roots)
    return sorted(own.named), sorted(own.held)


def test_what_nobody_names_is_only_held():
    assert found_in(("f", lambda: HOLDER)) == ([], ["HOLDER.generator"])


def test_code_that_names_no_generator_has_none():
    assert found_in(("f", lambda: (MODULE, np, torch, random, len))) == ([], [])


def test_default_generators_are_no_ones_own():
    generator = torch.default_generator
    state = np.random.mtrand._rand

    assert found_in(("f", lambda: (generator, state, random.random(), np.random.rand(), torch.rand(1)))) == ([], [])


def test_what_refers_to_itself_is_searched_once():
    loop: Any = types.SimpleNamespace(items=[], generator=RNG)
    loop.loop = loop
    loop.items.append(loop.items)

    class Odd:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("not now")

    odd = Odd()

    assert found_in(("f", lambda: (odd, loop.loop.loop.generator))) == (["loop.generator"], [])


def test_many_modules_are_searched_in_full():
    model = nn.Sequential(*(Experts() for _ in range(100)))

    assert found_in(("model", model)) == (["TORCHS"], [])
