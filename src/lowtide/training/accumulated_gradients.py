"""Gradients as they were before a step, to be put back bitwise.

Addition cannot be undone, so each gradient is copied, unless it was None. The copy is made right before backward first
adds to the gradient, not when the step begins. At the step's peak, when backward starts, there are no copies yet; they
are made as activations are freed.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.step.module_calls import never_compiled
from lowtide.step.operators import gradient_of


class _Gradient:
    """One leaf's, as it was."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self.leaf, self.grad = leaf, gradient_of(leaf)
        self.copy: torch.Tensor | None = None
        self.note_version()

    def note_version(self) -> None:
        self.version = None if self.grad is None else self.grad._version

    @property
    def is_lost(self) -> bool:
        """Something other than backward has written it."""
        return self.grad is not None and self.copy is None and self.grad._version != self.version


class GradientsBefore:
    """The ``.grad`` of leaves at the moment when each was first named.

    Args:
        spare_bytes: What the budget leaves on the model's device while backward runs. Copies that do not fit go to host
            memory: device memory is what is short.
    """

    def __init__(self, spare_bytes: Callable[[], int]) -> None:
        self._spare_bytes = spare_bytes
        self._gradients: dict[int, _Gradient] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._on_device: bool | None = None  # where copies are; decided with the first one

    def __contains__(self, leaf: torch.Tensor) -> bool:
        return id(leaf) in self._gradients

    def add(self, leaves: Iterable[torch.Tensor]) -> None:
        """From now on these are put back, too. Call it before a backward reaches them."""
        for leaf in leaves:
            if leaf in self:
                continue
            self._gradients[id(leaf)] = gradient = _Gradient(leaf)
            if gradient.grad is not None and leaf.requires_grad:
                self._hooks.append(leaf.register_hook(partial(self._before_addition, gradient)))

    @never_compiled
    def _before_addition(self, gradient: _Gradient, _: torch.Tensor) -> None:
        grad = gradient.grad
        if grad is None or gradient.copy is not None:
            return
        if self._on_device is None:
            total = sum(g.grad.numel() * g.grad.element_size() for g in self._gradients.values() if g.grad is not None)
            self._on_device = total <= self._spare_bytes()
        # The tape must not take the copy for an op of the step.
        with torch.no_grad(), _disable_current_modes():
            gradient.copy = grad.clone() if self._on_device else grad.to("cpu", copy=True)

    def restore(self) -> str:
        """Put every gradient back, the same tensors with the same bits; else why that cannot be done."""
        if any(gradient.is_lost for gradient in self._gradients.values()):
            return "it wrote gradients by other means than backward"
        with torch.no_grad():
            for gradient in self._gradients.values():
                if gradient.grad is not None and gradient.copy is not None:
                    gradient.grad.copy_(gradient.copy)
                gradient.note_version()
                gradient.leaf.grad = gradient.grad
        return ""

    def close(self) -> None:
        """Let go of copies and hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gradients.clear()
