"""What the allocator counts for the first step under a plan, so that a plan that takes more than its budget is mended.

Generated code says what is asked for. On an accelerator the allocator may count more: a block of a segment that does
not grow is handed out whole where little would be left of it, a misaligned input is copied, and something may live that
did not when the step was watched, such as an optimizer's state.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from lowtide.compiled.compiled_plan import CompiledPlan
from lowtide.device.memory import PeakWindow
from lowtide.device.names import is_accelerator


class CountedStep(NamedTuple):
    """The first step under ``plan``: its peak in absolute bytes."""

    shapes: str
    plan: CompiledPlan
    peak_bytes: int


class CountedPeaks:
    """Counts one step of each plan; an observer of backwards, of which the first ends the step."""

    def __init__(self) -> None:
        self._counted: list[CompiledPlan] = []
        self._open: tuple[str, CompiledPlan, PeakWindow] | None = None
        self._found: CountedStep | None = None

    def begin(self, shapes: str, plan: CompiledPlan, device: torch.device) -> None:
        """A call under ``plan`` begins."""
        self.stop()
        if is_accelerator(device) and not any(plan is counted for counted in self._counted):
            self._open = shapes, plan, PeakWindow(device, afresh=True)

    def before_backward(self, roots: Iterable[Any], *, creates: bool) -> None:
        """Nothing."""

    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None:
        """The step has ended."""
        if self._open is None or error is not None:
            return
        shapes, plan, window = self._open
        self._open = None
        peak = window.close()
        if peak is not None:
            self._counted.append(plan)
            self._found = CountedStep(shapes, plan, peak)

    def take(self) -> CountedStep | None:
        """What was counted since it was last asked."""
        found, self._found = self._found, None
        return found

    def stop(self) -> None:
        """Leave a step that has no backward."""
        if self._open is not None:
            self._open[2].close()
            self._open = None
