"""Replay: the recipes between a dropped tensor and what is in memory run in a *burst* when backward unpacks it.

A plan says how often each recipe may run in one backward; mostly once. Its last replay is *final*: the results stay for
all later users, in whatever order they come. The replays before it are *transient*: only what the burst needs is made,
each result is freed when its last reader in the burst has run, and the recipe keeps its arguments. If autograd asked
for a transient result, the tape holds no reference to it but finds it again as long as autograd does.

Outside backward (``grad_fn._saved_self`` is read, for example) every replay is transient and none is counted.
"""

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd  # where ops were recorded
from torch._C import _current_graph_task_id as graph_task
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.errors import ReplayError
from lowtide.step.execution_state import no_autocast
from lowtide.tape.recipes import Recipe, count_use, keeps_graph
from lowtide.tape.values import Source, Value, View, stand_for

_lock = threading.RLock()


def unpacked(placeholder: Value | View) -> Tensor:
    """The tensor that autograd saved, replayed if it is dropped. Called by autograd inside backward.

    Raises:
        ReplayError: an input of a replayed op was changed in place.
    """
    if torch.is_grad_enabled():  # under create_graph
        with torch.no_grad(), _disable_current_modes():  # the tape sees ops of the step, and replays are none
            tensor = unpacked(placeholder)
        if graph_task() != -1:
            stand_for(placeholder.value, tensor)  # ops of this backward save it again
        return tensor
    value = placeholder.value
    if value.source is None and value.tensor is not None:  # after the final replay
        return placeholder.view_of(value.tensor)
    with _lock:
        tensor = value.tensor if placeholder is value else None
        if tensor is None:
            with below_autograd():
                tensor = placeholder.view_of(materialise(value))
        count_use(value)
        return tensor  # autograd makes a shallow copy before it attaches history


def materialise(value: Value) -> Tensor:
    """The tensor of a Value, after a burst of all that it needs if it is dropped."""
    tensor = value.tensor
    if tensor is None:
        tensor = value.transient_tensor()
    return Burst(value).run() if tensor is None else tensor


class Burst:
    """The recipes that must run for one Value, in program order: found without recursion, each once."""

    __slots__ = ("borrowed", "outside_backward", "recipes", "transient", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.outside_backward = graph_task() == -1
        self.borrowed: list[Value] = []  # transient results of earlier bursts that recipes here read
        # Values whose replay here is transient, with the number of recipes here that still have to read each.
        self.transient: dict[Value, int] = {}
        last = _source_of(value)
        if self._is_transient(last):
            self.transient[value] = 0
        self.recipes = recipes = {last.number: last}
        stack = [last]
        while stack:
            for needed in stack.pop().inputs:
                if needed.tensor is not None or (needed.transient is not None and self._borrow(needed)):
                    continue
                source = _source_of(needed)
                if source.number not in recipes:
                    recipes[source.number] = source
                    stack.append(source)
                if self._is_transient(source):
                    self.transient[needed] = self.transient.get(needed, 0) + 1

    def _is_transient(self, source: Source) -> bool:
        """Whether its replay is for this burst alone."""
        return self.outside_backward or (source.transient_replays > 0 and not source.once_a_pass)

    def _borrow(self, value: Value) -> bool:
        value.tensor = value.transient_tensor()
        if value.tensor is not None:
            self.borrowed.append(value)
        return value.tensor is not None

    def run(self) -> Tensor:
        """Replay the recipes; return the Value's tensor."""
        value, recipes, keeps = self.value, self.recipes, keeps_graph()
        state = value.run
        if keeps and state.steps_in_backward():
            raise ReplayError(
                "backward(retain_graph=True) on a model whose parameters have post-accumulate hooks: an optimizer "
                "fused into\nbackward changes weights that a second backward would replay with.\n"
                "Leave out retain_graph, or remove the plan for this step."
            )
        replayed: list[weakref.ref[Value]] = []
        transient_recipes: list[weakref.ref[Source]] = []
        with no_autocast(), state.restored():
            for number in sorted(recipes):
                recipe = recipes.pop(number)
                inputs = recipe.inputs if self.transient or keeps else ()
                if self._is_transient(recipe):
                    recipe.replay(keep=True, wanted=self.transient)
                    if not self.outside_backward:
                        recipe.transient_replays -= 1
                        transient_recipes.append(weakref.ref(recipe))
                    if keeps and not state.knows_passes:
                        replayed.extend(map(weakref.ref, recipe.values()))
                else:
                    again = keeps and (recipe.transient_replays > 0 if state.knows_passes else True)
                    recipe.replay(keep=again)
                    if again:
                        replayed.extend(map(weakref.ref, recipe.values()))
                        recipe.transient_replays -= state.knows_passes
                    if keeps:
                        self._count_uses(inputs, final=not again)
                del recipe
                if inputs:
                    self._read(inputs)
                    del inputs
        for borrowed in self.borrowed:
            if borrowed.transient is not None:  # no final replay of its op meanwhile, for another output
                borrowed.tensor = None
        if replayed or (transient_recipes and keeps and not state.knows_passes):
            _forget_after_backward(replayed, [] if state.knows_passes else transient_recipes)
        tensor = value.tensor
        assert tensor is not None
        if value in self.transient and value.source is not None:
            if self.outside_backward:  # whoever reads it here may change it: the next backward replays it again
                value.tensor = value.transient = None
            else:
                value.release_to_autograd()
        return tensor

    def _count_uses(self, inputs: Iterable[Value], *, final: bool) -> None:
        """A recipe has had ``inputs``; ``final``: no later backward pass needs them for it."""
        for value in inputs:
            # The last use that is counted is the last one there is: a value may be read more often than it has users.
            if value.uses_left != 1 or not any(value in recipe.inputs for recipe in self.recipes.values()):
                count_use(value)
            value.users -= final

    def _read(self, inputs: Iterable[Value]) -> None:
        """A recipe that reads ``inputs`` has run: free the transient ones that no other recipe here reads."""
        for value in inputs:
            left = self.transient.get(value)
            if left is not None and left > 1:
                self.transient[value] = left - 1
            elif left is not None:
                del self.transient[value]
                if value.source is not None:  # None: the original has been put in place
                    value.tensor = None


def replay_readers(storage: torch.UntypedStorage, recipes: Iterable[weakref.ref[Recipe]]) -> None:
    """``storage`` is about to be written as no plan knows: those of ``recipes`` that read it replay now, for good."""
    for reference in recipes:
        recipe = reference()
        if recipe is not None and recipe.source is not None and recipe.reads(storage):
            with torch.no_grad(), below_autograd():
                made = [(value, materialise(value)) for value in recipe.values()]
            for value, tensor in made:
                value.tensor = tensor
                value.make_final()


def _source_of(value: Value) -> Source:
    if value.source is None:
        raise ReplayError(
            "a dropped tensor was asked for after it had been used up and freed.\nThis is a bug in lowtide."
        )
    return value.source


def _forget_after_backward(replayed: list[weakref.ref[Value]], transient_recipes: list[weakref.ref[Source]]) -> None:
    """When this backward ends, free what it replayed and give back the transient replays that it used."""

    def forget() -> None:
        for value_ref in replayed:
            value = value_ref()
            if value is not None and value.source is not None:
                value.tensor = None
                value.uses_left = 0
        for recipe_ref in transient_recipes:
            recipe = recipe_ref()
            if recipe is not None:
                recipe.transient_replays += 1

    torch.autograd.Variable._execution_engine.queue_callback(forget)
