"""The budget of a step in bytes: fixed once, and what of it is left for what the step makes."""

import torch
from torch import nn

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.measurement.device import available_bytes
from lowtide.solvers.arguments import absolute_bytes
from lowtide.tracing.operators import allocated_bytes, storage_of, tensors_in
from lowtide.tracing.subclasses import plain_tensors
from lowtide.tracing.tracer import device_of
from lowtide.units import format_bytes, parse_budget

AUTO_MARGIN = 0.1  # of free memory, left alone by budget="auto": allocator fragmentation, and whoever else allocates

LOWERED_BY = 0.1  # of what the step may make, each time memory runs out


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator has refused: a device's, or the CPU's, which has no error class of its own."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _in_steps(size: int) -> int:
    """``size`` less at most a thirty-second: free memory differs from run to run, and a kept plan is for one budget."""
    step = 1 << max(size.bit_length() - 6, 0)
    return size // step * step


class StepBudget:
    """What ``fit`` was asked for, as bytes.

    Attributes:
        absolute_bytes: Resident memory included; None as long as a percentage waits for the first step's graph.
        resident_bytes: Parameters, buffers, gradients and optimizer state when last looked at.
        batch_bytes: Of the last step without a plan: what is beside these when it starts.
    """

    def __init__(self, model: nn.Module, budget: int | str, optimizer: object = None) -> None:
        self._asked = budget
        self._optimizer = optimizer
        self.resident_bytes, self.batch_bytes = self._resident(model), 0
        parsed = parse_budget(budget)
        self.absolute_bytes: int | None = None
        if parsed == "auto":
            free = available_bytes(device_of(model))
            self.absolute_bytes = self.resident_bytes + _in_steps(int((1 - AUTO_MARGIN) * free))
        elif isinstance(parsed, int):
            self.absolute_bytes = parsed
            if parsed <= self.resident_bytes:
                raise BudgetInfeasibleError(
                    f"no plan fits budget={format_bytes(parsed)}: the model's parameters, buffers, gradients and "
                    f"optimizer state alone take {format_bytes(self.resident_bytes)}.\n"
                    "Raise the budget above that: it includes them.",
                    budget_bytes=parsed,
                    least_bytes=self.resident_bytes,
                )

    def for_step(self, model: nn.Module, batch: object) -> int:
        """Bytes for what a step makes that starts now, on ``batch``."""
        self.resident_bytes = self._resident(model)
        self.batch_bytes = self._resident(model, batch) - self.resident_bytes
        if self.absolute_bytes is None:  # a percentage: the first step may take what is free
            return int((1 - AUTO_MARGIN) * available_bytes(device_of(model)))
        return max(0, self.absolute_bytes - self.resident_bytes - self.batch_bytes)

    def fixed_for(self, graph: StepGraph, costs: Costs) -> int:
        """The budget in bytes, resident memory included; a percentage is of this graph's plain step, once for all."""
        if self.absolute_bytes is None:
            self.absolute_bytes = absolute_bytes(graph, costs, self._asked)
        return self.absolute_bytes

    def lower(self) -> None:
        """Of what the step may make, a tenth less: there was not enough memory for it."""
        if self.absolute_bytes is not None:
            self.absolute_bytes -= int(LOWERED_BY * max(0, self.absolute_bytes - self.resident_bytes))

    def _resident(self, model: nn.Module, batch: object = ()) -> int:
        state = getattr(self._optimizer, "state", None)
        tensors = [
            *model.parameters(),
            *model.buffers(),
            *(p.grad for p in model.parameters() if p.grad is not None),
            *(tensors_in(list(state.values())) if isinstance(state, dict) else ()),
            *tensors_in(batch),
        ]
        device = device_of(model)
        storages = {s._cdata: s for t in plain_tensors(*tensors) if (s := storage_of(t)) is not None}
        return sum(allocated_bytes(s) for s in storages.values() if torch.device(s.device) == device)
