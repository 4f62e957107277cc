"""In-place ops that complete what an op has made before anything reads it: part of that op's recipe."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from lowtide.step.execution_state import GeneratorState
from lowtide.tape.values import ViewSpec


class OwnOutput(ViewSpec):
    """A recipe's own output as an argument of what completes it. Holds no value: that would be a cycle."""

    __slots__ = ("output",)

    def __init__(self, tensor: Tensor, output: int) -> None:
        super().__init__(tensor)
        self.output = output


class Completion(NamedTuple):
    """An in-place op on a recipe's own output."""

    func: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    rng: GeneratorState | None

    def run(self, output: Callable[[int], Tensor], resolve: Callable[[Any], Any]) -> None:
        """Run it on what ``output`` gives by position; ``resolve`` gives its other arguments."""
        args = [a.view_of(output(a.output)) if type(a) is OwnOutput else resolve(a) for a in self.args]
        with nullcontext() if self.rng is None else self.rng.restored():
            self.func(*args, **{name: resolve(a) for name, a in self.kwargs.items()})
