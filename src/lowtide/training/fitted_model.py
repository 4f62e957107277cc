"""A fitted model: its real steps are watched, planned beside training or beforehand, and checked as they run."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Self, TypeVar

from torch import nn

from lowtide.device import allocation_counter, planned_ops, values_off
from lowtide.errors import LowtideError, RehearsalMemoryError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import COMPILED_CODE, StepGraph
from lowtide.options import FitOptions
from lowtide.plan import SAVE, Plan
from lowtide.planning.planner_process import PlannerProcess
from lowtide.pytorch_internals import STEPS, why_unchecked
from lowtide.rank_consensus import group_of
from lowtide.reports.notebook import plan_html
from lowtide.reports.summary import TrainingCounts
from lowtide.reports.terminal import fit_report
from lowtide.shapes.call_shapes import shape_of_call
from lowtide.step import backward_entry, module_calls
from lowtide.step.batches import Call, batch_tensors, call_of
from lowtide.step.whole_modules import called_whole, is_scripted
from lowtide.tracing.model_facts import ModelFacts
from lowtide.tracing.tracer import Step
from lowtide.training.after_step import status_of
from lowtide.training.budget import StepBudget
from lowtide.training.fitted_call import FittedCall
from lowtide.training.lifecycle import Lifecycle
from lowtide.training.notices import Notices
from lowtide.training.planned_step import PlannedStep
from lowtide.training.recovery import Recovery
from lowtide.training.rehearsal import Rehearsal
from lowtide.training.shared_tiers import SharedTiers
from lowtide.training.status import Status
from lowtide.training.step_region import step_region
from lowtide.units import format_bytes
from lowtide.verifier import Verification, suspended, verify_in

Result = TypeVar("Result")
Prepare = Callable[..., Callable[[], None]]  # ``long_sequences.prepare``
_HELD_BATCH = 0.01  # of the plain peak: a batch up to this size is kept for ``verify``


class Fit:
    """A model whose steps keep a budget. The training loop stays as it is; ``remove`` gives the model back as it was.

    Attributes:
        plan, graph, costs: The plan that was used last, and what it was solved from.
        plans: At most ``max_plans``, the one used last at the end.
        warnings: What you should know, one line each.
    """

    def __init__(
        self, facts: ModelFacts, options: FitOptions, capacities: dict[str, int], batch: Any = None, *, prepare: Prepare
    ) -> None:
        facts.check_supported()
        model = facts.model
        self._model = weakref.ref(model)
        self._options = options
        self._budget = StepBudget(model, options.budget, options.optimizer, options.budget_kind)
        self._planner = PlannerProcess()
        self._batch: Any = None  # of ``_first``
        self._first: PlannedStep | None = None
        self._verification: Verification | None = None
        self._reasons = Notices()
        allocation_counter.prepare()
        planned_ops.prepare()
        if unchecked := why_unchecked(STEPS):
            self._reasons.note(unchecked)  # the log has it already
        if values_off.are_off:
            self._reasons.say(values_off.REASON)
        tiers = SharedTiers(facts.device.type, options.offload, capacities, self._reasons.say)
        self._lifecycle = Lifecycle(facts, options, self._budget, self._planner, tiers, self._reasons)
        self._call = FittedCall(facts, options, self._lifecycle, self._budget, self._reasons)
        self._recovery = Recovery(model, self._budget, self._lifecycle)
        self._rehearsal = Rehearsal(model, options, self._budget, tiers, self._reasons)
        called = ExitStack()
        called.enter_context(called_whole(model, options.opaque))
        if options.opaque:
            shown = ", ".join(options.opaque[:3]) + (", ..." if len(options.opaque) > 3 else "")
            self._reasons.say(f"{shown}: run again as a whole where a plan says so, their forward hooks too")
        for kind, paths in facts.parts_called_whole().items():
            if not facts.is_wrapped:
                shown = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
                inside = "; lowtide.compile plans inside of them" if kind == "compiled code" else ""
                self._reasons.say(
                    f"each call of {kind} is one op, which is kept or runs again as a whole: {shown}{inside}"
                )
        if "" in facts.compiled and batch is None:
            self._reasons.say(
                f"the model is compiled as a whole: real steps of it have no plan{self._way_inside(facts)}"
            )
        unprepare = prepare(model, chunk_loss=options.chunk_loss, tile_mlp=options.tile_mlp, say=self._reasons.say)
        try:
            if batch is None:
                self._lifecycle.replace_checkpointing()
            else:
                self._lifecycle.checkpointing.switch_off()
            tiers.measure_ahead()
            if batch is None or not self._plan_first(facts, batch):
                self._budget.check()
                self._planner.start()
        except BaseException:
            self._lifecycle.close()
            unprepare()
            called.close()
            raise
        self._undo: list[Any] = [
            called.close,
            unprepare,
            backward_entry.observe(self._call),
            module_calls.install(model, self._call),
            self._budget.optimizers.observe(),
        ]

    def _plan_first(self, facts: ModelFacts, batch: Any) -> bool:
        """Plan for ``batch``; False: there is no memory to rehearse it, and the real steps have to be watched."""
        try:
            first = self._first = self._rehearsal.planned(batch, self._options.step)
        except RehearsalMemoryError as error:
            if group_of(facts.model) is not None:  # the others have a plan, or raise
                raise
            self._reasons.say(f"not rehearsed, planned from real steps instead: {str(error).splitlines()[0]}")
            self._lifecycle.checkpointing.restore()  # the first of them decides
            return False
        self._lifecycle.put(first)
        size = sum(t.numel() * t.element_size() for t in batch_tensors(batch))
        self._batch = batch if size < _HELD_BATCH * first.plan.plain_peak_bytes else None
        say = self._reasons.say
        if not facts.model.training:
            off = "dropout and BatchNorm are off in this plan"
            say(f"the model is in eval mode: {off}. Call model.train() first to train")
        if not first.shapes:
            say("the step never calls the model itself: only what runs inside fit.step_region() is taped")
        if "" in facts.compiled:
            plan = first.plan
            kept = (d for d in plan.decisions if plan.ops[d.op].name == COMPILED_CODE and d.action == SAVE)
            stored = sum(d.bytes for d in kept)
            much = f", {format_bytes(stored)} of the step's {format_bytes(plan.predicted_peak_bytes)}" if stored else ""
            say(f"the model is compiled as a whole: all that its call stores is kept{much}{self._way_inside(facts)}")
        return True

    def _way_inside(self, facts: ModelFacts) -> str:
        """What plans inside of a model that is compiled as a whole, as the end of a sentence."""
        if is_scripted(facts.model):
            return ""
        budget = "..." if self._options.budget == "auto" else repr(self._options.budget)
        return f'. lowtide.compile(model, layers=["*"], budget={budget}) on the model as it was plans inside of it'

    # -- what was decided -----------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise LowtideError("the fitted model is gone: nothing holds it any more.")
        return model

    @property
    def plans(self) -> list[Plan]:
        return [planned.plan for planned in self._lifecycle.plans_by_shape.plans]

    @property
    def _latest(self) -> PlannedStep:
        planned = self._lifecycle.latest
        if planned is None:
            raise LowtideError("there is no plan yet.\nRun a training step, then call fit.wait().")
        return planned

    @property
    def plan(self) -> Plan:
        return self._latest.plan

    @property
    def graph(self) -> StepGraph:
        return self._latest.graph

    @property
    def costs(self) -> Costs:
        return self._latest.costs

    @property
    def warnings(self) -> list[str]:
        return list(self._reasons.lines)

    def run(self, step: Callable[[Any, Any], Result], batch: Any) -> Result:
        """Run ``step(model, batch)`` and return what it returns; where memory runs out, undo it and run it again.

        Before each further run the budget is lowered: by what was missing where the allocator says it, else by a tenth.

        What is undone: gradients, bitwise, also those of other tensors that the step trains, None again where it was
        None; the model's buffers; the random generators of PyTorch, Python and NumPy. So ``step`` may run forward and
        backward, several times too, and must not step the optimizer. Your own variables, other models' buffers and
        writes through ``.data`` stay as the failed run left them.

        What it costs: a copy of the model's buffers, and of every gradient that was there before, made right before
        backward adds to it. On a CPU these copies are memory beyond the budget. On an accelerator they are in host
        memory where the plan leaves no room for them.

        Raises:
            torch.OutOfMemoryError: the first one (on a CPU a RuntimeError), with a note of what was tried. There was
                not enough memory even for the least budget, or the step cannot be undone: it wrote a parameter, the
                batch or gradients by other means than backward, or other ranks take part.
        """
        return self._recovery.run(step, batch) if self._undo else step(self.model, batch)

    def wait(self, timeout_s: float | None = None) -> Self:
        """Wait until the plan for what was seen is in force.

        Raises:
            LowtideError: no step has been seen yet. TimeoutError: there is no plan after ``timeout_s``.
        """
        self._lifecycle.settle()
        self._lifecycle.look_at_seals(waits=True)
        if not self._lifecycle.counters.steps and self._first is None:
            raise LowtideError("no step has been seen yet: nothing is being planned.\nRun a training step first.")
        self._lifecycle.recorded.request_plans(waits=True)
        self._lifecycle.plans_by_shape.wait(timeout_s)
        return self

    def add(self, batch: Any) -> Plan:
        """Plan for a batch of another shape now, by rehearsal, not when the first one comes.

        Of a sharded model every rank has to call it. The first step of a shape that was not added is saved whole there.

        Raises:
            RehearsalMemoryError: there is no memory to rehearse it. Others: as ``fit``.
        """
        model = self.model
        with suspended(model):
            planned = self._rehearsal.planned(batch, self._options.step)
        self._lifecycle.put(planned)
        return planned.plan

    # -- what really ran ------------------------------------------------------------------------------------

    def status(self) -> Status:
        """What really ran so far. Nobody waits for a device."""
        return status_of(self._lifecycle, self._budget, self._reasons, is_removed=not self._undo)

    def training_counts(self) -> TrainingCounts:
        """What the tapes of the plans at hand met in training so far."""
        plans = self._lifecycle.plans_by_shape.plans or [self._latest]
        counts = [planned.tape.counts for planned in plans]
        dropped = [op for op in self._latest.tape.program.ops if op.drops]
        return TrainingCounts(
            steps=sum(c.steps for c in counts),
            mismatched_ops=sum(c.mismatched for c in counts),
            unplanned_ops=sum(c.unplanned for c in counts),
            proven_ops=sum(op.proven for op in dropped),
            dropped_ops=len(dropped),
            shapes=len({shape for planned in plans for shape in planned.shapes}),
            trace_s=self._latest.trace_s,
            measure_s=self._latest.measure_s,
        )

    def verify(self, batch: Any = None, *, step: Step | None = None, rounds: int = 3) -> Verification:
        """Compare the planned with the plain step, bit by bit; see ``lowtide.verify``. Takes some steps' time.

        A plan that was not in force in the last real step is not called proven: see ``Verification.in_force``.

        Args:
            batch: By default the one that ``fit`` was given.
            step: By default the one that ``fit`` was given.
        """
        planned = self._first
        if batch is None:
            batch = self._batch
        else:
            planned = self._planned_for(batch)
        if batch is None or planned is None:
            why = "fit was given none" if self._first is None else "the batch was too large to hold on to"
            raise LowtideError(f"{why}. Pass one: fit.verify(batch).")
        tiers = planned.tape.tiers  # not another file, nor as much pinned memory again
        step = step or self._options.step
        found = verify_in(lambda _: tiers, self.model, batch, planned.plan, step=step, rounds=rounds)
        status = self.status()
        self._verification = replace(
            found, in_force=status.in_force if status.steps else None, why_not_in_force=status.why_not
        )
        return self._verification

    def _planned_for(self, batch: Any) -> PlannedStep:
        """The plan made for calls like this batch's, else the latest."""
        call = call_of(batch)
        shape = shape_of_call(self.model, call.args, call.kwargs)
        return next(
            (p for p in self._lifecycle.plans_by_shape.plans if p.shapes[0].without_gradients() == shape),
            self._latest,
        )

    def report(self, *, measure: bool = True) -> str:
        """What really ran, and what the plan used last decided and predicts; at most 100 columns.

        Args:
            measure: Verify first if that has not been done and a batch is at hand (ten steps, nothing of the training
                state moves).
        """
        if measure and self._verification is None and self._batch is not None:
            self.verify(rounds=2)
        status = self.status()
        if self._lifecycle.latest is None:
            return str(status)
        counts = self.training_counts()
        report = fit_report(self.plan, self.graph, self._verification, counts, warnings=self.warnings)
        return f"{status.headline}\n\n{report}"

    def _repr_html_(self) -> str:
        """For notebooks: what really ran, and the plan used last over time."""
        planned, ran = self._lifecycle.latest, self.status()._repr_html_()
        return ran if planned is None else ran + plan_html(planned.plan, planned.graph, planned.costs)

    def step_region(self, batch: Any = None) -> AbstractContextManager[None]:
        """All that runs forward inside is part of the step: needed only where a step never calls the model itself.

        Without a batch in ``fit``, the region counts as a call of the model: the step is watched from here to the end
        of the backward that follows. Where backward runs inside, the next call of a module begins the next step.

        Args:
            batch: What the step is given. Its sizes tell one shape from another, and its bytes count as there before.
                Without it a batch of another size shows only by its ops, and runs online.
        """
        call = Call((), {}) if batch is None else call_of(batch)
        return step_region(self._call, self._lifecycle, self.model, call, self._first)

    def remove(self) -> None:
        """Detach: the model is as it was before ``fit``. Safe to call twice, and between forward and backward."""
        while self._undo:
            self._undo.pop()()
        self._lifecycle.close()
        self._planner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
