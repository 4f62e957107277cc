"""``fit``: trace, measure, solve and apply in one call; one plan per input shape."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowtide.agreement import agree, group_of, of_all, on_all, on_any
from lowtide.costs.measurer import measure
from lowtide.errors import BudgetInfeasibleError, LowtideError, StepError, TierError, UnsupportedModelError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.meters import available_bytes
from lowtide.plan import Plan
from lowtide.reports.progress import Stages
from lowtide.reports.summary import Measured
from lowtide.reports.terminal import fit_report
from lowtide.solvers.front_door import absolute_bytes, lossy_form, solve
from lowtide.tape import attach
from lowtide.tape.places import Places, usable
from lowtide.tape.program import Node, Program, Slot
from lowtide.tape.tape import Audit, Tape
from lowtide.tape.tiers import Tier
from lowtide.tracing import scopes
from lowtide.tracing.batches import Call, batch_tensors, without_history
from lowtide.tracing.operators import fingerprint
from lowtide.tracing.parallel import unwrapped
from lowtide.tracing.state import rehearsal
from lowtide.tracing.subclasses import shards_in
from lowtide.tracing.tracer import Step, device_of, record, run_step
from lowtide.units import format_bytes, parse_budget
from lowtide.verifier import Verification, suspended, verify_in

logger = logging.getLogger("lowtide")
_KNOWN = frozenset({"aten", "prims"})  # operators whose schemas are checked by the list and at first sight
AUTO_MARGIN = 0.1  # of free memory, left alone by budget="auto": allocator fragmentation, and whoever else allocates
_REHEARSALS = 4  # at most, to audit every dropped tensor when memory holds only some beside their recipes
_REPLANS = 2  # at most, per input shape, when the ops of a step turn out to be others than those traced


@dataclass
class Planned:
    """One input shape: its graph, costs and plan, and the tape that carries it out."""

    graph: StepGraph
    costs: Costs
    plan: Plan
    tape: Tape
    trace_s: float
    measure_s: float
    replans: int = 0
    seen_mismatches: int = 0
    calls: int = 0
    group: dist.ProcessGroup | None = None  # ranks that were planned for together

    @property
    def program(self) -> Program:
        return self.tape.program


@dataclass
class _Settings:
    budget: int | float | str
    optimizer: Any
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    unasked: bool = False  # the tiers are ours to choose, so a plan without them is as good as asked for

    @property
    def tiers(self) -> tuple[str, ...]:
        return (*self.options.get("offload", ()), *filter(None, [self.places.lossy]))


class Fit:
    """A model under its plan. The training loop stays as it is; ``remove`` gives the model back as it was.

    Attributes:
        plan: For the batch that ``fit`` was given; ``plans`` holds one per input shape met since.
        graph, costs: What ``plan`` was solved from.
        warnings: What you should know, one line each.
    """

    def __init__(self, model: nn.Module, settings: _Settings, step: Step | None) -> None:
        self._model = weakref.ref(model)
        self._settings = settings
        self._step = step
        self._planned: list[Planned] = []
        self._by_call: dict[str, Planned] = {}
        self._unplanned: set[str] = set()  # input signatures that could not be planned for
        self._batch: Any = None
        self._undo: Any = None
        self._region: _Open | None = None
        self._verification: Verification | None = None
        self._tiers: dict[str, Tier] = {}  # shared by all plans
        self.warnings: list[str] = []

    # -- what was decided ---------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise LowtideError("the fitted model is gone: nothing holds it any more.")
        return model

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
            planned = self._make(batch, self._step)
        self._unplanned -= set(planned.graph.calls)
        self._remember(planned)
        return planned.plan

    def verify(self, batch: Any = None, *, rounds: int = 3) -> Verification:
        """Compare the planned with the plain step, bit by bit; see ``lowtide.verify``. Takes some steps' time."""
        batch = self._batch if batch is None else batch
        if batch is None:
            raise LowtideError("the batch was too large to hold on to. Pass one: fit.verify(batch).")
        # Not another file, nor as much pinned memory again.
        places = replace(self._settings.places, opened=self._planned[0].tape.tiers)
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
            inexact=planned.program.inexact(),
            gradient_error=proof.gradient_error if proof else None,
            worst_gradient=proof.worst_gradient if proof else "",
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
        signature = scopes.call_signature(model, args, kwargs)
        planned = self._by_call.get(signature)
        if signature in self._unplanned:
            return None
        if planned is None and shards_in(model):
            self._unplanned.add(signature)
            self._warn(
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
                self._warn(f"no plan for {signature}: everything is saved ({str(error).splitlines()[0]})")
                return None
        if planned.program.keeps_everything:
            return None
        tape = planned.tape
        if planned.program.unaudited():
            slack = (planned.plan.budget_bytes or 0) - planned.plan.predicted_peak_bytes
            tape.audit = Audit(planned.program, slack, self._differed)
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
        return many and planned.replans < _REPLANS and not shards_in(self.model)

    def _plan_again(self, signature: str, call: Call, before: Planned | None) -> Planned:
        reason = "the step ran other ops than those traced" if before else "an input shape not seen before"
        logger.info("lowtide plans again: %s (%s)", reason, signature)
        region, self._region = self._region, None
        watcher, scopes.active.watcher = scopes.active.watcher, None
        try:
            with suspended(self.model):
                planned = self._make(call, None, fall_back=True)
        finally:
            scopes.active.watcher, self._region = watcher, region
        planned.replans = before.replans + 1 if before else 0
        self._remember(planned, signature)
        return planned

    # -- planning -----------------------------------------------------------------------------------------------

    def _make(self, batch: Any, step: Step | None, *, fall_back: bool = False) -> Planned:
        model, settings, batch = self.model, self._settings, without_history(batch)
        with Stages("trace", "measure", "solve", "rehearse") as stages:
            start = time.perf_counter()
            # A new shape in mid-training may be one rank's alone: nobody would answer.
            group = None if fall_back else group_of(model)
            graph = on_all(
                group,
                "tracing",
                lambda: record(
                    model, batch, step, settings.optimizer, forward=lambda run: on_all(group, "the forward pass", run)
                ),
            )
            traced = time.perf_counter()
            stages.next()
            costs = on_all(group, "measuring", lambda: self._measure(graph))
            measured = time.perf_counter()
            stages.next()
            graph, plan = self._solve(graph, costs, group, fall_back)
            stages.next()
            for _ in range(3):  # a replay that differs is saved, and the rest planned anew
                try:
                    tiers = on_all(group, "opening tiers", partial(settings.places.open, plan, self._tiers))
                    tape = Tape(attach.program_of(plan), model, tiers)
                    planned = Planned(graph, costs, plan, tape, traced - start, measured - traced, group=group)
                    differed = of_all(group, self._rehearse(planned, batch, step))
                except TierError as error:
                    if group is not None:
                        raise
                    self._do_without(error)
                    graph, plan = self._solve(graph, costs, group, fall_back)
                    continue
                self._tiers.update(tiers)
                if not differed:
                    break
                graph = _with_fixed(graph, differed)
                graph, plan = self._solve(graph, costs, group, fall_back)
        return planned

    def _measure(self, graph: StepGraph) -> Costs:
        settings = self._settings
        try:
            return measure(graph, tiers=settings.tiers, scratch_dir=settings.places.scratch_dir)
        except TierError as error:
            self._do_without(error)
            return measure(graph, tiers=settings.tiers)

    def _do_without(self, error: TierError) -> None:
        """Plan without tiers that failed and that nobody asked for. Raises: TierError: somebody did."""
        settings = self._settings
        if not settings.unasked or "offload" not in settings.options:
            raise error
        self._warn(f"planned without other tiers: {str(error).splitlines()[0]}")
        settings.options = {k: v for k, v in settings.options.items() if k != "offload"}
        self._tiers.clear()

    def _solve(
        self, graph: StepGraph, costs: Costs, group: dist.ProcessGroup | None, fall_back: bool
    ) -> tuple[StepGraph, Plan]:
        settings = self._settings
        budget: int | str
        if settings.budget == "auto":
            budget = _auto_budget(self.model, graph)
        elif isinstance(settings.budget, float):
            budget = f"{settings.budget * 100!r}%"
        else:
            assert isinstance(settings.budget, int)
            budget = settings.budget
        if group is not None:
            budget_bytes = absolute_bytes(graph, costs, budget)
            return agree(
                group, graph, budget_bytes, lambda g, b: solve(g, costs, b, method=settings.method, **settings.options)
            )
        try:
            return graph, solve(graph, costs, budget, method=settings.method, **settings.options)
        except BudgetInfeasibleError as error:
            if not fall_back:
                raise
            self._warn(
                f"no plan fits {format_bytes(error.budget_bytes)} for {graph.provenance.get('batch', 'this input')}: "
                f"running at the least there is, {format_bytes(error.least_bytes)}"
            )
            return graph, solve(graph, costs, error.least_bytes, **settings.options)

    def _rehearse(self, planned: Planned, batch: Any, step: Step | None) -> set[int]:
        """Audit: keep what is dropped beside its recipe, compare bitwise at replay. Returns storages that differed.

        Raises:
            TierError: what was moved came back with other bits, or not at all.
        """
        program = planned.program
        differed: list[Slot] = []
        model = self.model
        ids = {id(slot): n for n, slot in enumerate(program.slots)}
        drops = {id(s): s.drops for s in program.slots}
        stuck = False
        unproven = bool(planned.plan.tiers)
        for _ in range(_REHEARSALS):
            waiting = len(program.unaudited())
            need = planned.plan.predicted_peak_bytes - planned.plan.resident_bytes
            allowance = available_bytes(device_of(model)) - need
            if not on_any(planned.group, allowance > 0 and ((waiting > 0 and not stuck) or unproven)):
                break
            tape = Tape(program, model, planned.tape.tiers)
            # Memory comes in pieces: what is kept beside never takes all that is free.
            share_bytes = max(allowance, 0) // (3 if unproven else 2)
            tape.audit = Audit(program, share_bytes, differed.append)
            tape.beside_bytes = share_bytes if unproven else 0
            tape.errors = program.errors
            with rehearsal(model, batch, provenance=planned.plan.provenance), _installed(model):
                with torch.enable_grad(), tape.region(program.root, whole_step=True):
                    loss, output = run_step(model, batch, step)
                before = [fingerprint(b) for b in model.buffers()]
                loss.backward()
                moved = before != [fingerprint(b) for b in model.buffers()]
                del loss, output
            if moved:  # an op of somebody's own writes a buffer that it is not even handed
                foreign = [s for s in program.slots if s.drops and s.func and s.func.namespace not in _KNOWN]
                for slot in foreign:
                    slot.drops = ()
                differed += foreign
            stuck, unproven = len(program.unaudited()) == waiting, False
        for slot in differed:
            self._differed(slot)
        by_op = {ids[id(slot)]: drops[id(slot)] for slot in differed}
        return {d.storage for d in planned.plan.decisions if any(d.output == o for o, _ in by_op.get(d.op, ()))}

    def _differed(self, slot: Slot) -> None:
        self._warn(f"{slot.name} in {slot.where or 'the model'} gives other bits when it runs again: saved from now on")

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            logger.warning("lowtide: %s", text)

    def _remember(self, planned: Planned, signature: str | None = None) -> None:
        self._planned = [planned, *self._planned[1:]] if not self._planned else [*self._planned, planned]
        for call in {*planned.graph.calls, *([signature] if signature else [])}:
            self._by_call[call] = planned

    # -- attaching ----------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        self._undo = scopes.install(self.model, attach.GuardedCall(self.model, self._choose))

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
    lossy: str | Mapping[str, str] | None = None,
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
        lossy: Off by default, since gradients are then no longer the plain step's to the last bit. ``"int8"`` or
            ``"fp8"``: floating activations may be kept as a byte an element; ``{"int8": "layers.*.mlp*"}``: of modules
            whose path is like that. ``report()`` and ``verify()`` say how far off that is.

    Returns:
        A ``Fit``: ``plan``, ``report()``, ``verify()``, ``step_region()``, ``remove()``.

    Raises:
        ValueError, TypeError: the budget makes no sense.
        BudgetInfeasibleError: no plan fits; ``least_bytes`` would.
        StepError, UnsupportedModelError: the step cannot be planned; the model is as it was.
        TierError: a tier that was asked for is not on this machine, or cannot be used; likewise.
    """
    model = unwrapped(model)
    settings = _Settings(parse_budget(budget), optimizer, method, options)
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
    settings.unasked = host_budget == "auto" and scratch_dir is None and disk_budget is None
    if offload:
        settings.options = {**options, "offload": offload}
    if lossy is not None:
        settings.places = replace(settings.places, lossy=lossy_form(lossy)[0])
        settings.options = {**settings.options, "lossy": lossy}
    fitted._remember(fitted._make(batch, step))
    if sum(t.numel() * t.element_size() for t in batch_tensors(batch)) < 0.01 * fitted.plan.plain_peak_bytes:
        fitted._batch = batch
    if not fitted.graph.calls:
        fitted._warn("the step never calls the model itself: only what runs inside fit.step_region() is taped")
    if compiled := scopes.compiled_parts(model):
        shown = ", ".join(path or "the model" for path in compiled[:3]) + (", ..." if len(compiled) > 3 else "")
        fitted._warn(f"compiled code runs as it is and is saved whole: {shown}")
    fitted._attach()
    return fitted


@contextmanager
def _installed(model: nn.Module) -> Iterator[None]:
    undo = scopes.install(model, attach.GuardedCall(model, lambda args, kwargs: None))
    try:
        yield
    finally:
        undo()


def _auto_budget(model: nn.Module, graph: StepGraph) -> int:
    """What lives now plus what is free, less a margin, absolute bytes."""
    device = device_of(model)
    to_come = 0 if any(p.grad is not None for p in model.parameters()) else graph.resident["gradients"]
    now = graph.resident_bytes - to_come - graph.resident["optimizer"]
    return now + int((1 - AUTO_MARGIN) * available_bytes(device))


def _with_fixed(graph: StepGraph, storages: set[int]) -> StepGraph:
    fixed = tuple(replace(s, fixed="its replay differed") if s.id in storages else s for s in graph.storages)
    return replace(graph, storages=fixed)
