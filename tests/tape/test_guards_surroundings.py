"""Guards around a step: forbidden hooks, threads, exceptions, memory, what is refused by name.

Each guard fires, and with each taken out the harm it prevents comes back. Plans here drop every storage that may be
dropped, the setting with the most ways to go wrong.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support.garbage import living
from support.guards import wrong
from support.training_steps import (
    Net,
    differing,
    drop_everything,
    harshest,
    is_clean,
    live_tensors,
    mlp,
    outcome,
    plain,
)
from torch import nn

import lowtide
from lowtide import StepError, UnsupportedModelError
from lowtide.plan import RECOMPUTE
from lowtide.recording import recorder
from lowtide.step import operators
from lowtide.tape import values
from lowtide.tape.program import program_of
from lowtide.tracing.model_facts import ModelFacts
from lowtide.training import rehearsal

pytestmark = pytest.mark.usefixtures("one_thread")


# -- where hooks are forbidden ----------------------------------------------------------------------------------------


def test_a_model_called_under_a_functional_transform_runs_plainly():
    model, x = mlp(), torch.randn(4, 16)
    weights = {n: p.detach() for n, p in model.named_parameters()}

    def loss(w: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, w, (x,)).square().mean()

    expected = torch.func.grad(loss)(weights)
    fit = lowtide.fit(model, x, budget="100%")
    found = torch.func.grad(loss)(weights)
    per_row = torch.vmap(lambda row: model(row))(x)
    fit.remove()

    assert all(torch.equal(expected[n], found[n]) for n in expected)
    assert per_row.shape == x.shape


def inner_gradient(self: Net, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.grad(lambda y: y.sin().sum())(x)
    return self.layers[1](self.layers[0](slope).sin()).sin()


def no_hooks_allowed(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x).sin()
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        h = self.layers[1](h).sin()
    return self.layers[2](h).sin()


def batched(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x).sin()
    return self.layers[1](torch.vmap(lambda row: row.sin() * row)(h)).sin()


@pytest.mark.parametrize(
    ("forward", "reason"),
    [(inner_gradient, "don't yet support saved tensor hooks"), (no_hooks_allowed, "RuntimeError: no hooks here")],
    ids=["inner_gradient", "no_hooks_allowed"],
)
def test_a_step_that_forbids_hooks_is_refused_with_its_own_error(forward, reason):
    model = Net(forward)

    with pytest.raises(StepError, match=reason):
        lowtide.trace(model, torch.randn(4, 8))
    assert is_clean(model)


def test_a_step_that_vectorises_a_part_is_right():
    model = Net(batched)

    assert wrong(model, torch.randn(4, 8)) == []
    assert is_clean(model)


# -- threads ----------------------------------------------------------------------------------------------------------


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(jobs)

    def run(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_two_models_train_in_two_threads_at_once():
    models = [mlp(5), mlp(7)]
    x = torch.randn(4, 16)
    plans = [harshest(m, x) for m in models]
    together = threading.Barrier(2, timeout=20)

    def job(number: int) -> list[list[str]]:
        found = []
        for _ in range(5):
            ours = copy.deepcopy(models[number])
            together.wait()
            with lowtide.apply(ours, plans[number]):
                together.wait()
                loss = ours(x).square().mean()
            loss.backward()
            found.append(differing(outcome(ours, loss), expected[number]))
        return found

    expected = [plain(m, x) for m in models]
    assert in_threads(lambda: job(0), lambda: job(1)) == [[[]] * 5] * 2


def test_one_fitted_model_is_called_in_two_threads_at_once():
    both_inside = threading.Barrier(2, timeout=20)

    def meet(self: Net, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x).sin()
        if threading.current_thread() is not threading.main_thread():
            both_inside.wait()
        h = self.layers[1](h).sin()
        if threading.current_thread() is not threading.main_thread():
            both_inside.wait()
        return self.layers[2](h).sin()

    model, x = Net(meet), torch.randn(64, 8)
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().mean(), weights)
    with pytest.raises(lowtide.BudgetInfeasibleError) as least:
        lowtide.fit(model, x, budget=1)
    fit = lowtide.fit(model, x, budget=least.value.least_bytes)
    assert fit.plan.counts[RECOMPUTE]

    found = in_threads(*[lambda: torch.autograd.grad(model(x).square().mean(), weights)] * 2)
    fit.remove()

    assert all(torch.equal(a, b) for grads in found for a, b in zip(grads, expected))


def test_backward_may_run_in_another_thread():
    model, x = mlp(), torch.randn(4, 16)
    with lowtide.apply(model, harshest(model, x)):
        loss = model(x).square().mean()

    in_threads(loss.backward)

    assert differing(plain(model, x), outcome(model, loss)) == []


def test_concurrent_backward_passes_over_shared_recipes_are_equal():
    model, x = mlp(), torch.randn(4, 16)
    with lowtide.apply(model, harshest(model, x)):
        out = model(x)
        losses = [out.square().mean(), out.sin().sum()]
    weights = list(model.parameters())
    jobs = [lambda loss=loss: torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses]
    alone = [job() for job in jobs]

    together = in_threads(*jobs)

    assert all(torch.equal(a, b) for one, two in zip(alone, together) for a, b in zip(one, two))


# -- exceptions -------------------------------------------------------------------------------------------------------


class Trouble(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.at: str = ""
        self.kind: type[BaseException] = RuntimeError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.at == "forward":
            raise self.kind("trouble")
        if self.at == "backward":
            x = x * 1
            x.register_hook(self._fail)
        return x * 1

    def _fail(self, grad: torch.Tensor) -> None:
        raise self.kind("trouble")


@pytest.mark.parametrize("at", ["forward", "backward"])
@pytest.mark.parametrize(
    ("how", "kind"),
    [("apply", RuntimeError), ("apply", KeyboardInterrupt), ("fit", KeyboardInterrupt), ("step_region", SystemExit)],
)
def test_an_exception_leaves_nothing_behind(how, at, kind, monkeypatch):
    model = nn.Sequential(*mlp(2), trouble := Trouble(), *mlp(2))
    x = torch.randn(4, 16)
    expected = plain(model, x)
    plan = harshest(model, x)
    # The solver may keep everything of so small a step.
    monkeypatch.setattr(rehearsal, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
    fit = lowtide.fit(model, x, budget="100%") if how != "apply" else None
    if fit is not None:
        enter = fit.step_region if how == "step_region" else contextlib.nullcontext
    else:
        enter = lambda: lowtide.apply(model, plan)  # noqa: E731
    trouble.at, trouble.kind = at, kind
    with pytest.raises(kind, match="trouble"):
        with enter():
            loss = model(x).square().mean()
            loss.backward()
    trouble.at = ""
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    for again in (True, False):  # the next step under the plan, then a plain one
        if not again and fit is not None:
            fit.remove()
        model.zero_grad()
        torch.manual_seed(7)
        with enter() if again else contextlib.nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        assert differing(expected, outcome(model, loss)) == []
    assert is_clean(model)


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_an_exception_while_planning_leaves_nothing_behind(at):
    model = nn.Sequential(*mlp(2), trouble := Trouble(), *mlp(2))
    x = torch.randn(4, 16)
    expected = plain(model, x)
    trouble.at, trouble.kind = at, KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lowtide.fit(model, x, budget="50%")
    trouble.at = ""

    assert is_clean(model)
    assert all(p.grad is None for p in model.parameters())
    assert differing(expected, plain(model, x)) == []


# -- memory -----------------------------------------------------------------------------------------------------------


def live_values() -> int:
    """Values, recipes among them, that nobody has freed; errors of earlier tests may hold some."""
    return sum(isinstance(o, values.Value) for o in gc.get_objects())


def test_activations_die_with_backward_and_without_the_collector():
    model, x = mlp(), torch.randn(4, 16)
    watched: list[weakref.ref] = []
    for module in model:
        module.register_forward_hook(lambda m, args, out: watched.append(weakref.ref(out)))
    plan = harshest(model, x)
    watched.clear()
    before = live_values()
    gc.disable()
    try:
        with lowtide.apply(model, plan):
            loss = model(x).square().mean()
        assert sum(w() is not None for w in watched) == 0
        loss.backward()
        del loss
        held = live_values() - before
    finally:
        gc.enable()

    assert held == 0


def test_a_forward_that_never_runs_backward_frees_its_recipes_without_the_collector():
    model, x = mlp(), torch.randn(4, 16)
    plan = harshest(model, x)
    before = live_values()
    gc.disable()
    try:
        with lowtide.apply(model, plan):
            loss = model(x).square().mean()
        del loss
        held = live_values() - before
    finally:
        gc.enable()

    assert held == 0


def test_a_plan_has_one_program_that_is_freed_with_it():
    model, x = mlp(), torch.randn(4, 16)
    plan = harshest(model, x)
    with lowtide.apply(model, plan):
        model(x).square().mean().backward()
    program = weakref.ref(program_of(plan))

    assert program_of(plan) is program()
    assert program_of(copy.copy(plan)) is not program()
    del plan
    assert living(program) == 0


def test_repeated_steps_leave_no_more_tensors_behind():
    model, x = mlp(), torch.randn(4, 16)
    plan = harshest(model, x)
    counts = []
    for _ in range(4):
        with lowtide.apply(model, plan):
            model(x).square().mean().backward()
        counts.append(live_tensors())

    assert counts[1:] == counts[1:2] * 3


def test_peak_under_everything_dropped_is_what_was_predicted():
    model, x = mlp(6, 64), torch.randn(128, 64)
    plan = harshest(model, x)
    proof = lowtide.verify(model, x, plan, rounds=0)

    assert proof.equal, proof.differing
    assert abs(proof.measured_peak_bytes - proof.predicted_peak_bytes) <= 0.001 * proof.predicted_peak_bytes


# -- refused by name --------------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A wrapper subclass of which nobody can say how to make it again from its part."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(t: Any) -> Any:
            return t.inner if isinstance(t, Wrapped) else t

        result = func(*map(unwrap, args), **(kwargs or {}))
        return Wrapped(result) if func is torch.ops.aten.detach.default else result


def subclass_weight() -> nn.Module:
    model = mlp()
    model[2].weight = nn.Parameter(Wrapped(torch.randn(16, 16)), requires_grad=False)
    return model


REFUSED = {
    "DataParallel": (
        lambda: nn.DataParallel(mlp()),
        "the model is a DataParallel, which the tape does not carry out yet.\n"
        "Fit the module inside it, or train without lowtide.",
    ),
    "subclass weight": (
        subclass_weight,
        "parameter 2.weight is a Wrapped, a tensor subclass that does not say which plain tensors it wraps\n"
        "(__tensor_flatten__, __tensor_unflatten__): such are not taped.\n"
        "Use weights that do, as DTensor and torchao have them, or train without lowtide.",
    ),
}


@pytest.mark.parametrize("verb", ["trace", "fit", "apply"])
@pytest.mark.parametrize("case", REFUSED)
def test_wrapped_and_subclass_models_are_refused_by_name(case, verb):
    make, message = REFUSED[case]
    plan = harshest(mlp(), x := torch.randn(4, 16))
    model = make()
    before = [m._compiled_call_impl for m in model.modules()]

    with pytest.raises(UnsupportedModelError) as error:
        if verb == "apply":
            with lowtide.apply(model, plan):
                pass
        else:
            {"trace": lowtide.trace, "fit": lowtide.fit}[verb](model, x)

    assert str(error.value) == message
    assert [m._compiled_call_impl for m in model.modules()] == before


def test_a_subclass_that_only_appears_in_the_step_is_refused_by_name():
    model = Net(lambda self, x: self.layers[0](x).sin() @ Wrapped(torch.randn(8, 8)))

    with pytest.raises(UnsupportedModelError) as error:
        lowtide.trace(model, torch.randn(4, 8))
    assert str(error.value) == (
        f"aten.mm.default got a {__name__}.Wrapped in module (the step).\n"
        "  Tensor subclasses that do not say what they wrap (__tensor_flatten__) are not taped.\n"
        "Train this model without lowtide, or unwrap the tensor before the step."
    )
    assert is_clean(model)


class Scaled(torch.Tensor):
    """A weight in eight bits with a scale, as quantisation libraries have them: it says what it wraps."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride) -> Scaled:
        return Scaled(inner["data_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].data_, args[0].scale)
        if func is torch.ops.aten.t.default:
            return Scaled(args[0].data_.t(), args[0].scale)

        def whole(t: Any) -> Any:
            return t.data_.to(t.scale.dtype) * t.scale if isinstance(t, Scaled) else t

        return func(*map(whole, args), **(kwargs or {}))


def scaled_weights() -> nn.Module:
    model = mlp()
    for layer in (model[0], model[2]):
        data = (layer.weight.detach() * 100).round().clamp(-128, 127).to(torch.int8)
        layer.weight = nn.Parameter(Scaled(data, torch.tensor(0.01)), requires_grad=False)
    return model


def test_weights_that_say_what_they_wrap_are_taped_and_the_weights_they_make_are_dropped():
    torch.manual_seed(0)
    model, x = scaled_weights(), torch.randn(4, 16)
    expected = train_step(model, x)
    plan = harshest(model, x)

    with lowtide.apply(model, plan):
        found = train_step(model, x)

    assert plan.counts["recompute"] > 0
    assert found.keys() == expected.keys() and len(found) > 2
    assert all(torch.equal(found[name], expected[name]) for name in found)


def train_step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = model(x).square().mean()
    loss.backward()
    found = {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
    model.zero_grad()
    return found


def test_without_the_refusal_a_subclass_weight_is_taped(monkeypatch):

    monkeypatch.setattr(recorder, "PLAIN_TYPES", (*operators.PLAIN_TYPES, Wrapped))
    monkeypatch.setattr(ModelFacts, "check_supported", lambda facts: None)

    graph = lowtide.trace(subclass_weight(), torch.randn(4, 16))

    assert [op.name for op in graph.forward_ops].count("aten.addmm.default") == 4


def test_a_compiled_function_inside_forward_is_right():
    torch._dynamo.reset()
    inner = torch.compile(lambda h: F.dropout(h.sin() * h.cos(), 0.5), backend="aot_eager")
    model, x = Net(lambda self, x: self.layers[1](inner(self.layers[0](x))).sin()), torch.randn(4, 8)
    try:
        plan = harshest(model, x)
        torch.manual_seed(7)
        bare = copy.deepcopy(model)
        expected = bare(x).square().mean()
        expected.backward()
        torch.manual_seed(7)
        with lowtide.apply(model, plan):
            loss = model(x).square().mean()
        loss.backward()
        assert differing(outcome(bare, expected), outcome(model, loss)) == []
    finally:
        torch._dynamo.reset()
    assert is_clean(model)


def test_ops_on_a_jagged_tensor_in_the_step_are_ops_on_its_values():
    """Its sizes are symbols: no part of it stands for the whole, so what autograd stores of it stays."""

    def forward(self, x):
        jagged = torch.nested.nested_tensor_from_jagged(self.layers[0](x).tanh(), torch.tensor([0, 1, 4]))
        return (jagged * 2).values().tanh()

    model, x = Net(forward), torch.randn(4, 8)
    graph = lowtide.trace(model, x)
    plan = drop_everything(graph)
    assert plan.counts["recompute"] and lowtide.verify(model, x, plan).equal
