"""Training that goes past a fitted model: steps of it that lowtide did not see, and backward passes of other models."""

import weakref
import zlib
from collections.abc import Iterable
from threading import get_ident
from typing import Any

import torch
from torch import nn

from lowtide.step import module_calls
from lowtide.step.autograd_leaves import leaves_of
from lowtide.step.operators import gradient_of, storage_of
from lowtide.training.notices import Notices
from lowtide.training.status import Counters

_MANY_OTHERS = 16  # backward passes of other models in a row
_ONLY_OTHERS = (
    f"{_MANY_OTHERS} backward passes in a row were of other models. If this one should be training, a copy of it is: "
    "fit that"
)
_MANY_CALLS = 10  # and no step came of them
_UNTAPED = (
    f"{_MANY_CALLS} calls of the model ran inside torch.func (grad, vjp, vmap and their like), in forward-mode AD or "
    "where saved-tensor hooks are forbidden: nothing there is taped, and those steps run as without lowtide"
)
_CAPTURED = (
    "a call of the model was captured in a CUDA graph, which runs that one step again and again whatever a plan says: "
    "its steps run as without lowtide. Train without such graphs (torchtitan: training.disable_cuda_graphs=True)"
)
_IN_BACKWARD = (
    "the model is called inside a backward pass, as GradCache, cached losses and reentrant checkpoints do: what such "
    "calls store is kept until their own backward, whatever the budget. Smaller mini-batches there take less"
)
_NO_STEP = (
    f"{_MANY_CALLS} calls of the model with gradients, and no backward of what they returned: no step has been seen. "
    "Evaluate under torch.no_grad(); fit the model that is trained"
)
_SAMPLED = 8  # parameters whose gradients tell that somebody trains the model


class PastTraining:
    """Notices backward passes that no call of ``model`` led to, and tells."""

    def __init__(self, model: nn.Module, counters: Counters, reasons: Notices) -> None:
        self._model = weakref.ref(model)
        self._counters, self._reasons = counters, reasons
        self._places = _places_of(model)
        trained = [place for place in self._places if (p := _at(place)) is not None and p.requires_grad]
        self._sampled = trained[:: max(1, len(trained) // _SAMPLED)]
        self._kinds = [type(p) for p in self.sampled]
        # By the thread that runs a backward: gradients before it. None: they say nothing, another ran at the same time.
        self._before: dict[int, list[tuple[int, int]] | None] = {}
        self._num_others = self._num_calls = self._num_untaped = 0
        self._trained_at_first = self._trained()

    @property
    def sampled(self) -> list[nn.Parameter | None]:
        """Some of the trained parameters; None for what is gone."""
        return [_at(place) for place in self._sampled]

    @property
    def are_others(self) -> bool:
        """Something is in the place of trained parameters, as their shards are."""
        return [type(p) for p in self.sampled] != self._kinds

    def before_backward(self) -> None:
        alone = not self._before
        self._before = {**dict.fromkeys(self._before), get_ident(): self._gradients() if alone else None}

    def gradients_moved(self) -> bool:
        """Whether the backward that has ended gave the model gradients, as far as the sample tells."""
        before = self._before.pop(get_ident(), None)
        return before is not None and self._gradients() != before

    def _gradients(self) -> list[tuple[int, int]]:
        return [(id(grad), _version(grad)) for p in self.sampled if p is not None for grad in (gradient_of(p),)]

    def trains(self, roots: Iterable[Any]) -> bool:
        """Whether a backward from ``roots`` reaches parameters of the model."""
        model = self._model()
        if model is None:
            return False
        parameters = {id(p) for p in model.parameters()}
        return any(id(leaf) in parameters for leaf in leaves_of(roots))

    def has_gradients(self) -> bool:
        """Whether the model has any now, as far as the sample tells: a step that begins adds to them."""
        return any(p is not None and gradient_of(p) is not None for p in self.sampled)

    def gradients(self) -> list[weakref.ref[torch.UntypedStorage]]:
        """The memory of those that the sample has: who else holds it keeps it, as DDP does in its buckets."""
        found = (gradient_of(p) for p in self.sampled if p is not None)
        return [weakref.ref(s) for grad in found if grad is not None and (s := storage_of(grad)) is not None]

    def trained_since(self) -> str:
        """What marks steps that train other parameters than at first (frozen and thawed ones); "" for the same."""
        trained = self._trained()
        return "" if trained == self._trained_at_first else f"trains {zlib.crc32(trained):x}; "

    def _trained(self) -> bytes:
        return bytes((p := _at(place)) is not None and p.requires_grad for place in self._places)

    def note_call(self) -> None:
        """The model was called, with gradients."""
        self._num_calls += 1
        if self._num_calls == _MANY_CALLS and not self._counters.steps:
            self._reasons.say(_NO_STEP)
        elif self._num_calls > _MANY_CALLS and self._counters.steps:
            self._reasons.withdraw(_NO_STEP)
        if self._num_others >= _MANY_OTHERS:
            self._reasons.withdraw(_ONLY_OTHERS)
        self._num_others = 0

    def note_untaped_call(self) -> None:
        """The model was called where nothing can be taped."""
        self._num_untaped += 1
        if self._num_untaped == _MANY_CALLS:
            self._reasons.say(_UNTAPED)

    def note_call_in_backward(self) -> None:
        """A step begins while a backward runs, which is not its own."""
        self._reasons.say(_IN_BACKWARD)

    def note_captured_call(self) -> None:
        """The model was called while a CUDA graph is captured."""
        self._counters.why_not_planned = _CAPTURED
        self._reasons.say(_CAPTURED)

    def note_backward_of_others(self) -> None:
        """Another model's, or a copy's of this one: told where it seems to be instead of this one."""
        self._num_others += 1
        if self._num_others == _MANY_OTHERS:
            self._counters.why_not_planned = _ONLY_OTHERS
            self._reasons.say(_ONLY_OTHERS)

    def note_unseen_step(self, own_call: object) -> None:
        """The model got gradients, and no call of it was seen, whose own call is ``own_call`` while it is fitted."""
        self._counters.steps += 1
        why, model = "its forward() was called directly, or parts of it were, or a replica", self._model()
        if model is None:
            why = "the model is gone"
        elif module_calls.is_compiled(model):
            why = "it was compiled after fit"
        elif model._compiled_call_impl is not own_call:
            why = "something has replaced the model's call since fit"
        self._counters.why_not_planned = f"lowtide did not see it: {why}"
        self._reasons.say(
            f"a step went by that lowtide did not see, so nothing of it was planned: {why}. Call the fitted model "
            "itself, fit the part that is called, and fit it last"
        )


# Of modules, not of parameters: where ``model.to`` moves DTensors or float8 weights PyTorch swaps their contents, and
# refuses to if there is a weak reference to one.
_Place = tuple[weakref.ref[nn.Module], str]


def _places_of(model: nn.Module) -> list[_Place]:
    """Where its parameters are, each once."""
    places: dict[int, _Place] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), (weakref.ref(module), name))
    return list(places.values())


def _at(place: _Place) -> nn.Parameter | None:
    """The parameter there now; None if it is gone."""
    module = place[0]()
    return None if module is None else getattr(module, place[1], None)


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
