"""Ops that are whole calls of autograd Functions or of modules: what they store, and what of that no plan may drop."""

from collections.abc import Sequence
from dataclasses import replace

from lowtide.explanation import FunctionGroup
from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import StepGraph

PREFIX = "function."  # of their names
MODULE = ".module:"  # in the name of an op that is a module's call
# Why what such a call made is saved, where others than autograd hold it.
IN_CONTEXT = "keeps tensors as attributes of its context"
ELSEWHERE = "keeps tensors that it made elsewhere"


def short_name(op: str) -> str:
    """``Norm`` of ``function.Norm.package.module``."""
    return op.removeprefix(PREFIX).partition(".")[0]


@once_per_graph
def function_groups(graph: StepGraph) -> tuple[FunctionGroup, ...]:
    """The Functions of the step, those first that store most."""
    calls: dict[str, int] = {}
    modules: set[str] = set()
    stored: dict[str, int] = {}
    kept: dict[str, dict[str, int]] = {}
    for op in graph.forward_ops:
        if not op.name.startswith(PREFIX):
            continue
        name = short_name(op.name)
        calls[name] = calls.get(name, 0) + 1
        modules |= {name} if MODULE in op.name else set()
        for storage in (graph.storages[s] for s in op.makes):
            if storage.id not in graph.stored and storage.fixed not in (IN_CONTEXT, ELSEWHERE):
                continue
            stored[name] = stored.get(name, 0) + storage.bytes
            if storage.fixed:
                reasons = kept.setdefault(name, {})
                reasons[storage.fixed] = reasons.get(storage.fixed, 0) + storage.bytes
    groups = []
    for name, num_calls in calls.items():
        reasons = kept.get(name, {})
        why = max(reasons, key=lambda reason: reasons[reason], default="")
        kept_bytes = sum(reasons.values())
        is_module = name in modules
        groups.append(FunctionGroup(name, num_calls, stored.get(name, 0), kept_bytes, why, is_module=is_module))
    return tuple(sorted(groups, key=lambda g: (-g.stored_bytes, g.name)))


def timed_function_groups(graph: StepGraph, op_ms: Sequence[float]) -> tuple[FunctionGroup, ...]:
    """The same with the time of their calls in forward."""
    ms: dict[str, float] = {}
    for op in graph.forward_ops:
        if op.name.startswith(PREFIX):
            ms[short_name(op.name)] = ms.get(short_name(op.name), 0.0) + op_ms[op.id]
    return tuple(replace(group, ms=ms[group.name]) for group in function_groups(graph))
