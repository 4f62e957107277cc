"""One step of training while it runs: where it is, which calls it made, what it runs under.

The lifecycle makes one for each step and throws it away whole when the step ends, so nothing is left to be reset.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any

import torch

from lowtide.recording.step_recording import StepRecording
from lowtide.shapes.call_shapes import CallShape
from lowtide.step.seam import Seam
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.training.call_marks import calls_reached, reaches_any
from lowtide.training.planned_step import PlannedStep

_RAN_OTHER_OPS_UNSEEN = (
    "a step ran other ops than its plan where that keeps everything, which shows only at the end: it may have taken "
    "more than the budget. Ops of such plans are followed one by one from now on"
)


class Phase(Enum):
    """Where a step is. Backward may come before the last call, as in a pipeline."""

    IDLE = auto()  # no call of the model has come
    FORWARD = auto()  # the model is being called
    WAITING = auto()  # for its backward, or another call
    BACKWARD = auto()  # one has ended, and something may still hold its graph
    OVER = auto()  # a backward has ended on another thread: what is in place goes when the step's own comes back


_MOST_TAKEN_IN = 8  # calls without gradients, of one step


class RunningStep:
    """One step, from the model's first call to the end of its backward.

    Attributes:
        thread: That runs it. ``began_s``: when it began, by the clock.
        planned: The plan that it began under.
        watch: What keeps it in budget without a plan, or since it has left its plan.
        recording: Of its graph, where one is wanted; it listens to the watch.
        seam: Of the watch. ``plan_seam``: of a plan that drops something outside the model's calls.
        shapes: Of the calls so far.
        planned_calls: How many of these ran under the plan.
        left_after: The last planned op before it left its plan, if it has.
        has_gradients: The model had some before: the step adds to them, or lets go of them before its backward.
        sampled_gradients: The memory of some.
        adds: It does the former, as far as its first backward shows; None: none has begun, or it had none.
        trained: Which parameters it trains, if not those of the first step.
        runs_own_checkpointing: It runs as the model is, the model's own checkpointing included.
        has_budget: It has one: no percentage that waits for this step.
        why_no_plan: Where there is none.
        is_shared: Another model's step or backward runs in it: what that takes is counted too.
        spoiled: It failed, or mixes with another: no plan comes of it.
        num_backwards: That have ended. ``retained``: the graph of one of them.
        has_more_calls: Than planned. ``calls_done``: through which a backward has run.
        nodes: Of autograd, made by each call; ``thrown_away``: how many of these are of graphs that are gone.
        graphs: Of what its calls returned: None once one is gone.
        calls_taken_in: Of the model, without gradients: part of the step.
    """

    def __init__(self, thread: threading.Thread | None = None) -> None:
        self.phase = Phase.IDLE
        self.thread = thread
        self.began_s = time.perf_counter()
        self.planned: PlannedStep | None = None
        self.watch: OnlineTape | None = None
        self.recording: StepRecording | None = None
        self.seam: Seam | None = None
        self.plan_seam: Seam | None = None
        self.shapes: list[CallShape] = []
        self.planned_calls = 0
        self.left_after = -1
        self.has_gradients = False
        self.sampled_gradients: list[weakref.ref[torch.UntypedStorage]] = []
        self.adds: bool | None = None
        self.trained = ""
        self.runs_own_checkpointing = self.has_budget = self.is_shared = False
        self.why_no_plan = ""
        self.spoiled = False
        self.num_backwards = 0
        self.retained = self.has_more_calls = False
        self.calls_done: set[int] = set()
        self.nodes: dict[int, range] = {}
        self.thrown_away: dict[int, int] = {}
        self.graphs: list[Callable[[], object]] = []
        self.calls_taken_in = 0

    @property
    def has_begun(self) -> bool:
        return bool(self.shapes) or self.planned is not None

    @property
    def runs_plan(self) -> bool:
        """It has not left it."""
        return self.planned is not None and self.watch is None

    def is_on(self, thread: threading.Thread | None) -> bool:
        """Whether it has called the model, on ``thread``."""
        return bool(self.shapes) and self.thread is thread

    def begin_under(self, planned: PlannedStep) -> None:
        self.planned, self.phase = planned, Phase.WAITING

    @property
    def seams(self) -> list[Seam]:
        return [seam for seam in (self.seam, self.plan_seam) if seam is not None]

    # -- calls of the model ---------------------------------------------------------------------------------

    def takes_in_call_without_gradients(self) -> bool:
        """Whether one is part of the step: its ops are watched like those of the loss.

        It is if it comes while the step waits for its backward, since it takes its memory beside what the step holds
        (a metric, a teacher). Of steps whose backward never comes, few are: an evaluation may go on for long.
        """
        if self.phase is not Phase.WAITING or self.calls_taken_in == _MOST_TAKEN_IN:
            return False
        self.calls_taken_in += 1
        return True

    def shape_in_step(self, shape: CallShape) -> CallShape:
        """``shape`` as that of a call in this step."""
        shape = shape.of_training(self.trained) if self.trained else shape
        return shape.with_gradients() if self.has_gradients else shape

    @property
    def position(self) -> int:
        """In the step, of the last call."""
        return len(self.shapes) - 1

    def begin_call(self) -> None:
        """The model runs: calls of it inside are part of this one."""
        self.phase = Phase.FORWARD

    def end_call(self, position: int, nodes: range, num_thrown_away: int, *, failed: bool) -> None:
        """The call at ``position`` is over, and made these nodes of autograd, some in runs of modules again."""
        if self.phase is Phase.FORWARD:
            self.phase = self._phase_between_calls
        if failed:
            self.spoiled = True
        else:
            self.nodes[position], self.thrown_away[position] = nodes, num_thrown_away

    @property
    def _phase_between_calls(self) -> Phase:
        if not self.has_begun:
            return Phase.IDLE
        return Phase.BACKWARD if self.num_backwards else Phase.WAITING

    @property
    def made_nodes(self) -> dict[int, int]:
        """How many nodes of autograd each call made."""
        return {position: len(nodes) - self.thrown_away[position] for position, nodes in self.nodes.items()}

    @property
    def kind(self) -> int | None:
        """Which ops it ran, as far as modules and autograd's nodes tell; None: nobody saw them.

        Of a step that left its plan: where, and the nodes.
        """
        nodes = sorted(self.made_nodes.items())
        if self.planned is not None and self.watch is None:
            return None if self.why_unlike_plan else self.planned.kind
        if self.planned is not None:
            return hash((self.planned.kind, self.left_after, *nodes))
        return None if self.watch is None else hash((self.watch.calls.modules_run, *nodes))

    @property
    def has_failed(self) -> bool:
        """A call has, and with it what observed the step as a whole."""
        planned = self.planned
        return self.spoiled and (self.watch is not None or (planned is not None and planned.needs_whole_step))

    @property
    def is_forgotten(self) -> bool:
        """Nobody has run backward of the calls so far, and nobody can any more."""
        if self.runs_plan:
            assert self.planned is not None
            all_called = len(self.shapes) == len(self.planned.shapes)
            return all_called and all(mark() is None for mark in self.graphs)
        return self.planned is None and self.watch is not None and self.watch.num_claims == 0

    # -- backward -------------------------------------------------------------------------------------------

    def note_backward(self, *, retains: bool) -> None:
        """One has ended, or failed."""
        self.num_backwards += 1
        self.retained |= retains
        if self.phase is Phase.WAITING:
            self.phase = Phase.BACKWARD

    @property
    def num_awaited(self) -> int:
        """Calls whose backward has not come."""
        return len(self.shapes) - max(self.num_backwards, len(self.calls_done))

    @property
    def is_finished(self) -> bool:
        """Backward has come to its end, and nothing holds what it left."""
        return self.phase is Phase.BACKWARD and not self.spoiled and self.watch is not None and not self.is_claimed

    @property
    def is_claimed(self) -> bool:
        """Autograd still holds something that the watch may have to make again."""
        return self.watch is not None and self.watch.num_claims > 0

    def is_reached(self, roots: Iterable[Any]) -> bool:
        """Whether a backward from ``roots`` runs through any of its calls, as far as numbers of nodes tell."""
        return reaches_any(roots, self.nodes)

    def note_calls_reached(self, roots: Iterable[Any]) -> None:
        """One backward may be of several calls, and of more than its plan; in a pipeline each call has its own."""
        planned = self.planned if self.watch is None else None
        if self.watch is not None and len(self.shapes) > 1:
            self.calls_done |= calls_reached(roots, self.nodes)
        elif planned is not None and 0 < len(planned.shapes) < len(self.shapes):
            self.has_more_calls |= len(calls_reached(roots, self.nodes)) > len(planned.shapes)

    # -- the end --------------------------------------------------------------------------------------------

    @property
    def why_unlike_plan(self) -> str:
        """What shows only at the end: in which way it was not as planned; "" if it was, or has left the plan."""
        planned = self.planned
        if planned is None or self.watch is not None or not planned.shapes:
            return ""
        if planned.makes_other_nodes(self.made_nodes):
            return _RAN_OTHER_OPS_UNSEEN
        if self.has_more_calls:
            return (
                f"a step ran {len(self.shapes)} calls of the model, and its plan is for {len(planned.shapes)}: it "
                "may have taken more than the budget, and is planned again"
            )
        return ""
