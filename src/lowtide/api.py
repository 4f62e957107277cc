"""``fit``: a model's training step within a budget, in one call."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lowtide import long_sequences
from lowtide.argument_checks import budget_hint, check_arguments, check_on_excess
from lowtide.errors import BudgetInfeasibleError
from lowtide.options import WARN, FitOptions, Offload, names_checked, offload_policy
from lowtide.plan import ALLOCATED
from lowtide.rank_consensus import group_of
from lowtide.solvers.arguments import check_budget_kind
from lowtide.solvers.dispatch import check_method
from lowtide.step.data_parallel import unwrapped
from lowtide.step.whole_modules import matching
from lowtide.tape.offload.open_tiers import usable
from lowtide.tracing.model_facts import ModelFacts
from lowtide.tracing.tracer import Step
from lowtide.training.existing_checkpointing import KEEP, REPLACE
from lowtide.training.fitted_model import Fit
from lowtide.training.status import Status

logger = logging.getLogger("lowtide")


@names_checked
def fit(
    model: nn.Module,
    batch: Any = None,
    *,
    budget: int | str = "auto",
    budget_kind: str = ALLOCATED,
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
    chunk_loss: bool = False,
    tile_mlp: int | str | None = None,
    opaque: Sequence[str] = (),
    on_excess: str = WARN,
    on_status: Callable[[Status], None] | None = None,
) -> Fit:
    """Make ``model``'s training step fit ``budget`` at the least extra time, gradients bitwise the same.

    Without a batch nothing runs now. The first real step is watched and kept within the budget as it runs, its plan is
    solved in a process beside training, and later steps run under the plan. Losses outside the model, several calls
    in a step and batches of other shapes are seen as they come. ``status()`` says what is in force.

    With a batch the plan is made now, by a few rehearsal steps (nothing of the training state moves): one recorded
    below autograd, one under the plan in which every replay is compared bitwise with what it replaces.

    Args:
        model: Where and as it trains: on its device, in train mode, with the autocast around it that training uses.
            In ``DistributedDataParallel`` or before it is wrapped; wrapped, every rank has to call ``fit``. A DeepSpeed
            engine (ZeRO-0 to 2). Each rank has a plan of its own.
        batch: One batch of the training data; None: watch the steps that really run.
        budget: Peak allocated device memory for forward and backward, weights and gradients included: ``"6GiB"``, an
            int in bytes, ``"40%"`` of the plain step's activation memory, or ``"auto"``: what is free now, less a
            tenth; without a batch it shrinks when others take memory.
        budget_kind: ``"reserved"``: the budget is of what the device's caching allocator reserves, as the device's own
            tools show it, for steps of one shape. Without a batch, steps that have no plan yet keep it as allocated.
        optimizer: Counts the state it has or will have, of any kind. An ``Optimizer``, also as Accelerate or DeepSpeed
            wrap it, several in a list or as values of a dictionary, or a name: ``"adamw"``, ``"adamw_fused"``,
            ``"adam"``, ``"adafactor"``, ``"adagrad"``, ``"rmsprop"``, ``"sgd"``, ``"sgd_momentum"``. None: state counts
            once an optimizer of ``torch.optim`` has stepped the model.
        step: ``(model, batch) -> loss`` where the loss is not the model's own output.
        method: ``exact``, or a published method: ``none``, ``full``, ``every_n``, ``sqrt_n``, ``selective``,
            ``revolve``, ``rotor`` or ``knapsack``; see ``solve``.
        n, ratio, gap, time_limit_s, node_limit: Options of the method; see ``solve``.
        offload: Where tensors may be stored outside device memory, and how many bytes of them. By default a model on
            CPU stores none, a model on an accelerator uses pinned host memory.
        checkpointing: ``"replace"``: transformers' gradient checkpointing and Megatron's recomputation, where they are
            on, are switched off while the model is fitted. ``"keep"``: it stays on, and what it drops is not planned.
        max_plans: Plans at hand at most; the one that was used least recently goes.
        chunk_loss: Compute logits and loss of a causal model of transformers in chunks, so that the logits never
            exist; the output has none while the model trains. Not bitwise: the difference is told with the first batch.
        tile_mlp: Run each MLP over so many parts of the sequence, one after the other, or ``"auto"``: parts as long as
            the model is wide. Not bitwise in general: kernels may split other numbers of rows in other ways.
        opaque: Names of modules, as ``model.named_modules()`` has them, ``*`` for any text (``["*.experts"]``). Each
            call of one is one op: what it makes and stores is saved, or the module's own call runs again for all of it,
            as under non-reentrant checkpointing. Then its Python runs again, forward hooks included; generators,
            autocast, train mode and buffers are put back.
        on_excess: What follows a step that took more than the budget, by more than 64 KiB and a 512th. ``"warn"``: one
            line at once, for each kind of step. ``"raise"``: that line, and ``BudgetExceededError`` when its backward
            has ended; its gradients are whole, and the optimizer has not stepped. ``"lower"``: that line, and steps
            aim lower by what was too much, as long as that helps.
        on_status: Called with ``status()`` after each step, for loggers. What it raises ends the training.

    Returns:
        A ``Fit``: ``status()``, ``run()``, ``wait()``, ``plan``, ``report()``, ``verify()``, ``remove()``.

    Raises:
        ValueError, TypeError: an argument makes no sense; raised before anything runs.
        BudgetInfeasibleError: no plan fits; ``least_bytes`` would.
        StepError, UnsupportedModelError: the step cannot be planned; the model is as it was.
        TierError: a tier that was asked for is not on this machine, or cannot be used; the model is as it was.
    """
    policy = offload_policy(offload)
    if batch is None and step is not None:
        raise ValueError("step= needs a batch to plan with. Pass one, or leave step= out: the real steps are watched.")
    if isinstance(model, nn.Module):
        model = unwrapped(model)
    check_arguments(model, batch, budget, step, optimizer)
    check_on_excess(on_excess, on_status)
    facts = ModelFacts(model)
    options: dict[str, Any] = dict(n=n, ratio=ratio, gap=gap, time_limit_s=time_limit_s, node_limit=node_limit)
    given = {name: value for name, value in options.items() if value is not None}
    check_method(method, given)
    check_budget_kind(budget, budget_kind, facts.device.type)
    paths = tuple(matching(model, opaque)) if opaque else ()
    if budget_kind != ALLOCATED:
        given["budget_kind"] = budget_kind
    if policy.host_budget == "auto" and (method != "exact" or group_of(model) is not None):
        policy = replace(policy, host_budget=None)
    if checkpointing not in (REPLACE, KEEP):
        raise ValueError(f"checkpointing={checkpointing!r} is not known. Use {REPLACE!r} or {KEEP!r}.")
    if max_plans < 1:
        raise ValueError(f"max_plans={max_plans}: no plan could be kept. Ask for 1 or more.")
    capacities = usable(facts.device.type, policy)
    check_method(method, {"offload": policy} if capacities else {})
    asked = FitOptions(
        budget, optimizer, step, method, given, policy, max_plans, checkpointing, chunk_loss, tile_mlp, paths,
        on_excess, on_status,
    )  # fmt: skip
    hint = budget_hint(budget)
    if hint:
        logger.warning("lowtide: %s", hint)
    try:
        return Fit(facts, asked, capacities, batch, prepare=long_sequences.prepare)
    except BudgetInfeasibleError as error:
        if hint:
            error.args = (f"{error}\n{hint}",)
        raise
