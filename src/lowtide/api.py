"""``fit``: trace, measure, solve and apply in one call; one plan per input shape."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self, Unpack, overload

from torch import nn

from lowtide.argument_checks import budget_hint, check_arguments
from lowtide.errors import BudgetInfeasibleError, LowtideError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.options import DeprecatedOffload, FitOptions, Offload, offload_policy
from lowtide.plan import Plan
from lowtide.planner import PlannedShape, Planner
from lowtide.rank_consensus import group_of
from lowtide.reports.summary import TrainingCounts
from lowtide.reports.terminal import fit_report
from lowtide.runtime.existing_checkpointing import KEEP, REPLACE, ExistingCheckpointing
from lowtide.runtime.watched_fit import WatchedFit
from lowtide.solvers.dispatch import check_method
from lowtide.tape import attach
from lowtide.tape.offload.open_tiers import usable
from lowtide.tape.program import TapedCall
from lowtide.tape.tape import Tape
from lowtide.tracing import module_calls
from lowtide.tracing.batches import Call, batch_of, batch_tensors, call_of
from lowtide.tracing.data_parallel import unwrap_ddp
from lowtide.tracing.subclasses import wrapped_parameters
from lowtide.tracing.tracer import Step, device_of
from lowtide.verifier import Verification, suspended, verify_in

logger = logging.getLogger("lowtide")
_MAX_REPLANS = 2  # per input shape, when the ops of a step turn out to be others than those traced
_DRIFT = 0.02  # of the dropped tensors; so many ops that did not come as planned are worth another plan
_HELD_BATCH = 0.01  # of the plain peak: a batch up to this size is kept for ``verify``


class Fit:
    """A model under its plan. The training loop stays as it is; ``remove`` gives the model back as it was.

    Attributes:
        plan: For the batch that ``fit`` was given; ``plans`` holds one per input shape met since.
        graph, costs: What ``plan`` was solved from.
    """

    def __init__(self, planner: Planner, batch: Any, checkpointing: ExistingCheckpointing) -> None:
        model = planner.model
        self._checkpointing = checkpointing
        self._planner = planner
        self._planned: list[PlannedShape] = []
        self._by_signature: dict[str, PlannedShape] = {}
        self._refused_signatures: set[str] = set()  # inputs that could not be planned for: all is saved
        self._region: ExitStack | None = None  # of step_region()
        self._region_is_taped = False  # from the first call of the model in it on, when its plan is known
        self._verification: Verification | None = None
        first = planner.make(batch, planner.options.step)
        self._add_shape(first)
        size = sum(t.numel() * t.element_size() for t in batch_tensors(batch))
        self._batch = batch if size < _HELD_BATCH * first.plan.plain_peak_bytes else None
        # Where the step hands the whole batch to the model, a later call of the model shows a whole batch too.
        call = call_of(batch)
        passed = module_calls.call_signature(model, call.args, call.kwargs)
        self._batch_type = type(batch) if passed in first.graph.calls else None
        self._warn_of_what_is_not_taped(first.graph)
        self._undo: Any = module_calls.install(model, attach.GuardedCall(model, self._tape_for_call))

    def _warn_of_what_is_not_taped(self, graph: StepGraph) -> None:
        warn, model = self._planner.warn, self.model
        if not model.training:
            off = "dropout and BatchNorm are off in this plan"
            warn(f"the model is in eval mode: {off}. Call model.train() first to train")
        if not graph.calls:
            warn("the step never calls the model itself: only what runs inside fit.step_region() is taped")
        if compiled := module_calls.compiled_parts(model):
            shown = ", ".join(path or "the model" for path in compiled[:3]) + (", ..." if len(compiled) > 3 else "")
            warn(f"compiled code runs as it is and is saved whole: {shown}")

    # -- what was decided ---------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self._planner.model

    @property
    def warnings(self) -> list[str]:
        """What you should know, one line each."""
        return self._planner.warnings

    @property
    def plan(self) -> Plan:
        return self._planned[0].plan

    @property
    def graph(self) -> StepGraph:
        return self._planned[0].graph

    @property
    def costs(self) -> Costs:
        return self._planned[0].costs

    @property
    def plans(self) -> dict[str, Plan]:
        """Input signature of a call of the model -> its plan."""
        return {signature: planned.plan for signature, planned in self._by_signature.items()}

    def add(self, batch: Any) -> Plan:
        """Plan for a batch of another shape now, not when the first one comes.

        Of a sharded model every rank has to call it. A shape that was not added is saved whole there: planning in
        mid-training would wait for ranks that have met no such batch.
        """
        with suspended(self.model):
            planned = self._planner.make(batch, self._planner.options.step)
        self._refused_signatures -= set(planned.graph.calls)
        self._add_shape(planned)
        return planned.plan

    def verify(self, batch: Any = None, *, rounds: int = 3) -> Verification:
        """Compare the planned with the plain step, bit by bit; see ``lowtide.verify``. Takes some steps' time."""
        batch = self._batch if batch is None else batch
        if batch is None:
            raise LowtideError("the batch was too large to hold on to. Pass one: fit.verify(batch).")
        tiers = self._planned[0].tape.tiers  # not another file, nor as much pinned memory again
        step = self._planner.options.step
        self._verification = verify_in(lambda _: tiers, self.model, batch, self.plan, step=step, rounds=rounds)
        return self._verification

    def report(self, *, measure: bool = True) -> str:
        """What was decided, predicted and measured, as a table of at most 100 columns.

        Args:
            measure: Verify first if that has not been done (ten steps, nothing of the training state moves).
        """
        if measure and self._verification is None and self._batch is not None:
            self.verify(rounds=2)
        return fit_report(self.plan, self.graph, self._verification, self.training_counts(), warnings=self.warnings)

    def training_counts(self) -> TrainingCounts:
        """What the tape met in training so far."""
        first = self._planned[0]
        counts = [planned.tape.counts for planned in self._planned]
        dropped = [op for op in first.program.ops if op.drops]
        return TrainingCounts(
            steps=sum(c.steps for c in counts),
            mismatched_ops=sum(c.mismatched for c in counts),
            unplanned_ops=sum(c.unplanned for c in counts),
            proven_ops=sum(op.proven for op in dropped),
            dropped_ops=len(dropped),
            shapes=len(self._by_signature),
            trace_s=first.trace_s,
            measure_s=first.measure_s,
        )

    # -- the model's calls --------------------------------------------------------------------------------------

    @contextmanager
    def step_region(self) -> Iterator[None]:
        """Tape all that runs forward inside, the loss too. Ops that the plan does not know are saved and counted."""
        if self._region is not None:
            raise LowtideError("step_region() is open already: one step at a time.")
        planned = self._planned[0]
        with ExitStack() as self._region:
            self._region_is_taped = False
            if not planned.graph.calls and not planned.program.keeps_everything:  # nothing would tape it later
                self._tape_region(self._region, planned.tape)
            try:
                yield
            finally:
                self._region = None

    def _tape_region(self, region: ExitStack, tape: Tape) -> None:
        if not self._region_is_taped:
            self._region_is_taped = True
            region.enter_context(attach.taped_region(tape, tape.program.root, whole_step=True))

    def _tape_for_call(self, args: tuple, kwargs: dict) -> tuple[Tape, TapedCall] | None:
        """The tape for a call of the model, planning first if its input is of a new shape."""
        model = self.model
        signature = module_calls.call_signature(model, args, kwargs)
        planned = self._by_signature.get(signature)
        if signature in self._refused_signatures:
            return None
        if planned is None and wrapped_parameters(model):
            self._refuse(signature, "rehearsals of a sharded model need all ranks: call fit.add(batch) on each")
            return None
        if planned is None or self._drifted(planned):
            try:
                planned = self._plan_again(signature, Call(args, kwargs), planned)
            # The plain call then works, or raises its own error.
            except (LowtideError, ValueError) as error:
                self._refuse(signature, str(error).splitlines()[0])
                return None
        if planned.program.keeps_everything:
            return None
        tape = planned.tape
        if self._region is not None:
            self._tape_region(self._region, tape)
            return None  # the region is taped already; GuardedCall then calls inside it
        calls = planned.program.root.children.get("", [])
        if not calls:
            return None
        node = calls[planned.calls % len(calls)]
        planned.calls += 1
        return tape, node

    def _refuse(self, signature: str, why: str) -> None:
        self._refused_signatures.add(signature)
        self._planner.warn(f"no plan for {signature}: everything is saved ({why})")

    def _drifted(self, planned: PlannedShape) -> bool:
        """Many ops since the last look did not come as planned, and another plan may help."""
        mismatched = planned.tape.counts.mismatched
        new = mismatched - planned.seen_mismatches
        planned.seen_mismatches = mismatched
        many = new > _DRIFT * max(1, sum(bool(s.drops) for s in planned.program.ops))
        # Other ranks of a sharded model would have to plan again too, and do not know of this.
        return many and planned.replans < _MAX_REPLANS and not wrapped_parameters(self.model)

    def _plan_again(self, signature: str, call: Call, before: PlannedShape | None) -> PlannedShape:
        reason = "the step ran other ops than those traced" if before else "an input shape not seen before"
        logger.info("lowtide plans again: %s (%s)", reason, signature)
        step = self._planner.options.step
        batch = call if step is None or self._batch_type is None else batch_of(call, self._batch_type)
        shows_batch = not isinstance(batch, Call)
        region, self._region = self._region, None
        observer, module_calls.thread_state.observer = module_calls.thread_state.observer, None
        try:
            with suspended(self.model):
                planned = self._planner.make(batch, step if shows_batch else None, allow_least=True)
        finally:
            module_calls.thread_state.observer, self._region = observer, region
        if step is not None and not shows_batch:
            self._planner.warn(
                f"planned for {signature} from the call of the model alone: step= takes more than the call shows, so "
                "the peak may be over the budget by what runs outside the model. Call fit.add(batch) for this shape"
            )
        planned.replans = before.replans + 1 if before else 0
        self._add_shape(planned, signature)
        return planned

    def _add_shape(self, planned: PlannedShape, *signatures: str) -> None:
        self._planned.append(planned)
        self._by_signature.update(dict.fromkeys([*planned.graph.calls, *signatures], planned))

    def remove(self) -> None:
        """Detach: the model is as it was before ``fit``. Safe to call twice."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        self._checkpointing.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@overload
def fit(
    model: nn.Module,
    batch: None = None,
    *,
    budget: int | str = "auto",
    optimizer: Any = None,
    method: str = "exact",
    n: int | None = None,
    ratio: float | None = None,
    gap: float | None = None,
    time_limit_s: float | None = None,
    node_limit: int | None = None,
    checkpointing: str = "replace",
    max_plans: int = 8,
) -> WatchedFit: ...
@overload
def fit(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str = "auto",
    optimizer: Any = None,
    step: Step | None = None,
    method: str = "exact",
    n: int | None = None,
    ratio: float | None = None,
    gap: float | None = None,
    time_limit_s: float | None = None,
    node_limit: int | None = None,
    offload: Offload | None = None,
    checkpointing: str = "replace",
    **deprecated: Unpack[DeprecatedOffload],
) -> Fit: ...
def fit(
    model: nn.Module,
    batch: Any = None,
    *,
    budget: int | str = "auto",
    optimizer: Any = None,
    step: Step | None = None,
    method: str = "exact",
    n: int | None = None,
    ratio: float | None = None,
    gap: float | None = None,
    time_limit_s: float | None = None,
    node_limit: int | None = None,
    offload: Offload | None = None,
    checkpointing: str = "replace",
    max_plans: int = 8,
    **deprecated: Unpack[DeprecatedOffload],
) -> Fit | WatchedFit:
    """Make ``model``'s training step fit ``budget`` at the least extra time, gradients bitwise the same.

    Without a batch nothing runs now. The first real step is watched and kept within the budget as it runs, its plan is
    solved in a process beside training, and later steps run under the plan. Losses outside the model, several calls
    in a step and batches of other shapes are seen as they come. ``status()`` says what is in force.

    With a batch the plan is made now, by a few rehearsal steps (nothing of the training state moves): one recorded
    below autograd, one under the plan in which every replay is compared bitwise with what it replaces.

    Args:
        model: Where and as it trains: on its device, in train mode, with the autocast around it that training uses.
            In ``DistributedDataParallel`` or before it is wrapped; wrapped, every rank has to call ``fit``, and all
            adopt the plan of the rank with the least memory.
        batch: One batch of the training data; None: watch the steps that really run.
        budget: Peak allocated device memory for forward and backward, weights and gradients included: ``"6GiB"``, an
            int in bytes, ``"40%"`` of the plain step's activation memory, or ``"auto"``: what is free now, less a
            tenth.
        optimizer: Counts the state it has or will have. An ``Optimizer``, also as Accelerate or DeepSpeed wrap it,
            or a name such as ``"adamw"``.
        step: ``(model, batch) -> loss`` where the loss is not the model's own output.
        method: ``exact``, or a published method: ``none``, ``full``, ``every_n``, ``sqrt_n``, ``selective``,
            ``revolve``, ``rotor`` or ``knapsack``; see ``solve``.
        n, ratio, gap, time_limit_s, node_limit: Options of the method; see ``solve``.
        offload: Where tensors may be stored outside device memory, and how many bytes of them. By default a model on
            CPU stores none, a model on an accelerator uses pinned host memory; without a batch none is stored yet.
        checkpointing: ``"replace"``: transformers' gradient checkpointing, where it is on, is switched off while the
            model is fitted. ``"keep"``: it stays on, and what it drops is not planned.
        max_plans: Without a batch: plans at hand at most; the one that was used least recently goes.
        **deprecated: ``scratch_dir``, ``disk_budget``, ``host_budget`` and ``checksums``: now fields of ``offload``.

    Returns:
        With a batch a ``Fit``: ``plan``, ``report()``, ``verify()``, ``step_region()``, ``remove()``. Without one a
        ``WatchedFit``: ``status()``, ``wait()``, ``plan``, ``report()``, ``remove()``.

    Raises:
        ValueError, TypeError: an argument makes no sense; raised before anything runs.
        BudgetInfeasibleError: no plan fits; ``least_bytes`` would.
        StepError, UnsupportedModelError: the step cannot be planned; the model is as it was.
        TierError: a tier that was asked for is not on this machine, or cannot be used; the model is as it was.
    """
    policy = offload_policy(fit, offload, deprecated)
    if batch is None and (step is not None or not policy.is_automatic):
        given_name = "step" if step is not None else "offload"
        raise ValueError(f"{given_name}= needs a batch to plan with. Pass one, or leave {given_name}= out.")
    if isinstance(model, nn.Module):
        model = unwrap_ddp(model)
    check_arguments(model, batch, budget, step, optimizer)
    options = dict(n=n, ratio=ratio, gap=gap, time_limit_s=time_limit_s, node_limit=node_limit)
    given = {name: value for name, value in options.items() if value is not None}
    check_method(method, given)
    if policy.host_budget == "auto" and (method != "exact" or group_of(model) is not None):
        policy = replace(policy, host_budget=None)
    if checkpointing not in (REPLACE, KEEP):
        raise ValueError(f"checkpointing={checkpointing!r} is not known. Use {REPLACE!r} or {KEEP!r}.")
    if max_plans < 1:
        raise ValueError(f"max_plans={max_plans}: no plan could be kept. Ask for 1 or more.")
    asked = FitOptions(budget, optimizer, step, method, given, policy, max_plans, checkpointing)
    if batch is None:
        return WatchedFit(model, asked)
    capacities = usable(device_of(model).type, policy)
    check_method(method, {"offload": policy} if capacities else {})
    planner = Planner(model, asked, capacities)
    hint = budget_hint(budget)
    if hint:
        planner.warn(hint)
    existing = ExistingCheckpointing(model, planner.warn, checkpointing)
    existing.switch_off()
    try:
        return Fit(planner, batch, existing)
    except BaseException as error:
        existing.restore()
        if hint and isinstance(error, BudgetInfeasibleError):
            error.args = (f"{error}\n{hint}",)
        raise
