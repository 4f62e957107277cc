"""``from_settings``: the plan that a framework's checkpointing settings mean on one training step."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lowtide.graph.costs import HOST, Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.measurement.op_times import measure
from lowtide.plan import Plan
from lowtide.settings.decisions import candidate_of
from lowtide.settings.description import Description
from lowtide.settings.frameworks import describe
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.dispatch import solve
from lowtide.solvers.search_context import SearchContext
from lowtide.tracing.sources import trace
from lowtide.tracing.tracer import Step
from lowtide.training.existing_checkpointing import ExistingCheckpointing


@dataclass(frozen=True)
class SettingsPlan:
    """What settings mean, and everything that was needed to say so."""

    plan: Plan
    description: Description
    graph: StepGraph
    costs: Costs


def from_settings(
    model: nn.Module,
    settings: Mapping[str, Any],
    *,
    batch: Any,
    framework: str | None = None,
    step: Step | None = None,
    optimizer: Any = None,
) -> Plan:
    """The plan that checkpointing settings mean on ``model``'s step: compare it, verify it, or apply it.

    The step is traced without checkpointing, whatever is switched on in the model.

    Args:
        settings: Names and values as the framework's configuration has them; only those about checkpointing.
        framework: ``transformers``, ``trl``, ``roll``, ``megatron``, ``colossalai``, ``deepspeed``, ``torchtitan``,
            ``accelerate`` (FSDP's flags) or ``torch``; None: told by the names, where only one framework has them.
        batch, step, optimizer: As for ``trace``.

    Returns:
        A plan. ``plan.provenance["settings"]`` says in words what they mean, ``plan.provenance["settings_findings"]``
        which of them do nothing, are deprecated, or mean something else here, one a line.

    Raises:
        SettingsError: a setting is unknown, contradicts another, or is one that the framework itself refuses.
        StepError, UnsupportedModelError: as for ``trace``.

    Example:
        >>> settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}
        >>> plan = lowtide.from_settings(model, settings, framework="transformers", batch=batch)  # doctest: +SKIP
    """
    return settings_plan(model, settings, batch=batch, framework=framework, step=step, optimizer=optimizer).plan


def settings_plan(
    model: nn.Module, settings: Mapping[str, Any], *, batch: Any, framework: str | None, step: Step | None,
    optimizer: Any = None,
) -> SettingsPlan:  # fmt: skip
    """``from_settings`` with the traced step and its costs."""
    description = describe(model, settings, framework)  # before anything runs
    with without_checkpointing(model):
        graph = trace(model, batch, step=step, optimizer=optimizer)
    tiers = (HOST,) if description.moves and graph.device != "cpu" else ()
    return plan_of(graph, measure(graph, tiers=tiers), description)


def plan_of(graph: StepGraph, costs: Costs, description: Description) -> SettingsPlan:
    """The plan that a description means on a traced step."""
    start_s = time.perf_counter()
    if description.kept_ratio is not None:
        plan = solve(graph, costs, method="knapsack", ratio=description.kept_ratio)
    else:
        candidate, findings = candidate_of(graph, costs, description)
        description = replace(description, findings=(*description.findings, *findings))
        plan = build_plan(SearchContext(graph, costs), candidate, method="settings", start_s=start_s)
    plan.provenance["settings"] = description.summary
    plan.provenance["settings_findings"] = "\n".join(map(str, description.findings))
    return SettingsPlan(plan, description, graph, costs)


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Inside, checkpointing is off where a switch of the model had it on."""
    existing = ExistingCheckpointing(model)
    existing.switch_off()
    try:
        yield
    finally:
        existing.restore()
