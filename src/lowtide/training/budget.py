"""The budget of a step in bytes, resident memory included, and how many of them the step may still allocate."""

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lowtide.device.block_size import in_blocks
from lowtide.device.kept_workspaces import KeptWorkspaces
from lowtide.device.memory import allocated_bytes as device_bytes
from lowtide.device.memory import available_bytes, bytes_in_pieces, counts_all
from lowtide.device.names import is_accelerator
from lowtide.errors import BudgetInfeasibleError, DeviceError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.arguments import absolute_bytes
from lowtide.step.data_parallel import unseen_bucket_bytes
from lowtide.step.model_tensors import ModelTensors
from lowtide.step.operators import allocated_bytes, gradient_of, storage_of, tensors_in
from lowtide.step.optimizer_state import existing_state_bytes, lasting_state_bytes, state_tensors
from lowtide.step.sharding.zero3 import shards_of
from lowtide.step.subclasses import plain_tensors
from lowtide.tracing.model_facts import device_of
from lowtide.training.reserved_memory import bytes_for_segments
from lowtide.training.training_optimizers import TrainingOptimizers
from lowtide.units import format_bytes, parse_budget

# Of free memory, left alone by budget="auto": allocator fragmentation, and whoever else allocates. Where little is free
# on a device, segments that are not full take more.
AUTO_MARGIN = 0.1

LOWERED_BY = 0.1  # of what the step may make, when memory has run out and nothing says how much was missing
LEAST_LOWERED_BY = 1 / 32  # where something does: an allocator also needs room for what it cannot fill
_PLAIN = (torch.Tensor, nn.Parameter)
_MOST_AT_ONCE = 0.5  # of what the step may make: somebody else may have taken the memory for a moment


def in_steps(size: int) -> int:
    """``size`` less at most a thirty-second: free memory differs from run to run, and a kept plan is for one budget."""
    step = 1 << max(size.bit_length() - 6, 0)
    return size // step * step


class StepBudget:
    """What ``fit`` was asked for, as bytes. All of them include resident memory.

    Attributes:
        absolute_bytes: None as long as a percentage waits for the first step's graph.
        limit_bytes: What the present step may take: the same, or what was free where that is None.
        most_bytes: Never more than that: what an automatic budget was at first, and where memory ran out.
        first_bytes: What a step may take while a percentage waits; None: what is free.
        resident_bytes: Parameters, buffers, gradients and optimizer state when last looked at. On an accelerator all
            that is allocated, as in a plan's peak: other models, and whatever the process holds there.
        optimizers: What trains the model.
        batch_bytes: Of the last step without a plan: what is beside these when it starts.
        is_of_reserved: The budget is of what the allocator reserves.
        counts_all: All that is allocated on the device is known, and among what is resident.
        judged_bytes: What the present step's peak is compared with.
        taken_off_bytes: So much lower than what was asked for do steps aim, since they took more.
        segments_bytes: Of the budget, what the last step without a plan left for segments that are not full, or since
            the device has no more.
    """

    def __init__(self, model: nn.Module, budget: int | str, optimizer: object = None, kind: str = "allocated") -> None:
        self._asked = budget
        self.is_of_reserved = kind == "reserved"
        self.optimizers = TrainingOptimizers(model, optimizer)
        self._workspaces = KeptWorkspaces()
        self._of_model, _ = self._bytes_of(model)
        self.batch_bytes = self.segments_bytes = 0
        self._tensors = ModelTensors()
        self._quick_key, self._quick_state_bytes = (-1, 0), 0  # see ``quick_resident_bytes``
        self._quick_seen: Sequence[tuple[int, ...]] = ()
        self._quick_model_bytes: int | None = None
        self.read_memory(model)
        parsed = parse_budget(budget)
        self.absolute_bytes: int | None = None
        self.is_automatic = parsed == "auto"
        if self.is_automatic:
            # Now and not later: after a step, pieces are mostly what the next one takes again.
            free_bytes = self.free_bytes() - bytes_in_pieces(self.device)
            self.absolute_bytes = self.resident_bytes + in_steps(max(0, free_bytes))
        elif isinstance(parsed, int):
            self.absolute_bytes = parsed
        self.most_bytes = self.absolute_bytes
        self.first_bytes: int | None = None
        self._state_in_share: int | None = None  # of an optimizer, as a percentage was taken; None: it is none
        self.limit_bytes = self.absolute_bytes or 0
        self.taken_off_bytes = 0
        self.judged_bytes = self.limit_bytes

    def note_limit(self) -> None:
        """A step begins: its peak is compared with what it may take now, whatever the budget is when it ends."""
        self.judged_bytes = self.limit_bytes + self.taken_off_bytes

    @property
    def told_bytes(self) -> int | None:
        """The budget, for whoever asked for it; None as long as a percentage waits."""
        return None if self.absolute_bytes is None else self.absolute_bytes + self.taken_off_bytes

    def state_bytes(self) -> int:
        """What the model's optimizers keep now on its device; 0 before their first step."""
        return existing_state_bytes(self.optimizers.all(), self.device)

    def lasting_state_bytes(self) -> int:
        """``state_bytes``; where that grows for many steps, what it will come to."""
        return lasting_state_bytes(self.optimizers.all(), self.device)

    def check(self) -> None:
        """Raises: BudgetInfeasibleError: what the model alone is before the step is more than the budget."""
        budget_bytes, least_bytes = self.absolute_bytes, self._of_model
        if budget_bytes is not None and budget_bytes < least_bytes:
            raise BudgetInfeasibleError(
                f"no plan fits budget={format_bytes(budget_bytes)}: the model's parameters, buffers, gradients and "
                f"optimizer state alone take {format_bytes(least_bytes)}.\n"
                "Raise the budget above that: it includes them.",
                budget_bytes=budget_bytes,
                least_bytes=least_bytes,
            )

    def free_bytes(self) -> int:
        """What a step may take of the memory that is free now. Where the device does not tell: no limit.

        Raises:
            DeviceError: it does not tell, and the budget was to follow it.
        """
        available = available_bytes(self.device)
        if available is None:
            if self.is_automatic:
                raise DeviceError(
                    f'{self.device} does not say how much memory is free, so budget="auto" has no meaning there.\n'
                    "Pass the budget in bytes, or as a percentage."
                )
            return sys.maxsize >> 1
        margin = AUTO_MARGIN * available
        if is_accelerator(self.device):
            margin = max(margin, bytes_for_segments(available))
        return int(available - margin)

    def read_memory(self, model: nn.Module, batch: object = ()) -> None:
        """Note the resident memory of a step that starts now, on ``batch``."""
        of_model, self.batch_bytes = self._bytes_of(model, batch)
        self._workspaces.take(self.device)
        self.counts_all = counts_all(self.device)
        allocated = (device_bytes(self.device) if self.counts_all else None) or 0
        self.resident_bytes = max(of_model, allocated - self.batch_bytes)

    def quick_resident_bytes(self, model: nn.Module) -> tuple[int, int]:
        """What ``read_memory`` would find of a model on a CPU, and its parameters' bytes; in a microsecond for each.

        Where all tensors and gradients are the same and of the same size as before, so is what they take. The
        optimizer's state is looked at again where parameters take other bytes, or more of them have some.
        """
        parameters, buffers = self._tensors.of(model)
        parameter_bytes = sum(p.nbytes for p in parameters)
        tensors: list[torch.Tensor] = [*parameters, *buffers]
        if any(type(tensor) not in _PLAIN for tensor in tensors):  # others may tell no address
            return self._bytes_of(model)[0], parameter_bytes
        seen = []
        for tensor in tensors:
            grad = tensor.grad if tensor.is_leaf else None
            grad_bytes = 0 if grad is None else grad.nbytes
            seen.append((id(tensor), tensor.data_ptr(), tensor.nbytes, id(grad), grad_bytes))
        if seen != self._quick_seen:
            self._quick_seen, self._quick_model_bytes = seen, self._sum_of(tensors)
        if self._quick_model_bytes is None:
            return self._bytes_of(model)[0], parameter_bytes
        key = parameter_bytes, len(getattr(self.optimizers.all(), "state", None) or ())
        if key != self._quick_key:
            self._quick_key, self._quick_state_bytes = key, self.state_bytes()
        return self._quick_model_bytes + self._quick_state_bytes + unseen_bucket_bytes(model), parameter_bytes

    def _sum_of(self, tensors: list[torch.Tensor]) -> int | None:
        """Bytes of their storages and those of their gradients; None where one is no plain tensor on the device."""
        sizes: dict[int, int] = {}
        for tensor in tensors:
            for part in (tensor, tensor.grad if tensor.is_leaf else None):
                if part is None:
                    continue
                if type(part) not in _PLAIN or part.device != self.device or storage_of(part) is None:
                    return None
                storage = part.untyped_storage()
                sizes[storage._cdata] = in_blocks(storage.nbytes(), self.device.type)
        return sum(sizes.values())

    def batch_bytes_beside(self, batch: object) -> int:
        """What ``batch`` takes on the model's device; of views of parameters too.

        Of rows of a data set that lies there as a whole: the rows, as the plan was made for a batch.
        """
        wholes: dict[int, int] = {}
        parts: dict[int, int] = {}
        for tensor in plain_tensors(*tensors_in(batch)):
            if tensor.device == self.device and (storage := storage_of(tensor)) is not None:
                wholes[storage._cdata] = allocated_bytes(storage)
                parts[storage._cdata] = parts.get(storage._cdata, 0) + tensor.nbytes
        return sum(min(whole, parts[key]) for key, whole in wholes.items())

    def for_step(self, model: nn.Module, batch: object, made_bytes: int = 0) -> int:
        """Bytes for what a step makes that starts now, on ``batch``, or that has made and holds ``made_bytes``."""
        self.read_memory(model, batch)
        if self.counts_all:  # what was made is among what is resident
            self.resident_bytes -= made_bytes
        there = self.resident_bytes + self.batch_bytes
        if self.absolute_bytes is None:  # a percentage: the first step may take what is free
            limits = there + self.free_bytes(), self.most_bytes, self.first_bytes
            self.limit_bytes = min(limit for limit in limits if limit is not None)
        self.note_limit()
        room = max(0, self.limit_bytes - there)
        self.segments_bytes = 0
        if self.is_of_reserved:
            self.segments_bytes = bytes_for_segments(room)
        elif is_accelerator(self.device) and (available := available_bytes(self.device)) is not None:
            # The device may have less than the budget, and what it has is in segments.
            has = max(0, available + made_bytes - bytes_for_segments(available))
            self.segments_bytes = max(0, room - has)
        return room - self.segments_bytes

    @property
    def told(self) -> str:
        """What the limit of the present step is, in words."""
        if self.absolute_bytes is not None:
            return "the budget"
        return "what is free" if self.first_bytes is None else "a step with the model's own checkpointing"

    def fixed_for(self, graph: StepGraph, costs: Costs) -> int:
        """The budget in bytes; a percentage is of this graph's plain step, once for all."""
        if self.absolute_bytes is None:
            self.move_to(min(absolute_bytes(graph, costs, self._asked), self.most_bytes or sys.maxsize))
            self._state_in_share = graph.resident.get("optimizer", 0)
        assert self.absolute_bytes is not None
        return self.absolute_bytes

    def follow_state(self) -> int:
        """An optimizer's state has come that nobody foresaw: the bytes by which the budget grows.

        A percentage is of activations, on top of what is resident; an amount of bytes includes the state, and stays.
        """
        if self._state_in_share is None or self.absolute_bytes is None:
            return 0
        more_bytes, before = max(0, self.lasting_state_bytes() - self._state_in_share), self.absolute_bytes
        self._state_in_share += more_bytes
        self.move_to(min(before + more_bytes, self.most_bytes or sys.maxsize))
        return self.absolute_bytes - before

    def move_to(self, budget_bytes: int) -> None:
        """Another budget from now on."""
        self.absolute_bytes = self.limit_bytes = budget_bytes
        self.taken_off_bytes = 0

    def aim_lower(self, off_bytes: int) -> None:
        """Steps took so much more than the budget, which stays: what follows aims lower by that."""
        self.limit_bytes -= off_bytes
        self.taken_off_bytes += off_bytes
        if self.absolute_bytes is not None:
            self.absolute_bytes -= off_bytes

    def cap(self, budget_bytes: int) -> None:
        """As ``move_to``; it never grows above that again. A percentage that is not known yet will not either."""
        self.most_bytes = self.limit_bytes = budget_bytes
        self.taken_off_bytes = 0
        if self.absolute_bytes is not None:
            self.absolute_bytes = budget_bytes

    def lower(self, used_bytes: int, missing_bytes: int | None, attempt: int = 0) -> int:
        """The budget for a step that ran out of memory.

        By what was missing where that is known, else by a tenth of what the step may make.

        Args:
            used_bytes: What the step took when memory ran out, or would have taken: the budget may be far above.
            attempt: How often this very step was lowered before; what is taken off doubles with each.
        """
        room = max(0, self.limit_bytes - self.resident_bytes)
        used = min(room, max(used_bytes - self.resident_bytes, int(_MOST_AT_ONCE * room)))
        if missing_bytes is None:
            off = int(2**attempt * LOWERED_BY * used)
        else:
            off = max(missing_bytes, int(2**attempt * LEAST_LOWERED_BY * used))
        return self.resident_bytes + used - off

    def a_tenth_below(self, limit_bytes: int) -> int:
        """Of what a step may make, a tenth less."""
        return limit_bytes - int(LOWERED_BY * max(0, limit_bytes - self.resident_bytes))

    def _bytes_of(self, model: nn.Module, batch: object = ()) -> tuple[int, int]:
        """What the model takes, with gradients and state, and what ``batch`` takes beside it."""
        self.device = device_of(model)  # it may be moved after ``fit``
        parameters = list(model.parameters())
        tensors = [
            *parameters,
            *shards_of(parameters),
            *model.buffers(),
            *(grad for p in parameters if (grad := gradient_of(p)) is not None),
            *state_tensors(self.optimizers.all()),
        ]
        of_model, beside = self._storages(tensors), self._storages(tensors_in(batch))
        beside_bytes = sum(allocated_bytes(s) for key, s in beside.items() if key not in of_model)
        return sum(map(allocated_bytes, of_model.values())) + unseen_bucket_bytes(model), beside_bytes

    def _storages(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
        found = {s._cdata: s for t in plain_tensors(*tensors) if (s := storage_of(t)) is not None}
        return {key: s for key, s in found.items() if torch.device(s.device) == self.device}
