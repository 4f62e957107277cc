"""Triton kernels inside autograd Functions are opaque calls; under Triton's interpreter, so that no device is needed.

Run with ``TRITON_INTERPRET=1`` where triton 3.9.0 is installed; skipped by name elsewhere.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.function_cases import between
from support.online_steps import online
from support.training_steps import differing, harshest, plain, planned, replays

import lowtide
from lowtide.graph.function_ops import function_groups

triton = pytest.importorskip("triton", reason="needs triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
import numpy  # noqa: E402
from triton import language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.interpreter import GridExecutor, TensorHandle  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def kernels_work_in_the_tensors_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: the interpreter sets aliases over the arguments and writes all of them back, inputs too."""
    monkeypatch.setattr(GridExecutor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)


@pytest.fixture(autouse=True)
def kernels_take_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled kernels do: the interpreter hands a Python float on, which has no dtype to cast from."""
    convert = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32), tl.float32)
        return convert(argument)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)


@triton.jit
def gate_kernel(x, gate, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside)
    gated = tl.exp(-value * value)
    tl.store(gate + at, gated, mask=inside)
    tl.store(y + at, value * gated, mask=inside)


class Gate(torch.autograd.Function):
    """y = x exp(-x^2), and the exponential stored."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, y = torch.empty_like(x), torch.empty_like(x)
        gate_kernel[(triton.cdiv(x.numel(), 1024),)](x, gate, y, x.numel(), BLOCK=1024)
        ctx.save_for_backward(x, gate)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        x, gate = ctx.saved_tensors
        return g * gate * (1 - 2 * x * x)


def test_a_triton_kernel_runs_again_under_a_plan():
    model, x = between(lambda self, x: Gate.apply(x)), torch.randn(64, 8)

    assert [group.kept_bytes for group in function_groups(lowtide.trace(model, x))] == [0]
    with replays() as seen:
        assert differing(plain(model, x), planned(model, x, harshest(model, x))) == []
    assert any("Gate" in r.op.name for r in seen)


def test_a_triton_kernel_runs_again_without_a_plan():
    model, x = between(lambda self, x: Gate.apply(x)), torch.randn(512, 8)

    found, tape = online(model, x, 0)

    assert differing(plain(model, x), found) == []
    assert tape.releaser.num_released and not (tape.known_calls.kept or tape.problem)


def test_ligers_cross_entropy_is_an_opaque_call():
    liger = pytest.importorskip("liger_kernel.ops.cross_entropy", reason="needs liger-kernel")
    model = between(lambda self, x: x)
    target = torch.randint(8, (64,))

    def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss, *_ = liger.LigerCrossEntropyFunction.apply(model(x), target, None, -100, 0.0, 0.0, "mean", None, False)
        return loss

    x = torch.randn(64, 8)
    found, tape = online(model, x, 0, step=step)

    assert differing(plain(model, x, step), found) == []
    assert not tape.problem


def rope(layer: Any, x: torch.Tensor) -> torch.Tensor:
    liger = pytest.importorskip("liger_kernel.ops.rope", reason="needs liger-kernel")
    angles = torch.arange(128.0).reshape(1, 16, 8)
    heads = x.view(2, 2, 16, 8)
    q, k = liger.LigerRopeFunction.apply(heads * 1.0, heads * 2.0, angles.cos(), angles.sin())
    return (q + k).reshape(64, 8)


def swiglu(layer: Any, x: torch.Tensor) -> torch.Tensor:
    liger = pytest.importorskip("liger_kernel.ops.swiglu", reason="needs liger-kernel")
    return liger.LigerSiLUMulFunction.apply(x * 1.0, x.cos())


@pytest.mark.parametrize("kernels", [rope, swiglu])
def test_ligers_kernels_run_again(kernels: Any) -> None:
    """SwiGLU's backward writes both gradients over the tensors that it stored, without saying so."""
    model, x = between(kernels), torch.randn(64, 8)
    (group,) = function_groups(lowtide.trace(model, x))

    assert group.name.startswith("Liger") and not group.why_kept
    with replays() as seen:
        assert differing(plain(model, x), planned(model, x, harshest(model, x))) == []
    assert any(group.name in r.op.name for r in seen)
    found, tape = online(model, x, 0)
    assert differing(plain(model, x), found) == [] and not (tape.known_calls.kept or tape.problem)
