"""What one step gave, and how far it is from what another gave."""

from dataclasses import dataclass

import torch

from lowtide.step.bits import same_bits


@dataclass(frozen=True)
class Outcome:
    """What one step gave."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    generator: torch.Tensor

    def differing(self, other: "Outcome") -> list[str]:
        """Names of what has other bits in ``other``: the loss, gradients, buffers, the generator."""
        pairs = {"loss": (self.loss, other.loss), "random generator": (self.generator, other.generator)}
        pairs |= {f"gradient of {n}": (g, other.gradients.get(n)) for n, g in self.gradients.items()}
        pairs |= {f"buffer {n}": (b, other.buffers[n]) for n, b in self.buffers.items() if n in other.buffers}
        return [name for name, (a, b) in pairs.items() if not same(a, b)]


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Of a gradient ``a`` from ``b``, relative to ``b``."""
    if a is None or b is None:
        other = b if a is None else a
        return 0.0 if other is None or not other.any() else float("inf")
    a, b = a.detach().double(), b.detach().double()
    if same_bits(a, b):
        return 0.0
    norm = float(b.norm())
    found = float((a - b).norm()) / norm if norm else float("inf")
    return found if found == found else float("inf")


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return same_bits(a, b)


def copied(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    return on_host(gradient.to_dense() if gradient.layout is not torch.strided else gradient)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that takes nothing of the memory that a step may just fit in."""
    return tensor.detach().to("cpu", copy=True)
