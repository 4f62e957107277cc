"""Random small programs: none is silently wrong.

python tests/tape/test_fuzz.py 5000        runs as many programs, of all lengths, and counts the outcomes
"""

import collections
import copy
import sys
import warnings
from typing import Any

import pytest
import torch
from support.random_programs import INVISIBLE, draw
from support.training_steps import differing, drop_everything, outcome, plain, planned

import lowtide
from lowtide.plan import RECOMPUTE
from lowtide.step.data_assignments import DataAssignmentGuard
from lowtide.tape import recipes, tape, values

EQUAL, DIFFERS, REFUSED, SAME_ERROR, OTHER_ERROR, IDLE = (
    "equal", "differs", "refused by name", "plain PyTorch refuses it too", "fails only here", "nothing to recompute",
)  # fmt: skip
LENGTHS = (6, 9, 14)


def result_of(seed: int, length: int) -> str:
    """How one step of a random program ends, with everything dropped that may be."""
    model, x = draw(seed, length)
    expected = outcome_or_error(model, x)
    try:
        plan = drop_everything(lowtide.trace(model, x))
        if not plan.counts[RECOMPUTE]:
            return IDLE
        found = planned(model, x, plan)
    except lowtide.LowtideError:
        return SAME_ERROR if isinstance(expected, RuntimeError) else REFUSED
    except RuntimeError:
        return SAME_ERROR if isinstance(expected, RuntimeError) else OTHER_ERROR
    if isinstance(expected, RuntimeError):  # it writes what autograd stored, and what was stored is made again
        return SAME_ERROR
    return DIFFERS if differing(expected, found) else EQUAL


def outcome_or_error(model: torch.nn.Module, x: torch.Tensor) -> Any:
    try:
        return plain(model, x)
    except RuntimeError as error:
        return error


def tally(seeds: range, length: int) -> collections.Counter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # out= on a tensor of another size
        return collections.Counter(result_of(seed, length) for seed in seeds)


@pytest.mark.parametrize("length", LENGTHS)
def test_no_random_program_is_silently_wrong(length):
    found = tally(range(length * 1000, length * 1000 + 40), length)

    assert set(found) <= {EQUAL, REFUSED, SAME_ERROR, IDLE}, found
    assert found[EQUAL] > 20


def no_inplace_ops_in_recipes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recipes.Recipe, "extend", lambda self, *args: None)


def no_random_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tape, "draws_random_numbers", lambda func, args, kwargs: False)


def no_data_assignment_guard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DataAssignmentGuard, "check", lambda self, tensor: None)


def no_strides(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(values.ViewSpec, "view_of", lambda self, base: base.flatten()[: self.size.numel()].view(self.size))


@pytest.mark.parametrize("remove", [no_inplace_ops_in_recipes, no_random_state, no_data_assignment_guard, no_strides])
def test_a_program_tells_when_a_guard_is_gone(remove, monkeypatch):
    remove(monkeypatch)

    assert any(result_of(seed, 9) in (DIFFERS, OTHER_ERROR) for seed in range(9000, 9100))


def fitted(model: torch.nn.Module, x: torch.Tensor) -> lowtide.Fit:
    try:
        return lowtide.fit(model, x, budget="60%")
    except lowtide.BudgetInfeasibleError as error:  # what must be saved may take more than this: it is taken
        return lowtide.fit(model, x, budget=error.least_bytes)


@pytest.mark.parametrize("seed", [500, 501, 503, 504, 505, 506, 507])  # 502 is refused by name
def test_writes_that_nothing_shows_are_found_in_rehearsals(seed):
    model, x = draw(seed, 6, invisible=True)
    assert model.program[0][0] in INVISIBLE
    expected = outcome_or_error(model, x)
    ours = copy.deepcopy(model)

    fit = fitted(ours, x)
    torch.manual_seed(7)
    loss = ours(x).square().mean()
    if isinstance(expected, RuntimeError):
        with pytest.raises(RuntimeError):
            loss.backward()
        return
    loss.backward()

    assert fit.plan.predicted_peak_bytes <= fit.plan.budget_bytes
    assert differing(expected, outcome(ours, loss)) == []


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[1])
    for length in LENGTHS:
        print(length, dict(tally(range(10**6, 10**6 + count // len(LENGTHS)), length)), flush=True)
