"""A plan as the tape walks it: a tree of module calls, each with its ops in order and the outputs to drop or move.

What running ops twice has proven of them belongs to the program.
"""

import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

from lowtide.graph.function_ops import MODULE
from lowtide.measurement.op_inputs import operator_named
from lowtide.plan import RECOMPUTE, TIER_OF, Decision, Plan
from lowtide.recording import sharding as sharding_recording
from lowtide.step.function_calls import ObservedFunctionCall, ReportingFunctions, run_again
from lowtide.step.kinds_of_calls import MOST_VALUES, KnownKinds
from lowtide.step.operators import (
    MAKE_UNINITIALISED,
    may_draw_random_numbers,
    may_run_others,
    omittable_arguments,
    packet_name,
)


class OneOp(NamedTuple):
    """Stands for the operator of an op that is a call of an autograd Function."""

    function: type
    name: str
    namespace: str = "function"

    def __str__(self) -> str:
        return self.name


class TapedOp:
    """One forward op of the plan."""

    __slots__ = (
        "calls", "completes_inplace", "drops", "dynamic", "func", "kernel", "may_skip_arguments", "moves",
        "moves_completed", "name", "num_dropped_inputs", "number", "once_a_pass", "proven", "random",
        "runs_others", "transient_replays", "uninitialised", "where",
    )  # fmt: skip

    func: Any
    kernel: Any

    def __init__(self, number: int, name: str, where: str, dynamic: bool, num_dropped_inputs: int) -> None:
        self.number, self.name, self.where = number, name, where
        self.dynamic = dynamic  # its output sizes depend on data, so they are not compared with the plan's
        self.num_dropped_inputs = num_dropped_inputs
        self._set_operator(operator_named(name))
        self.drops: tuple[tuple[int, int], ...] = ()  # (output, bytes) of the results to drop; empty for most ops
        self.moves: tuple[Decision, ...] = ()  # those that move an output to another tier
        self.moves_completed = False  # ``moves`` are outputs of the op that this in-place op completes
        self.completes_inplace: TapedOp | None = None  # the op whose dropped output this in-place op completes
        self.transient_replays = 0  # how many may precede the final replay
        self.once_a_pass = False  # each of these makes what one of several backward passes needs
        self.proven = False  # it has run twice and given the same bits
        self.calls = KnownKinds()  # of a Function that is one op: why each kind of call must be saved, or ""

    @property
    def acts(self) -> bool:
        """Whether there is anything to be done where it runs."""
        return bool(self.drops or self.moves or self.completes_inplace)

    def bind(self, func: Any) -> bool:
        """Take ``func`` as the operator if it has the planned name, which was unknown when the plan was loaded."""
        if self.func is not None or str(func) != self.name:
            return False
        self._set_operator(func)
        return True

    def is_call_of(self, call: ObservedFunctionCall) -> bool:
        """Whether it is ``call``, of an autograd Function or of a module that is called whole, as one op."""
        if self.func is None and self.name == call.name:
            self.func, self.kernel = OneOp(call.function, self.name), run_again
        return isinstance(self.func, OneOp) and self.func.function is call.function and self.name == call.name

    def _set_operator(self, func: Any) -> None:
        self.func = func  # None if it is not registered yet
        self.kernel = getattr(func, "_op", func)  # without the Python around it
        self.runs_others = func is not None and may_run_others(func)
        self.random = func is not None and may_draw_random_numbers(func)
        self.uninitialised = (
            func is not None and packet_name(func) in MAKE_UNINITIALISED
        )  # until an in-place op fills it
        self.may_skip_arguments = func is not None and bool(omittable_arguments(func))


_FEW_OPS = 8


class TapedCall:
    """One module call of the plan."""

    __slots__ = (
        "children", "first_op", "has_actions", "has_actions_inside", "last_op", "needs_hooks", "ops", "path",
        "position", "reads_dropped_inside", "sequence",
    )  # fmt: skip

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.ops: list[TapedOp] = []  # those that it runs itself
        self.children: dict[str, list[TapedCall]] = {}  # the calls inside it, by module path
        self.sequence: list[TapedCall] = []  # the same in order
        self.has_actions = False  # an op has something to drop or to move; where none has, ops are not matched
        self.has_actions_inside = False  # so has one of its own, or of a call inside it
        self.reads_dropped_inside = False  # one of these reads what is dropped or moved elsewhere
        self.needs_hooks = False  # an op of its own may save what is dropped; where nothing is dropped inside, any op
        self.position = 0  # which of its caller's module calls it is
        self.first_op, self.last_op = 0, -1  # numbers of its ops and of those inside it

    @property
    def is_small(self) -> bool:
        """It runs a few ops and no module calls."""
        return not self.sequence and len(self.ops) <= _FEW_OPS


class PlanProgram:
    """A plan's decisions, and what is proven of its ops.

    Attributes:
        num_ops_before_model: Ops of the step itself before its first call of the model.
        functions: Of the calls that are one op.
        flags: The global ones under which ops are proven now.
        knows_passes: See ``Plan.passes``.
        called_whole: Paths of the modules whose calls are.
    """

    def __init__(self, plan: Plan) -> None:
        self.moves_anything = bool(plan.tiers)
        self.knows_passes = plan.passes > 1
        self.functions = ReportingFunctions()
        self.flags: tuple | None = None  # that the present proofs hold under; None: there are none yet
        self._proven_under: dict[tuple, frozenset[int]] = {}
        self.max_inflight_bytes = plan.max_inflight_bytes
        self.called_whole = sorted({plan.frames[op.frame].path for op in plan.ops if MODULE in op.name})
        self.calls = [TapedCall(frame.path) for frame in plan.frames]
        self.root = self.calls[0]
        for frame, call in zip(plan.frames[1:], self.calls[1:]):
            if frame.path == sharding_recording.FRAME:  # what gathers and frees is no call that the tape sees
                continue
            caller = self.calls[frame.parent]
            caller.children.setdefault(frame.path, []).append(call)
            call.position = len(caller.sequence)
            caller.sequence.append(call)
        self.ops: list[TapedOp] = []
        for number, recorded in enumerate(plan.ops):
            path = plan.frames[recorded.frame].path
            op = TapedOp(number, recorded.name, path, recorded.dynamic, recorded.num_dropped_inputs)
            self.calls[recorded.frame].ops.append(op)
            self.ops.append(op)
        completed_by = {op.completes_inplace: number for number, op in enumerate(plan.ops)}
        self.num_ops_before_model = next((n for n, op in enumerate(plan.ops) if op.frame), 0)
        for d in plan.decisions:
            op = self.ops[d.op]
            if d.action == RECOMPUTE:
                op.drops += ((d.output, d.bytes),)
                op.transient_replays = max(op.transient_replays, d.replays - 1)
            elif d.action in TIER_OF:  # a storage that an in-place op completes is moved when that op has run
                last = self.ops[completed_by.get(d.op, d.op)]
                last.moves += (d,)
                last.moves_completed = last is not op
        self._acting = [op for op in self.ops if op.drops or op.moves]
        for op in self._acting:
            op.once_a_pass = 0 < op.transient_replays < plan.passes
        for op, recorded in zip(self.ops, plan.ops, strict=True):
            if recorded.completes_inplace is not None and self.ops[recorded.completes_inplace].drops:
                op.completes_inplace = self.ops[recorded.completes_inplace]
        for call in self.calls:
            call.has_actions = any(op.acts for op in call.ops)
        completed = {self.ops[number] for number in completed_by if number is not None}
        for call in reversed(self.calls):  # calls inside one come after it
            inside = call.sequence
            firsts = [op.number for op in call.ops[:1]] + [c.first_op for c in inside if c.last_op >= 0]
            call.first_op = min(firsts, default=0)
            call.last_op = max([op.number for op in call.ops[-1:]] + [c.last_op for c in inside], default=-1)
            call.has_actions_inside = call.has_actions or any(child.has_actions_inside for child in inside)
            # What an op reads that others complete in place is counted with those: it may read anything.
            reads = any(op.num_dropped_inputs or op in completed for op in call.ops)
            call.reads_dropped_inside = reads or any(child.reads_dropped_inside for child in inside)
            whole = call.reads_dropped_inside and not call.has_actions_inside  # nobody looks at the calls inside
            call.needs_hooks = call.has_actions or reads or whole

    @property
    def proven_ops(self) -> frozenset[int]:
        return frozenset(op.number for op in self.ops if op.proven)

    def run_under(self, flags: tuple) -> None:
        """A step begins under these global flags. What is proven under others is not proven: kernels may differ."""
        if flags == self.flags:
            return
        if self.flags is not None:
            if len(self._proven_under) >= MOST_VALUES:
                self._proven_under.clear()
            self._proven_under[self.flags] = self.proven_ops
        self.flags = flags
        proven = self._proven_under.pop(flags, frozenset())
        for op in self.ops:
            op.proven = op.number in proven

    def note_proven(self, flags: tuple | None, ops: Collection[int]) -> None:
        """These have given the same bits twice under ``flags``, in a step that ran without the plan."""
        if flags is None or not ops:
            return
        if self.flags is None:
            self.flags = flags
        if flags != self.flags:
            self._proven_under[flags] = self._proven_under.get(flags, frozenset()) | frozenset(ops)
            return
        for number in ops:
            if number < len(self.ops):  # what ran later than the plan's part of the step was proven, too
                self.ops[number].proven = True

    @property
    def keeps_everything(self) -> bool:
        while self._acting and not (self._acting[-1].drops or self._acting[-1].moves):
            self._acting.pop()  # another run of it gave other bits: it is saved from now on
        return not self._acting


_programs: dict[int, PlanProgram] = {}  # by id of the plan, for as long as the plan lives


def program_of(plan: Plan) -> PlanProgram:
    """The program of ``plan``, always the same one: what was proven belongs to the plan and outlives ``apply``."""
    program = _programs.get(id(plan))
    if program is None:
        program = _programs[id(plan)] = PlanProgram(plan)
        weakref.finalize(plan, _programs.pop, id(plan), None)
    return program
