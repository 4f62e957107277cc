"""What comes of watched steps that are over: what is told of them, and their graphs, which the planner is to get."""

import weakref
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from lowtide.device.streams import synchronize
from lowtide.graph.memo import with_resident
from lowtide.graph.step_graph import StepGraph
from lowtide.recording.step_recording import StepRecording
from lowtide.recording.watched_times import WatchedTimes, costs_of, why_of_host
from lowtide.shapes.call_shapes import CallShape
from lowtide.step.kinds_of_calls import ANEW
from lowtide.step.sharding.zero3 import order_is_known
from lowtide.tape.online.online_calls import KnownCalls
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.training.budget import StepBudget
from lowtide.training.notices import Notices
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.running_step import RunningStep
from lowtide.training.status import Counters
from lowtide.training.step_memory import StepMemory
from lowtide.units import format_bytes

_MOST_FOUND_UNSETTLED = 2  # then what is not optimized is not called, perhaps
_MOST_FOUND_GATHERED = 3  # then an evaluation comes before every step, perhaps
_MOST_FOUND_MIXED = 2  # then the two threads make as many nodes, perhaps


class _Recorded(NamedTuple):
    """A watched step that is over; see ``PlansByShape.request``."""

    shapes: tuple[CallShape, ...]
    graph: StepGraph
    times: WatchedTimes
    made_nodes: Mapping[int, int]
    kind: int | None
    flags: tuple
    proven_ops: frozenset[int]


class RecordedSteps:
    """Of one model; ``request_plans`` hands them on."""

    def __init__(
        self,
        model: nn.Module,
        budget: StepBudget,
        plans_by_shape: PlansByShape,
        memory: StepMemory,
        counters: Counters,
        reasons: Notices,
        known_calls: KnownCalls,
    ) -> None:
        self._model, self._budget, self._plans_by_shape = weakref.ref(model), budget, plans_by_shape
        self._memory, self._counters, self._reasons, self._known_calls = memory, counters, reasons, known_calls
        self._unread: list[_Recorded] = []  # the device has not passed all of their ops yet
        self._found_unsettled = 0  # steps that no plan came of, since scripted code had not been optimized
        self._found_gathered = 0  # likewise, since ZeRO-3 had gathered parameters before
        self._found_mixed = 0  # likewise, since nodes of forward and of backward were run in an order of their own
        self._told_crossing = False

    def has(self, shape: CallShape) -> bool:
        """Whether a step that starts with a call of ``shape`` waits here."""
        return any(recorded.shapes[0] == shape for recorded in self._unread)

    def clear(self) -> None:
        self._unread.clear()

    def tell(self, watch: OnlineTape) -> None:
        """Tell what ``watch`` has found in its step."""
        say = self._reasons.say
        if watch.crossing_bytes and not self._told_crossing:
            self._told_crossing = True
            say(
                f"the model is sharded: {format_bytes(watch.crossing_bytes)} that its modules hand to one another are "
                "saved in each step, since each module's parameters are gathered for that module alone"
            )
        self._reasons.say_other_hooks(watch.calls.other_hooks)
        for op in watch.releaser.differed:
            say(f"{op} gives other bits when it runs again: saved")
        for op in self._known_calls.proven_anew:
            say(f"{op} {ANEW}")
        if watch.problem:
            say(f"a step was saved whole: {watch.problem}")

    def add(self, step: RunningStep, watch: OnlineTape, recording: StepRecording) -> None:
        """``step`` is over, all of it recorded: a plan for later ones like it is wanted."""
        model, shape = self._model(), step.shapes[0]
        if model is None or watch.problem or step.runs_own_checkpointing:
            return
        if recording.problem:
            for op, why in self._known_calls.kept.items():  # else the graph tells
                self._reasons.say(f"{op} {why}: saved")
            self._plans_by_shape.refuse(shape, recording.problem)
            return
        if why := self._why_unlike_later_ones(step, recording, model):
            self._counters.why_not_planned = why
            return
        watch.learn_inputs()
        graph, costs = recording.graph_and_costs(model, self._budget.optimizers.all())
        if checkpointed := watch.calls.checkpointed or recording.checkpointed:
            self._reasons.say_checkpointed(checkpointed, recording.share_run_again(graph, costs))
        self._reasons.say_of(graph)
        ran_plain = self._budget.absolute_bytes is None
        budget_bytes = self._budget.fixed_for(graph, costs)
        if ran_plain and self._memory.highest_peak_bytes > budget_bytes:
            how = "plain, since a percentage is of what it takes"
            if self._budget.first_bytes is not None:
                how = "with the model's own checkpointing, since a percentage is of a step without it"
            self._reasons.note(
                f"the first step ran {how}: the observed peak is that step's. A budget in bytes holds from the first "
                "step on"
            )
        if why := recording.times.why_of_launches(graph):
            self._reasons.note(why)
        flags, proven = watch.run_state.flags, recording.ops_of(watch.releaser.proven)
        self._unread.append(
            _Recorded(tuple(step.shapes), graph, recording.times, step.made_nodes, step.kind, flags, proven)
        )
        if not self._budget.optimizers.are_unknown:  # else the next step asks: its state is there then
            self.request_plans()

    def request_plans(self, *, waits: bool = False) -> None:
        """Hand recorded steps to the planner once the times of their ops are known.

        Args:
            waits: Wait for the device, if they are not.
        """
        if waits and self._unread:
            synchronize(self._budget.device)
        for recorded in list(self._unread):
            if recorded.times.are_known():
                self._unread.remove(recorded)
                graph, costs = self._with_state(recorded.graph), costs_of(recorded.graph, recorded.times)
                if why := why_of_host(graph, costs, recorded.times):
                    self._reasons.say_first("host", why)
                self._budget.follow_state()
                self._plans_by_shape.request(
                    recorded.shapes, graph, costs, self._budget.fixed_for(graph, costs), recorded.made_nodes,
                    recorded.kind, recorded.flags, recorded.proven_ops,
                )  # fmt: skip

    def _with_state(self, graph: StepGraph) -> StepGraph:
        """With what an optimizer that nobody had passed keeps, if it has stepped since ``graph`` was recorded."""
        if graph.resident["optimizer"] or not (state_bytes := self._budget.lasting_state_bytes()):
            return graph
        return with_resident(graph, "optimizer", state_bytes)

    def _why_unlike_later_ones(self, step: RunningStep, recording: StepRecording, model: nn.Module) -> str:
        """Why later steps take other memory than was recorded; "" if they do not.

        ZeRO-3 gathers other parameters then, or a profiler hid what kernels take. And autograd runs the node first that
        has the highest number, and each thread counts for itself. On a device backward has a thread of its own. So in
        the first step, where both begin at 0, second derivatives come in another order than later, when the numbers of
        the thread that runs forward are all higher.
        """
        if recording.recorder.profiled:
            why = "a profiler was active, so what kernels take beside what they make was not measured"
            self._reasons.say(f"no plan comes of a step in which {why}: a step without a profiler is planned")
            return f"{why}: the next step is watched"
        if not order_is_known(model):
            return "DeepSpeed has not seen the order of the modules yet: the next step is watched"
        if recording.found_gathered and self._found_gathered < _MOST_FOUND_GATHERED:
            self._found_gathered += 1
            return "an evaluation before the last step had parameters gathered: the next step is watched"
        if recording.recorder.functions.found_unsettled and self._found_unsettled < _MOST_FOUND_UNSETTLED:
            self._found_unsettled += 1
            return "TorchScript optimizes scripted code after its first call: the next step is watched"
        first_node = min((nodes.start for nodes in step.nodes.values()), default=0)
        if recording.nodes_of_backward > first_node and self._found_mixed < _MOST_FOUND_MIXED:
            self._found_mixed += 1
            return "autograd runs the nodes of this step in another order than those of later ones: the next is watched"
        return ""
