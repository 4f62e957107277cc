"""Ops that are whole calls of autograd Functions: what they store, and what of that no plan may drop."""

from lowtide.explanation import FunctionGroup
from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import StepGraph

PREFIX = "function."  # of their names
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
    stored: dict[str, int] = {}
    kept: dict[str, dict[str, int]] = {}
    for op in graph.forward_ops:
        if not op.name.startswith(PREFIX):
            continue
        name = short_name(op.name)
        calls[name] = calls.get(name, 0) + 1
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
        groups.append(FunctionGroup(name, num_calls, stored.get(name, 0), sum(reasons.values()), why))
    return tuple(sorted(groups, key=lambda g: (-g.stored_bytes, g.name)))
