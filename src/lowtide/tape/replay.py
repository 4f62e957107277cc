"""Bursts: what has to run when backward unpacks a dropped tensor.

    Burst    the recipes between a Value and what is there, run in program order.

A plan says how often each recipe may run in one backward; mostly once. All its runs but the last are *passing*: only
what the burst needs is made, each result goes when its last reader in the burst has run, and the recipe keeps its
arguments. A passing result that autograd asked for is *lent*: the tape forgets it, yet finds it again for as long as
autograd has it. The last run makes its results for good, so whatever comes after, in whatever order, finds them.

Outside backward (somebody looks at ``grad_fn._saved_self``) every run is passing and none is counted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd  # where ops were recorded: nothing is tracked
from torch._C import _current_graph_task_id as graph_task

from lowtide.errors import ReplayError
from lowtide.tape.execution_state import no_autocast
from lowtide.tape.recipes import Recipe, had_by_one, keeps_graph
from lowtide.tape.values import Value, View

_lock = threading.RLock()


def unpacked(stands: Value | View) -> Tensor:
    """The tensor that autograd stored, made again if need be. Called by autograd inside backward.

    Raises:
        ReplayError: something it is made from was changed in place.
    """
    if torch.is_grad_enabled():  # under create_graph
        with torch.no_grad():
            return unpacked(stands)
    value = stands.value
    if value.recipe is None and value.tensor is not None:  # made for good
        return stands.of(value.tensor)
    with _lock:
        tensor = value.tensor if stands is value else None
        if tensor is None:
            with below_autograd():
                tensor = stands.of(materialise(value))
        had_by_one(value)
        return tensor  # autograd makes a shallow copy before it attaches history


def materialise(value: Value) -> Tensor:
    """The tensor of a Value, after replaying whatever it needs: iteratively, in program order, each op once."""
    tensor = value.tensor
    if tensor is None:
        tensor = value.found_again()
    return Burst(value).run() if tensor is None else tensor


class Burst:
    """The recipes that must run for one Value.

    Attributes:
        passing: The Values that are made in passing, with the number of recipes here that are still to read each.
        borrowed: Lent Values that recipes here read.
    """

    __slots__ = ("borrowed", "look", "passing", "recipes", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.look = graph_task() == -1
        self.borrowed: list[Value] = []
        self.passing: dict[Value, int] = {}
        last = _recipe_of(value)
        if self.look or last.passing_runs:
            self.passing[value] = 0
        self.recipes = recipes = {last.number: last}
        stack = [last]
        while stack:
            for needed in stack.pop().inputs:
                if needed.tensor is not None or (needed.lent is not None and self._borrow(needed)):
                    continue
                maker = _recipe_of(needed)
                if maker.number not in recipes:
                    recipes[maker.number] = maker
                    stack.append(maker)
                if self.look or maker.passing_runs:
                    self.passing[needed] = self.passing.get(needed, 0) + 1

    def _borrow(self, value: Value) -> bool:
        value.tensor = value.found_again()
        if value.tensor is not None:
            self.borrowed.append(value)
        return value.tensor is not None

    def run(self) -> Tensor:
        """Make the Value; return its tensor."""
        value, recipes, keep = self.value, self.recipes, keeps_graph()
        ambient = value.run
        if keep and ambient.steps_in_backward():
            raise ReplayError(
                "backward(retain_graph=True) on a model whose parameters have post-accumulate hooks: an optimizer "
                "fused into\nbackward changes weights that a second backward would replay with.\n"
                "Leave out retain_graph, or remove the plan for this step."
            )
        made: list[weakref.ref[Value]] = []
        passed: list[weakref.ref[Recipe]] = []
        with no_autocast(), ambient.restored():
            for number in sorted(recipes):
                recipe = recipes.pop(number)
                inputs = recipe.inputs if self.passing else ()
                if self.look or recipe.passing_runs:
                    recipe.replay(keep=True, wanted=self.passing)
                    if not self.look:
                        recipe.passing_runs -= 1
                        passed.append(weakref.ref(recipe))
                else:
                    recipe.replay(keep=keep)
                if keep:
                    made.extend(map(weakref.ref, recipe.values()))
                del recipe
                if inputs:
                    self._read(inputs)
                    del inputs
        for lent in self.borrowed:
            if lent.lent is not None:  # not made for good meanwhile, with another output of its op
                lent.tensor = None
        if keep:
            _forget_after_backward(made, passed)
        tensor = value.tensor
        assert tensor is not None
        if value in self.passing and value.recipe is not None:
            if self.look:  # what somebody looks at from outside they may change: the next backward makes its own
                value.tensor = value.lent = None
            else:
                value.lend()
        return tensor

    def _read(self, inputs: Iterable[Value]) -> None:
        """A recipe that reads ``inputs`` has run: passing ones that no other recipe here reads go."""
        for value in inputs:
            left = self.passing.get(value)
            if left is None:
                continue
            if left > 1:
                self.passing[value] = left - 1
                continue
            del self.passing[value]
            if value.recipe is not None:  # None: an audit kept the original, for good
                value.tensor = None


def _recipe_of(value: Value) -> Recipe:
    if value.recipe is None:
        raise ReplayError(
            "a dropped tensor was asked for after it had been used up and freed.\nThis is a bug in lowtide."
        )
    return value.recipe


def _forget_after_backward(made: list[weakref.ref[Value]], passed: list[weakref.ref[Recipe]]) -> None:
    """When this backward ends nothing that it replayed stays, and the next one may replay as often."""

    def forget() -> None:
        for reference in made:
            value = reference()
            if value is not None and value.recipe is not None:
                value.tensor = None
                value.left = 0
        for held in passed:
            recipe = held()
            if recipe is not None:
                recipe.passing_runs += 1

    torch.autograd.Variable._execution_engine.queue_callback(forget)
