"""Operators of other libraries whose kernels are Python: what these run themselves, autocast casts, as in a plain step.

bitsandbytes' 4-bit product is one: in a bfloat16 region it multiplies in bfloat16 what it is given in float32.
"""

from collections.abc import Iterator
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn

import lowtide
from lowtide.device import autocast
from lowtide.doctor.step_listener import StepListener
from lowtide.hollow.mode import HollowMode

multiplied_in: list[torch.dtype] = []


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result = nn.functional.linear(x, weight)
    multiplied_in.append(result.dtype)
    return result.to(x.dtype)


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    with torch.library._scoped_library("lowtide_kernels_in_python", "DEF") as defined:
        defined.define("multiply(Tensor x, Tensor weight) -> Tensor")
        defined.impl("multiply", _multiply, "CPU")
        defined.impl("multiply", lambda x, weight: x.new_empty(*x.shape[:-1], len(weight)), "Meta")
        yield


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return torch.ops.lowtide_kernels_in_python.multiply(x, weight)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return torch.ops.lowtide_kernels_in_python.multiply(grad, weight.t()), None


class _Layer(nn.Module):
    """A frozen product and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frozen", torch.randn(64, 64) / 8)
        self.trained = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.trained(torch.sin(_Product.apply(x.float(), self.frozen))).float()


class _LayerWithoutFunction(_Layer):
    """No gradient goes through its product, which is an operator like any other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.ops.lowtide_kernels_in_python.multiply(x.detach().float(), self.frozen)
        return x + self.trained(torch.sin(made)).float()


def _model(layer: type[_Layer] = _Layer) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer() for _ in range(6)])


def _step(model: nn.Module, *, ends_before_backward: bool = True) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
        if not ends_before_backward:
            loss.backward()
    if ends_before_backward:
        loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("layer", (_Layer, _LayerWithoutFunction))
@pytest.mark.parametrize("ends_before_backward", (True, False))
def test_steps_without_a_plan_and_under_one_multiply_in_the_type_of_the_region(layer, ends_before_backward):
    plain = _step(_model(layer), ends_before_backward=ends_before_backward)
    model = _model(layer)
    multiplied_in.clear()
    with lowtide.fit(model, budget="45%") as fit:
        for _ in range(4):
            assert _same(_step(model, ends_before_backward=ends_before_backward), plain)
            fit.wait()
        status = fit.status()

    assert status.planned_steps >= 2
    assert multiplied_in.count(torch.bfloat16) > 4 * 6  # some ran again
    if ends_before_backward:
        in_backward = 5 if layer is _Layer else 0  # of all layers but the first
        assert multiplied_in.count(torch.float32) == 4 * in_backward


def test_a_replay_in_a_step_without_a_plan_multiplies_in_the_type_of_the_forward_region(monkeypatch):
    plain = _step(_model(_LayerWithoutFunction))
    peak_bytes = sum(p.nbytes for p in _model().parameters()) * 2 + 6 * 64 * 64 * 4 + 8 * 128 * 64 * 4

    def without_plan() -> list[torch.Tensor]:
        model = _model(_LayerWithoutFunction)
        with lowtide.fit(model, budget=peak_bytes) as fit:
            found = _step(model)
            assert fit.status().planned_steps == 0
        return found

    multiplied_in.clear()
    assert _same(without_plan(), plain)
    assert len(multiplied_in) > 2 * 6  # each is proven once; some run again in backward
    monkeypatch.setattr("lowtide.tape.online.online_tape.with_autocast", lambda rng: rng)
    with suppress(lowtide.ReplayError):
        multiplied_in.clear()
        without_plan()
        assert torch.float32 in multiplied_in


def test_a_replay_in_backward_multiplies_in_the_type_of_the_forward_region(monkeypatch):
    """Without autocast as it was, another run gives other bits, of which most nobody compares."""
    plain = _step(_model())
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))

    model = _model()
    with torch.autocast("cpu", torch.bfloat16):
        fit = lowtide.fit(model, x, budget="45%", step=lambda m, x: m(x).square().mean())

    with fit:
        assert _same(_step(model), plain)
        assert fit.status().in_force
        monkeypatch.setattr("lowtide.tape.tape.with_autocast", lambda rng: rng)
        with suppress(lowtide.ReplayError):
            assert not _same(_step(model), plain)


@pytest.mark.parametrize("mode", (StepListener, HollowMode))
def test_modes_of_ours_cast_inside_kernels_alike(mode):
    seen = []

    class Seen(mode):
        def __init__(self) -> None:
            torch.utils._python_dispatch.TorchDispatchMode.__init__(self)

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "lowtide_kernels_in_python":
                seen.append(torch.is_autocast_enabled("cpu"))
                if seen[-1]:
                    return func(*args, **(kwargs or {}))
                return super().__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))

    with Seen(), torch.autocast("cpu", torch.bfloat16):
        torch.ops.lowtide_kernels_in_python.multiply(torch.randn(4, 4), torch.randn(4, 4))

    assert seen == [False, True]


def test_outside_of_a_region_and_in_one_that_is_off_nothing_is_cast():
    multiplied_in.clear()
    model = _model()
    with lowtide.fit(model, budget="45%") as fit:
        for region in (nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=False)):
            with region:
                model(torch.randn(16, 64)).sum().backward()
            fit.wait()

    assert set(multiplied_in) == {torch.float32}


def test_a_state_of_autocast_comes_back_whatever_there_is_now():
    with torch.autocast("cpu", torch.float16):
        state = autocast.AutocastState()
    assert state.key == (("cpu", torch.float16),)

    with state.restored():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16
        assert not torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        with state.restored():
            assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_cache_enabled()
