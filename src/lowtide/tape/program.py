"""A plan as the tape walks it: a tree of module calls, each with its ops in order and the outputs to drop."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lowtide.plan import RECOMPUTE, TIER_OF, Plan
from lowtide.tracing.operators import draws_random_numbers, may_omit_arguments


class Move(NamedTuple):
    """A planned move of one output of an op.

    Attributes:
        storage: Its id in the traced graph; orders fetches that are due at once.
        fetch_at: See ``Decision``.
    """

    storage: int
    output: int
    bytes: int
    tier: str
    fetch_at: int | None


class Slot:
    """One planned forward op.

    Attributes:
        kernel: What ``func`` calls, without the Python around it.
        random, spares: It may draw random numbers; a replay may leave out some of its arguments.
        drops: (output, bytes) of the results to drop; empty for most ops.
        moves: Outputs to move, of this op or of the one that it finishes.
        completes: What is moved is what this in-place op completes, not what it makes.
        completes_inplace: The slot whose dropped output this in-place op completes.
        needs: How many dropped storages it reads.
        passing_runs: How often it may be replayed before the replay that makes its results for good.
        audited: The replay has been compared bitwise with the original once.
    """

    __slots__ = (
        "audited",
        "completes",
        "completes_inplace",
        "drops",
        "dynamic",
        "func",
        "kernel",
        "moves",
        "name",
        "needs",
        "passing_runs",
        "random",
        "spares",
        "where",
    )  # fmt: skip

    def __init__(self, name: str, where: str, dynamic: bool) -> None:
        self.name, self.where, self.dynamic = name, where, dynamic
        self._is(resolve(name))
        self.drops: tuple[tuple[int, int], ...] = ()
        self.moves: tuple[Move, ...] = ()
        self.completes = False
        self.completes_inplace: Slot | None = None
        self.needs = 0
        self.passing_runs = 0
        self.audited = False

    def names(self, func: Any) -> bool:
        """An operator that was not registered yet when the plan was loaded."""
        if self.func is not None or str(func) != self.name:
            return False
        self._is(func)
        return True

    def _is(self, func: Any) -> None:
        self.func = func
        self.kernel = getattr(func, "_op", func)
        self.random = func is not None and draws_random_numbers(func)
        self.spares = func is not None and may_omit_arguments(func)


class Node:
    """One planned module call."""

    __slots__ = ("children", "path", "planned", "slots")

    def __init__(self, path: str) -> None:
        self.path = path
        self.slots: list[Slot] = []
        self.children: dict[str, list[Node]] = {}
        self.planned = False  # drops something itself; where nothing is dropped, ops are not matched


class Program:
    """A plan's decisions, and what audits and first sights have taught about them; outlives one ``apply``."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.nodes = [Node(f.path) for f in plan.frames]
        for number, frame in enumerate(plan.frames):
            if number:
                self.nodes[frame.parent].children.setdefault(frame.path, []).append(self.nodes[number])
        self.slots: list[Slot] = []
        for op in plan.ops:
            slot = Slot(op.name, plan.frames[op.frame].path, op.dynamic)
            slot.needs = op.needs
            self.nodes[op.frame].slots.append(slot)
            self.slots.append(slot)
        for d in plan.decisions:
            if d.action == RECOMPUTE:
                slot = self.slots[d.op]
                slot.drops += ((d.output, d.bytes),)
                slot.passing_runs = max(slot.passing_runs, d.replays - 1)
                self.nodes[plan.ops[d.op].frame].planned = True
        # What an in-place op completes sets out when that has run.
        complete = {
            op.completes_inplace: number for number, op in enumerate(plan.ops) if op.completes_inplace is not None
        }
        for d in plan.decisions:
            if d.action in TIER_OF:
                number = complete.get(d.op, d.op)
                move = Move(d.storage, d.output, d.bytes, TIER_OF[d.action], d.fetch_at)
                self.slots[number].moves += (move,)
                self.slots[number].completes = number != d.op
                self.nodes[plan.ops[number].frame].planned = True
        for slot, op in zip(self.slots, plan.ops, strict=True):
            if op.completes_inplace is not None and self.slots[op.completes_inplace].drops:
                slot.completes_inplace = self.slots[op.completes_inplace]
                self.nodes[op.frame].planned = True

    @property
    def root(self) -> Node:
        return self.nodes[0]

    @property
    def keeps_everything(self) -> bool:
        return not any(slot.drops or slot.moves for slot in self.slots)

    def unaudited(self) -> list[Slot]:
        return [s for s in self.slots if s.drops and not s.audited]


def resolve(name: str) -> Any:
    """``"aten.mm.default"`` as the operator object; None if this build of PyTorch has none of that name."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        return None
