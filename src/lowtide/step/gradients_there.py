"""The gradients that a model has when a step begins, which of them have gone since, and what steps make of that.

Many loops free the last step's gradients between forward and backward (``loss = ...; optimizer.zero_grad();
loss.backward()``), Lightning's is one. They are there in forward, and their room is free in backward.
"""

import weakref

import torch
from torch import nn

from lowtide.graph.gradients import with_gradients_before, with_gradients_gone
from lowtide.graph.step_graph import StepGraph
from lowtide.step.operators import allocated_bytes, gradient_of, storage_of
from lowtide.step.subclasses import plain_tensors


class GradientsThere:
    """Of one step of ``model`` on ``device``.

    Attributes:
        gone: By parameter, whether all memory of its gradient has gone, as ``let_go`` has found.
        gone_bytes: Of the storages that have.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # those that are there
        self._of: dict[str, list[int]] = {}
        self.gone_bytes: list[int] = []
        for name, parameter in model.named_parameters():
            if (grad := gradient_of(parameter)) is None:
                continue
            self._of[name] = []
            for tensor in plain_tensors(grad):
                storage = storage_of(tensor)
                if storage is not None and storage.device == device:
                    self._of[name].append(storage._cdata)
                    self._storages[storage._cdata] = weakref.ref(storage), allocated_bytes(storage)

    @property
    def gone(self) -> set[str]:
        return {name for name, keys in self._of.items() if keys and self._storages.keys().isdisjoint(keys)}

    def let_go(self) -> int:
        """Bytes that have gone since the last look."""
        gone = [key for key, (reference, _) in self._storages.items() if reference() is None]
        sizes = [self._storages.pop(key)[1] for key in gone]
        self.gone_bytes += sizes
        return sum(sizes)


class AddingSteps:
    """Whether steps that begin with gradients add to them, by the pattern of their calls.

    Where steps of a pattern do one and the other, as where micro-batches are accumulated, they count as adding.
    """

    def __init__(self) -> None:
        self._adds: dict[str, bool] = {}  # False: none so far, all have let go of them

    def note(self, pattern: str, *, adds: bool) -> bool:
        """A step has ended that began with gradients: whether its pattern counts as another now."""
        if self._adds.get(pattern) in (True, adds):
            return False
        self._adds[pattern] = adds
        return True

    def adds(self, pattern: str) -> bool:
        """Whether one of its steps has added to gradients."""
        return self._adds.get(pattern, False)

    def as_steps_are(self, pattern: str, graph: StepGraph) -> StepGraph:
        """``graph`` of a step that begins with gradients, as those of ``pattern`` go on with them."""
        adds = self._adds.get(pattern)
        if adds and graph.gone_bytes:
            return with_gradients_before(graph)
        if adds is False and not graph.gone_bytes:
            return with_gradients_gone(graph)
        return graph

    def clear(self) -> None:
        self._adds.clear()
