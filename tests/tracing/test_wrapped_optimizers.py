"""An optimizer that steps another one: what it keeps is never found out by stepping the real one."""

import copy

import pytest
import torch
from support.watched_training import Layered, batch_of, resident_bytes
from torch import nn

import lowtide
from lowtide.hollow import optimizer as hollow
from lowtide.step.optimizer_state import UnknownStateError, optimizer_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


class Container(torch.optim.Optimizer):
    """As torchtitan's: an optimizer for hooks and schedulers, which steps those that it holds."""

    def __init__(self, parameters) -> None:
        self.optimizers = [torch.optim.AdamW(parameters, lr=0.1)]
        super().__init__(parameters, {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class Sharpness(torch.optim.Optimizer):
    """As SAM: groups and parameters are those of its base, held by another object."""

    class Holder:
        def __init__(self, base) -> None:
            self.base = base

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.held = {"base": self.Holder(torch.optim.Adam(self.param_groups, lr=0.1))}

    def step(self, closure=None):
        self.held["base"].base.step()


class ByMethod(torch.optim.Optimizer):
    """It holds a method of the other."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})
        inner = torch.optim.Adam(self.param_groups, lr=0.1)
        self.go = inner.step

    def step(self, closure=None):
        self.go()


class OutOfSight(torch.optim.Optimizer):
    """Nothing of what it holds shows the other."""

    inner: dict = {}  # noqa: RUF012

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner["of"] = torch.optim.Adam(self.param_groups, lr=0.1)

    def step(self, closure=None):
        self.inner["of"].step()


KINDS = [Container, Sharpness, ByMethod]


def snapshot(model, optimizer):
    inner = [
        o for o in gathered() if any(p is q for g in o.param_groups for p in g["params"] for q in model.parameters())
    ]
    states = [copy.deepcopy(list(o.state.values())) for o in (optimizer, *inner)]
    return [p.detach().clone() for p in model.parameters()], states


def gathered():
    import gc

    return [o for o in gc.get_objects() if type(o) in (torch.optim.AdamW, torch.optim.Adam)]


@pytest.mark.parametrize("kind", [*KINDS, OutOfSight])
def test_finding_out_moves_nothing_of_the_training(kind):
    model = nn.Linear(64, 64)
    optimizer = kind(list(model.parameters()))
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    before = snapshot(model, optimizer)
    with pytest.raises(hollow.NotRehearsedError):
        hollow.hollow_step_bytes(optimizer, {id(p) for p in model.parameters()}, kernels="cpu", beside=lowtide_seen())
    after = snapshot(model, optimizer)
    for was, now in zip([*before[0], *tensors(before[1])], [*after[0], *tensors(after[1])], strict=True):
        assert torch.equal(was, now)


def lowtide_seen():
    from lowtide.step import optimizer_steps

    optimizer_steps.watch()
    return [*optimizer_steps.seen(), *gathered()]


def tensors(states):
    return [value for state in states for kept in state for value in kept.values()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_passed", [True, False])
def test_training_is_bitwise_the_same(kind, is_passed):
    def trained(budget):
        torch.manual_seed(0)
        model = Layered()
        optimizer = kind(list(model.parameters()))
        given = {"optimizer": optimizer} if is_passed else {}
        fit = lowtide.fit(model, budget=budget(model), **given) if budget else None
        for _ in range(4):
            model(batch_of()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if fit is not None:
                fit.wait()
        if fit is not None:
            assert fit.status().planned_steps >= 2
            fit.remove()
        return [p.detach() for p in model.parameters()]

    plain, ours = trained(None), trained(lambda model: 16 * resident_bytes(model))
    assert all(map(torch.equal, plain, ours))


def test_it_is_told_that_nothing_is_known_before_the_first_step():
    model = nn.Linear(64, 64)
    with pytest.raises(UnknownStateError, match="it steps another optimizer, AdamW"):
        optimizer_bytes(Container(list(model.parameters())), list(model.parameters()))


def test_what_a_container_steps_is_foreseen_beside_it():
    model = nn.Linear(64, 64)
    container = Container(list(model.parameters()))
    alone = optimizer_bytes(container.optimizers[0], list(model.parameters()))
    assert optimizer_bytes([container.optimizers[0], container], list(model.parameters())) == alone != (0, 0)


def test_the_look_is_needed(monkeypatch):
    monkeypatch.setattr(hollow, "optimizers_inside", lambda _: [])
    monkeypatch.setattr(hollow._Hollow, "_check_written", lambda *_: None)
    model = nn.Linear(64, 64)
    optimizer = Container(list(model.parameters()))
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    hollow.hollow_step_bytes(optimizer, {id(p) for p in model.parameters()}, kernels="cpu")
    (state,) = {float(kept["step"]) for kept in optimizer.optimizers[0].state.values()}
    assert state > 1
