"""``fit``: trace, measure, solve and apply in one call; one plan per input shape."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lowtide.errors import LowtideError, StepError, TierError, UnsupportedModelError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.planner import Planned, Planner, Settings
from lowtide.rank_consensus import group_of
from lowtide.reports.summary import Measured
from lowtide.reports.terminal import fit_report
from lowtide.tape import attach
from lowtide.tape.offload.tier_settings import usable
from lowtide.tape.program import Node
from lowtide.tape.tape import Audit, Tape
from lowtide.tracing import module_calls
from lowtide.tracing.batches import Call, batch_tensors
from lowtide.tracing.data_parallel import unwrap_ddp
from lowtide.tracing.subclasses import wrapped_parameters
from lowtide.tracing.tracer import Step, device_of
from lowtide.units import parse_budget
from lowtide.verifier import Verification, suspended, verify_in

logger = logging.getLogger("lowtide")
_REPLANS = 2  # at most, per input shape, when the ops of a step turn out to be others than those traced


class Fit:
    """A model under its plan. The training loop stays as it is; ``remove`` gives the model back as it was.

    Attributes:
        plan: For the batch that ``fit`` was given; ``plans`` holds one per input shape met since.
        graph, costs: What ``plan`` was solved from.
    """

    def __init__(self, model: nn.Module, settings: Settings, step: Step | None) -> None:
        self._planner = Planner(model, settings)
        self._step = step
        self._planned: list[Planned] = []
        self._by_call: dict[str, Planned] = {}
        self._unplanned: set[str] = set()  # input signatures that could not be planned for
        self._batch: Any = None
        self._undo: Any = None
        self._region: _Open | None = None
        self._verification: Verification | None = None

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
        return {call: planned.plan for call, planned in self._by_call.items()}

    def add(self, batch: Any) -> Plan:
        """Plan for a batch of another shape now, not when the first one comes.

        Of a sharded model every rank has to call it. A shape that was not added is saved whole there: planning in
        mid-training would wait for ranks that have met no such batch.
        """
        with suspended(self.model):
            planned = self._planner.make(batch, self._step)
        self._unplanned -= set(planned.graph.calls)
        self._remember(planned)
        return planned.plan

    def verify(self, batch: Any = None, *, rounds: int = 3) -> Verification:
        """Compare the planned with the plain step, bit by bit; see ``lowtide.verify``. Takes some steps' time."""
        batch = self._batch if batch is None else batch
        if batch is None:
            raise LowtideError("the batch was too large to hold on to. Pass one: fit.verify(batch).")
        # Not another file, nor as much pinned memory again.
        places = replace(self._planner.settings.places, opened=self._planned[0].tape.tiers)
        self._verification = verify_in(places, self.model, batch, self.plan, step=self._step, rounds=rounds)
        return self._verification

    def report(self, *, measure: bool = True) -> str:
        """What was decided, predicted and measured, as a table of at most 100 columns.

        Args:
            measure: Verify first if that has not been done (ten steps, nothing of the training state moves).
        """
        if measure and self._verification is None and self._batch is not None:
            self.verify(rounds=2)
        proof = self._verification
        planned = self._planned[0]
        met = [p.tape.counts for p in self._planned]
        measured = Measured(
            peak_bytes=proof.measured_peak_bytes if proof else None,
            plain_peak_bytes=proof.plain_peak_bytes if proof else None,
            overhead=proof.overhead if proof else None,
            bitwise_equal=proof.equal if proof else None,
            steps=sum(c.steps for c in met),
            mismatched_ops=sum(c.mismatched for c in met),
            unplanned_ops=sum(c.unplanned for c in met),
            audited_ops=sum(bool(s.drops) and s.audited for s in planned.program.slots),
            dropped_ops=sum(bool(s.drops) for s in planned.program.slots),
            shapes=len(self._by_call),
            trace_s=planned.trace_s,
            measure_s=planned.measure_s,
        )
        return fit_report(self.plan, planned.graph, measured, warnings=tuple(self.warnings))

    # -- the model's calls --------------------------------------------------------------------------------------

    @contextmanager
    def step_region(self) -> Iterator[None]:
        """Tape all that runs forward inside, the loss too. Ops that the plan does not know are saved and counted."""
        if self._region is not None:
            raise LowtideError("step_region() is open already: one step at a time.")
        region = self._region = _Open()
        planned = self._planned[0]
        if not planned.graph.calls and not planned.program.keeps_everything:  # nothing would open it later
            region.open(planned.tape.region(planned.program.root, whole_step=True))
        try:
            yield
        finally:
            self._region = None
            region.close()

    def _choose(self, args: tuple, kwargs: dict) -> tuple[Tape, Node] | None:
        """The tape for a call of the model, planning first if its input is of a new shape."""
        model = self.model
        signature = module_calls.call_signature(model, args, kwargs)
        planned = self._by_call.get(signature)
        if signature in self._unplanned:
            return None
        if planned is None and wrapped_parameters(model):
            self._unplanned.add(signature)
            self._planner.warn(
                f"no plan for {signature}: everything is saved (rehearsals of a sharded model need all ranks: call "
                "fit.add(batch) on each)"
            )
            return None
        if planned is None or self._drifted(planned):
            try:
                planned = self._plan_again(signature, Call(args, kwargs), planned)
            # The plain call then works, or raises its own error.
            except (StepError, TierError, UnsupportedModelError) as error:
                self._unplanned.add(signature)
                self._planner.warn(f"no plan for {signature}: everything is saved ({str(error).splitlines()[0]})")
                return None
        if planned.program.keeps_everything:
            return None
        tape = planned.tape
        if planned.program.unaudited():
            slack = (planned.plan.budget_bytes or 0) - planned.plan.predicted_peak_bytes
            tape.audit = Audit(planned.program, slack, self._planner.differed)
        if self._region is not None:
            self._region.open(tape.region(planned.program.root, whole_step=True))
            return None  # the region is taped already; GuardedCall then calls inside it
        calls = planned.program.root.children.get("", [])
        if not calls:
            return None
        node = calls[planned.calls % len(calls)]
        planned.calls += 1
        return tape, node

    def _drifted(self, planned: Planned) -> bool:
        met = planned.tape.counts
        new = met.mismatched - planned.seen_mismatches
        planned.seen_mismatches = met.mismatched
        many = new > 0.02 * max(1, sum(bool(s.drops) for s in planned.program.slots))
        # What a sharded model ran elsewhere is not known here, and planning anew needs all ranks.
        return many and planned.replans < _REPLANS and not wrapped_parameters(self.model)

    def _plan_again(self, signature: str, call: Call, before: Planned | None) -> Planned:
        reason = "the step ran other ops than those traced" if before else "an input shape not seen before"
        logger.info("lowtide plans again: %s (%s)", reason, signature)
        region, self._region = self._region, None
        watcher, module_calls.thread_state.observer = module_calls.thread_state.observer, None
        try:
            with suspended(self.model):
                planned = self._planner.make(call, None, fall_back=True)
        finally:
            module_calls.thread_state.observer, self._region = watcher, region
        planned.replans = before.replans + 1 if before else 0
        self._remember(planned, signature)
        return planned

    def _remember(self, planned: Planned, signature: str | None = None) -> None:
        self._planned = [planned, *self._planned[1:]] if not self._planned else [*self._planned, planned]
        for call in {*planned.graph.calls, *([signature] if signature else [])}:
            self._by_call[call] = planned

    # -- attaching ----------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        self._undo = module_calls.install(self.model, attach.GuardedCall(self.model, self._choose))

    def remove(self) -> None:
        """Detach: the model is as it was before ``fit``. Safe to call twice."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Open:
    """A step region that starts with the first call of the model in it, when its plan is known."""

    def __init__(self) -> None:
        self._entered: Any = None

    def open(self, region: Any) -> None:
        if self._entered is None:
            region.__enter__()
            self._entered = region

    def close(self) -> None:
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None


def fit(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str = "auto",
    optimizer: Any = None,
    step: Step | None = None,
    method: str = "exact",
    scratch_dir: str | Path | None = None,
    disk_budget: int | str | None = None,
    checksums: bool = False,
    host_budget: int | str | None = "auto",
    **options: Any,
) -> Fit:
    """Make ``model``'s training step fit ``budget`` at the least extra time, gradients bitwise the same.

    Runs a few rehearsal steps (nothing of the training state moves): one recorded below autograd, one under the
    plan in which every replay is compared bitwise with what it replaces.

    Args:
        model: Where and as it trains: on its device, in train mode, with the autocast around it that training uses.
            In ``DistributedDataParallel`` or before it is wrapped; wrapped, every rank has to call ``fit``, and all
            adopt the plan of the rank with the least memory.
        batch: One batch of the training data.
        budget: Peak allocated device memory for forward and backward: ``"6GiB"``, an int in bytes, ``"40%"`` of the
            plain step's activation memory, or ``"auto"``: what is free now, less a tenth.
        optimizer: Counts the state it has or will have.
        step: ``(model, batch) -> loss`` where the loss is not the model's own output.
        method: ``exact``, or a classic: ``every_n`` (n=2), ``sqrt_n``, ``full``, ``none``.
        scratch_dir: Of a model on CPU: tensors may be moved to a file in this directory; by default the system's
            directory for temporary files where ``disk_budget`` is given, and none where neither is.
        disk_budget: Most bytes in it; by default nine tenths of what is free there.
        checksums: Compare what comes back from disk with what was written.
        host_budget: Of a model on an accelerator: most bytes of pinned host memory to move tensors to; None: nothing
            moves. ``"auto"``: half of what is available, shared among the ranks of this machine, and none where that
            cannot be used (a warning then says why) or where several ranks train the model together: name an amount.

    Returns:
        A ``Fit``: ``plan``, ``report()``, ``verify()``, ``step_region()``, ``remove()``.

    Raises:
        ValueError, TypeError: the budget makes no sense.
        BudgetInfeasibleError: no plan fits; ``least_bytes`` would.
        StepError, UnsupportedModelError: the step cannot be planned; the model is as it was.
        TierError: a tier that was asked for is not on this machine, or cannot be used; likewise.
    """
    model = unwrap_ddp(model)
    settings = Settings(parse_budget(budget), optimizer, method, options)
    fitted = Fit(model, settings, step)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}, not an nn.Module. Pass the module, and step= for the rest."
        )
    settings.places, offload = usable(
        device_of(model).type,
        scratch_dir=scratch_dir,
        disk_budget=disk_budget,
        checksums=checksums,
        host_budget=host_budget if host_budget != "auto" or (method == "exact" and group_of(model) is None) else None,
    )
    settings.tiers_automatic = host_budget == "auto" and scratch_dir is None and disk_budget is None
    if offload:
        settings.options = {**options, "offload": offload}
    fitted._remember(fitted._planner.make(batch, step))
    if sum(t.numel() * t.element_size() for t in batch_tensors(batch)) < 0.01 * fitted.plan.plain_peak_bytes:
        fitted._batch = batch
    if not fitted.graph.calls:
        fitted._planner.warn("the step never calls the model itself: only what runs inside fit.step_region() is taped")
    if compiled := module_calls.compiled_parts(model):
        shown = ", ".join(path or "the model" for path in compiled[:3]) + (", ..." if len(compiled) > 3 else "")
        fitted._planner.warn(f"compiled code runs as it is and is saved whole: {shown}")
    fitted._attach()
    return fitted
