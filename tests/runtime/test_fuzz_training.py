"""Random small programs, trained under ``fit`` for some steps: online, under a plan, and with other ops than planned.

python tests/runtime/test_fuzz_training.py 2000        trains as many programs, of all lengths, and counts the outcomes
"""

import collections
import copy
import logging
import sys
import warnings

import pytest
import torch
from support.quick import is_quick
from support.random_programs import draw
from support.training_steps import differing, outcome
from torch import nn

import lowtide
from lowtide.tape import recipes, tape
from lowtide.tape.online import release

EQUAL, DIFFERS, REFUSED, SAME_ERROR, OTHER_ERROR, IDLE = (
    "equal", "differs", "refused by name", "plain PyTorch refuses it too", "fails only here", "never under a plan",
)  # fmt: skip
LENGTHS = (6, 9, 14)


def one_step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None] | Exception:
    torch.manual_seed(7)
    model.zero_grad()
    try:
        loss = model(x).square().mean()
        loss.backward()
    except (RuntimeError, lowtide.LowtideError) as error:
        return error
    return outcome(model, loss)


def other_program(seed: int, length: int) -> list:
    """One that does not touch ``.data``: of tensors made before a step leaves its plan nobody looks (supported.md)."""
    programs = (draw(seed + 10**7 + n, length)[0].program for n in range(100))
    return next(p for p in programs if not any("data" in name for name, _ in p))


def result_of(seed: int, length: int) -> str:
    """How a few steps of a random program end; one of them runs another program, that no plan knows."""
    model, x = draw(seed, length)
    bare, own, planned = copy.deepcopy(model), model.program, 0
    with lowtide.fit(model, budget="40%") as fit:
        for program in (own, own, own, other_program(seed, length), own):
            bare.program = model.program = program
            expected, found = one_step(bare, x), one_step(model, x)
            if isinstance(expected, Exception):
                return SAME_ERROR  # what was stored and written may be made again here: then nothing fails
            if isinstance(found, Exception):
                return REFUSED if isinstance(found, lowtide.LowtideError) else OTHER_ERROR
            if differing(expected, found):
                return DIFFERS
            fit.wait()
            planned += fit.status().in_force and fit.plan.counts["recompute"] > 0
        if any("an error of lowtide's own" in reason for reason in fit.warnings):
            return OTHER_ERROR
    return EQUAL if planned else IDLE


def tally(seeds: range, length: int) -> collections.Counter[str]:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # out= on a tensor of another size
            return collections.Counter(result_of(seed, length) for seed in seeds)
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
    count = int(sys.argv[1])
    for length in LENGTHS:
        print(length, dict(tally(range(10**6, 10**6 + count // len(LENGTHS)), length)), flush=True)
