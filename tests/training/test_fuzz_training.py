"""Random small programs, trained under ``fit`` for some steps: online, under a plan, and with other ops than planned.

python tests/training/test_fuzz_training.py 2000        trains as many programs, of all lengths, and counts the outcomes
python tests/training/test_fuzz_training.py 2000 kinds  the same for each kind of step
python tests/training/test_fuzz_training.py 2000 leaves the same with steps that leave their plan before some op
"""

import collections
import copy
import logging
import random
import sys
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.quick import is_quick
from support.random_programs import draw
from support.training_steps import differing, outcome
from torch import nn

import lowtide
from lowtide.device import allocation_counter
from lowtide.tape import recipes, tape
from lowtide.tape.online import release
from lowtide.tape.planned_bytes import PlannedBytes

EQUAL, DIFFERS, REFUSED, SAME_ERROR, OTHER_ERROR, IDLE = (
    "equal", "differs", "refused by name", "plain PyTorch refuses it too", "fails only here", "never under a plan",
)  # fmt: skip
LENGTHS = (6, 9, 14)


Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def usual(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The gradient with respect to the input is part of the loss."""
    x = x.detach().clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True, allow_unused=True)
    loss = output.square().mean() + (0.0 if slope is None else slope.square().mean())
    loss.backward()
    return loss


def curvature(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A Hessian-vector product becomes the gradient."""
    loss = model(x).square().mean()
    parameters = [p for p in model.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    used = [(p, g) for p, g in zip(parameters, first) if g is not None and g.requires_grad]
    if used:
        total = sum(g.square().sum() for _, g in used)
        second = torch.autograd.grad(total, [p for p, _ in used], allow_unused=True)
        for (p, _), g in zip(used, second):
            p.grad = g
    return loss


def retained(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two losses, one graph."""
    output = model(x)
    output.square().mean().backward(retain_graph=True)
    loss = output.abs().mean()
    loss.backward()
    return loss


def weighed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A part of the gradients decides over the loss."""
    loss = model(x).square().mean()
    some = [p for p in model.parameters() if p.requires_grad][:1]
    (slope,) = torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True)
    loss = loss / (1.0 if slope is None else 1.0 + slope.norm())
    loss.backward()
    return loss


def stepping(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Weights are written in backward, gradients freed. They are put back: other steps are to find them."""
    before = [p.detach().clone() for p in model.parameters()]
    steps: list[torch.Tensor] = []

    def step(p: torch.Tensor) -> None:
        steps.append(p.grad)
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.5)
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters() if p.requires_grad]
    try:
        usual(model, x)
        return torch.cat([g.flatten() for g in steps])
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for p, value in zip(model.parameters(), before):
                p.copy_(value)


KINDS = (usual, penalty, curvature, retained, weighed, stepping)


def one_step(model: nn.Module, x: torch.Tensor, run: Run = usual) -> dict[str, torch.Tensor | None] | Exception:
    torch.manual_seed(7)
    model.zero_grad()
    try:
        loss = run(model, x)
    except (RuntimeError, lowtide.LowtideError) as error:
        return error
    return outcome(model, loss)


def other_program(seed: int, length: int) -> list:
    """One that does not touch ``.data``: of tensors made before a step leaves its plan nobody looks (supported.md)."""
    programs = (draw(seed + 10**7 + n, length)[0].program for n in range(100))
    return next(p for p in programs if not any("data" in name for name, _ in p))


def result_of(seed: int, length: int, run: Run = usual) -> str:
    """How a few steps of a random program end; one of them runs another program, that no plan knows."""
    model, x = draw(seed, length)
    bare, own, planned = copy.deepcopy(model), model.program, 0
    with lowtide.fit(model, budget="40%") as fit:
        for program in (own, own, own, other_program(seed, length), own):
            bare.program = model.program = program
            expected, found = one_step(bare, x, run), one_step(model, x, run)
            if isinstance(expected, Exception):
                return SAME_ERROR  # what was stored and written may be made again here: then nothing fails
            if isinstance(found, Exception):
                return REFUSED if isinstance(found, lowtide.LowtideError) else OTHER_ERROR
            if differing(expected, found):
                return DIFFERS
            if fit.status().steps:  # what retains a graph may end with the next step's call
                fit.wait()
            planned += fit.status().in_force and fit.plan.counts["recompute"] > 0
        if any("an error of lowtide's own" in reason for reason in fit.warnings):
            return OTHER_ERROR
    return EQUAL if planned else IDLE


def _is_before(last_op: int, op: int, *, has_run: bool) -> bool:
    return op == last_op


def leaves_before(seed: int, length: int, run: Run = usual) -> str:
    """How steps end of which one leaves its plan before some op, as where more lives than planned."""
    model, x = draw(seed, length)
    bare, left = copy.deepcopy(model), 0
    is_passed, at = PlannedBytes.is_passed, random.Random(seed).randrange(2 * length)
    allowance_bytes = PlannedBytes.allowance_bytes
    allocation_counter.prepare(waits=True)
    with lowtide.fit(model, budget="40%") as fit:
        for leaves in (False, False, True, False, True):
            last_op = at if leaves else -1
            PlannedBytes.is_passed = staticmethod(partial(_is_before, last_op))
            if leaves:  # no op runs without the tape
                PlannedBytes.allowance_bytes = property(lambda self: -(1 << 50))
            try:
                expected, found = one_step(bare, x, run), one_step(model, x, run)
            finally:
                PlannedBytes.is_passed, PlannedBytes.allowance_bytes = is_passed, allowance_bytes
            if isinstance(expected, Exception):
                return SAME_ERROR
            if isinstance(found, Exception):
                return REFUSED if isinstance(found, lowtide.LowtideError) else OTHER_ERROR
            if differing(expected, found):
                return DIFFERS
            if fit.status().steps:
                fit.wait()
        left = fit.status().plan_left_steps
        if any("an error of lowtide's own" in reason for reason in fit.warnings):
            return OTHER_ERROR
    return EQUAL if left else IDLE


def tally(
    seeds: range, length: int, run: Run = usual, result: Callable[[int, int, Run], str] = result_of
) -> collections.Counter[str]:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # out= on a tensor of another size
            return collections.Counter(result(seed, length, run) for seed in seeds)
    finally:
        logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _everything_may_go(monkeypatch):
    monkeypatch.setattr(release, "_LEAST_BYTES", 0)


@pytest.mark.parametrize("length", LENGTHS)
def test_no_random_program_trains_silently_wrong(length):
    first = length * 1000
    seeds = range(first + 4, first + 8) if is_quick() else range(first, first + 12)

    found = tally(seeds, length)

    assert set(found) <= {EQUAL, REFUSED, SAME_ERROR, IDLE}, found
    assert found[EQUAL] > (0 if is_quick() else 2)


@pytest.mark.parametrize("run", KINDS[1:], ids=lambda run: run.__name__)
def test_no_other_kind_of_step_trains_silently_wrong(run):
    found = tally(range(9004, 9007) if is_quick() else range(9000, 9012), 9, run)

    assert set(found) <= {EQUAL, REFUSED, SAME_ERROR, IDLE}, found
    assert found[EQUAL] > (0 if is_quick() else 2)


@pytest.mark.parametrize("run", [usual, penalty, retained], ids=lambda run: run.__name__)
def test_no_step_that_leaves_its_plan_before_some_op_trains_silently_wrong(run):
    found = tally(range(7000, 7006) if is_quick() else range(7000, 7020), 9, run, leaves_before)

    assert set(found) <= {EQUAL, REFUSED, SAME_ERROR, IDLE}, found
    assert found[EQUAL] > (0 if is_quick() else 4)


def no_inplace_ops_in_recipes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recipes.Recipe, "extend", lambda self, *args: None)


def no_replay_before_other_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tape.Tape, "_replay_what_reads", lambda self, targets: None)


@pytest.mark.parametrize("remove", [no_inplace_ops_in_recipes, no_replay_before_other_writes])
def test_a_program_tells_when_a_guard_is_gone(remove, monkeypatch):
    remove(monkeypatch)

    assert any(result_of(seed, 9) in (DIFFERS, OTHER_ERROR, REFUSED) for seed in range(9000, 9040))


if __name__ == "__main__":
    torch.set_num_threads(1)
    release._LEAST_BYTES = 0
    count = int(sys.argv[1]) // len(LENGTHS)
    for length in LENGTHS:
        for run in KINDS if "kinds" in sys.argv else (usual,):
            result = leaves_before if "leaves" in sys.argv else result_of
            print(length, run.__name__, dict(tally(range(10**6, 10**6 + count), length, run, result)), flush=True)
