"""A plan as the tape walks it: a tree of module calls, each with its ops in order and the outputs to drop or move."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from lowtide.plan import RECOMPUTE, TIER_OF, Plan
from lowtide.tracing.operators import draws_random_numbers, omittable_arguments


class Move(NamedTuple):
    """A planned move of one output of an op.

    Attributes:
        storage: Its id in the traced graph; orders fetches that are due at the same time.
        fetch_at: See ``Decision``.
    """

    storage: int
    output: int
    bytes: int
    tier: str
    fetch_at: int | None


class PlannedOp:
    """One forward op of the plan.

    Attributes:
        func: The operator; None if it is not registered yet.
        kernel: What ``func`` calls, without the Python around it.
        dynamic: Its output sizes depend on data, so they are not compared with the plan's.
        random: It may draw random numbers.
        may_skip_arguments: A replay may leave out some of its arguments.
        drops: (output, bytes) of the results to drop; empty for most ops.
        moves: Outputs to move, of this op or of the op whose output it completes in place.
        moves_completed: ``moves`` are outputs of the op that this in-place op completes.
        completes_inplace: The op whose dropped output this in-place op completes.
        num_dropped_inputs: How many dropped storages it reads.
        transient_replays: How many transient replays may precede the final one.
        audited: The replay has been compared bitwise with the original once.
    """

    __slots__ = (
        "audited",
        "completes_inplace",
        "drops",
        "dynamic",
        "func",
        "kernel",
        "may_skip_arguments",
        "moves",
        "moves_completed",
        "name",
        "num_dropped_inputs",
        "random",
        "transient_replays",
        "where",
    )

    def __init__(self, name: str, where: str, dynamic: bool, num_dropped_inputs: int) -> None:
        self.name, self.where, self.dynamic = name, where, dynamic
        self.num_dropped_inputs = num_dropped_inputs
        self._set_operator(resolve(name))
        self.drops: tuple[tuple[int, int], ...] = ()
        self.moves: tuple[Move, ...] = ()
        self.moves_completed = False
        self.completes_inplace: PlannedOp | None = None
        self.transient_replays = 0
        self.audited = False

    def bind(self, func: Any) -> bool:
        """Take ``func`` as the operator if it has the planned name and was not registered when the plan was loaded.

        Returns:
            Whether ``func`` is this op from now on.
        """
        if self.func is not None or str(func) != self.name:
            return False
        self._set_operator(func)
        return True

    def _set_operator(self, func: Any) -> None:
        self.func = func
        self.kernel = getattr(func, "_op", func)
        self.random = func is not None and draws_random_numbers(func)
        self.may_skip_arguments = func is not None and bool(omittable_arguments(func))


class PlannedCall:
    """One module call of the plan.

    Attributes:
        ops: The ops that it runs itself, in order.
        children: Calls inside it, in order, by module path.
        has_actions: One of ``ops`` has something to drop or to move; where none has, ops are not matched.
    """

    __slots__ = ("children", "has_actions", "ops", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.ops: list[PlannedOp] = []
        self.children: dict[str, list[PlannedCall]] = {}
        self.has_actions = False


class PlanProgram:
    """A plan's decisions, and what audits have taught about them."""

    def __init__(self, plan: Plan) -> None:
        self.moves_anything = bool(plan.tiers)
        self.max_inflight_bytes = plan.max_inflight_bytes
        self.calls = [PlannedCall(f.path) for f in plan.frames]
        for number, frame in enumerate(plan.frames):
            if number:
                self.calls[frame.parent].children.setdefault(frame.path, []).append(self.calls[number])
        self.ops: list[PlannedOp] = []
        for recorded in plan.ops:
            path = plan.frames[recorded.frame].path
            op = PlannedOp(recorded.name, path, recorded.dynamic, recorded.num_dropped_inputs)
            self.calls[recorded.frame].ops.append(op)
            self.ops.append(op)
        for d in plan.decisions:
            if d.action == RECOMPUTE:
                op = self.ops[d.op]
                op.drops += ((d.output, d.bytes),)
                op.transient_replays = max(op.transient_replays, d.replays - 1)
                self.calls[plan.ops[d.op].frame].has_actions = True
        # A storage that an in-place op completes is moved when that op has run.
        completed_by = {
            op.completes_inplace: number for number, op in enumerate(plan.ops) if op.completes_inplace is not None
        }
        for d in plan.decisions:
            if d.action in TIER_OF:
                number = completed_by.get(d.op, d.op)
                move = Move(d.storage, d.output, d.bytes, TIER_OF[d.action], d.fetch_at)
                self.ops[number].moves += (move,)
                self.ops[number].moves_completed = number != d.op
                self.calls[plan.ops[number].frame].has_actions = True
        for op, recorded in zip(self.ops, plan.ops, strict=True):
            if recorded.completes_inplace is not None and self.ops[recorded.completes_inplace].drops:
                op.completes_inplace = self.ops[recorded.completes_inplace]
                self.calls[recorded.frame].has_actions = True

    @property
    def root(self) -> PlannedCall:
        return self.calls[0]

    @property
    def keeps_everything(self) -> bool:
        return not any(op.drops or op.moves for op in self.ops)

    def unaudited(self) -> list[PlannedOp]:
        return [op for op in self.ops if op.drops and not op.audited]


_programs: dict[int, PlanProgram] = {}  # by id of the plan, for as long as the plan lives


def program_of(plan: Plan) -> PlanProgram:
    """The program of ``plan``, always the same one: what audits found belongs to the plan and outlives ``apply``."""
    program = _programs.get(id(plan))
    if program is None:
        program = _programs[id(plan)] = PlanProgram(plan)
        weakref.finalize(plan, _programs.pop, id(plan), None)
    return program


def resolve(name: str) -> Any:
    """``"aten.mm.default"`` as the operator object; None if this build of PyTorch has none of that name."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        return None
