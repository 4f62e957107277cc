"""Where the activation memory of a step is: by module, layer, operator and tensor, and what attention's scores take."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

from lowtide.explanation import collapse_path, short_op
from lowtide.graph.step_graph import Op, StepGraph
from lowtide.plan import RECOMPUTE, SAVE, Decision, Plan

_LAYER = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")
_MOST_TENSORS = 20


@dataclass(frozen=True)
class ActionTotals:
    """Totals of the decisions that share a module path or an operator.

    Counts and bytes are of storages that the plain step stores, ``other`` those offloaded; ``recompute_ms`` is of
    every replay in the group, also of what only other replays need.
    """

    name: str
    save_count: int
    save_bytes: int
    recompute_count: int
    recompute_bytes: int
    other_count: int
    other_bytes: int
    recompute_ms: float

    @property
    def bytes(self) -> int:
        return self.save_bytes + self.recompute_bytes + self.other_bytes


def by_module(plan: Plan) -> tuple[ActionTotals, ...]:
    """Decisions by module path, numbered siblings together; most bytes first, then by name."""
    return _most_first(_grouped(plan, lambda d: collapse_path(plan.scope(d))))


def by_op(plan: Plan) -> tuple[ActionTotals, ...]:
    """Decisions by the operator that makes the storage; most bytes first, then by name."""
    return _most_first(_grouped(plan, lambda d: short_op(plan.ops[d.op].name)))


def by_layer(plan: Plan) -> tuple[ActionTotals, ...]:
    """Decisions by layer (a path up to its first number; else the whole path), in the order in which they run."""
    return tuple(_grouped(plan, lambda d: layer_of(plan.scope(d))))


def by_tensor(plan: Plan) -> tuple[ActionTotals, ...]:
    """The twenty largest stored tensors, most bytes first; the others in one row, what only replays need in another."""
    rows = [
        _totals(f"{plan.scope(d) or '(outside modules)'}: {short_op(plan.ops[d.op].name)}", [d])
        for d in plan.decisions
        if d.stored
    ]
    rows.sort(key=lambda row: -row.bytes)
    rest = rows[_MOST_TENSORS:]
    largest = (*rows[:_MOST_TENSORS], *([total(f"{len(rest)} smaller ones", rest)] if rest else []))
    helpers = [d for d in plan.decisions if not d.stored and d.recompute_ms]
    return (*largest, _totals("what only replays need", helpers)) if helpers else largest


BREAKDOWNS: dict[str, Callable[[Plan], tuple[ActionTotals, ...]]] = {
    "module": by_module,
    "layer": by_layer,
    "operator": by_op,
    "tensor": by_tensor,
}


def layer_of(path: str) -> str:
    """``model.layers.7.mlp.up_proj -> model.layers.7``; a path without a number stays as it is."""
    found = _LAYER.match(path)
    return found[0] if found else path or "(outside modules)"


def total(name: str, groups: Iterable[ActionTotals]) -> ActionTotals:
    """The sum of ``groups`` under ``name``."""
    sums = (sum(column) for column in list(zip(*map(astuple, groups)))[1:])
    return ActionTotals(name, *sums)


def _grouped(plan: Plan, name_of: Callable[[Decision], str]) -> list[ActionTotals]:
    """One group per name, in the order of the plan; what is only kept for replays forms no group."""
    members: dict[str, list[Decision]] = {}
    for decision in plan.decisions:
        if decision.stored or decision.recompute_ms:
            members.setdefault(name_of(decision), []).append(decision)
    return [_totals(name, decisions) for name, decisions in members.items()]


def _totals(name: str, decisions: list[Decision]) -> ActionTotals:
    save = [d.bytes for d in decisions if d.stored and d.action == SAVE]
    recompute = [d.bytes for d in decisions if d.stored and d.action == RECOMPUTE]
    other = [d.bytes for d in decisions if d.stored and d.action not in (SAVE, RECOMPUTE)]
    ms = sum(d.recompute_ms * d.replays for d in decisions)
    return ActionTotals(name, len(save), sum(save), len(recompute), sum(recompute), len(other), sum(other), ms)


def _most_first(groups: list[ActionTotals]) -> tuple[ActionTotals, ...]:
    return tuple(sorted(groups, key=lambda g: (-g.bytes, -g.recompute_ms, g.name)))


@dataclass(frozen=True)
class AttentionScores:
    """What the plain step stores for attention's scores, and what the same layers store with the other kernels.

    Attributes:
        eager_count, eager_bytes: Attentions that store scores, and the bytes of all that is as large as the scores.
        eager_as_fused_bytes: Those with a fused kernel: 4 bytes for each row of scores (log-sum-exp).
        fused_count, fused_bytes: Attentions by a fused kernel, and what they store for their scores.
        fused_as_eager_bytes: Those with eager attention: the probabilities alone, so at least that much.
    """

    eager_count: int
    eager_bytes: int
    eager_as_fused_bytes: int
    fused_count: int
    fused_bytes: int
    fused_as_eager_bytes: int

    def sentences(self, amount: Callable[[int], str]) -> list[str]:
        """What there is to say; ``amount`` prints bytes."""
        found = []
        if self.eager_count:
            found.append(
                f"Eager attention stores {amount(self.eager_bytes)} of scores in {self.eager_count} places; a fused "
                f'kernel (attn_implementation="sdpa") stores {amount(self.eager_as_fused_bytes)} for them.'
            )
        if self.fused_count:
            found.append(
                f"Fused attention stores {amount(self.fused_bytes)} for the scores of {self.fused_count} places; "
                f"eager attention would store at least {amount(self.fused_as_eager_bytes)}."
            )
        return found


_FUSED = "_scaled_dot_product_"
_PRODUCTS = ("bmm", "mm", "baddbmm", "matmul", "addmm")
_ROW_BYTES = 4  # of a fused kernel's log-sum-exp, float32
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def attention_scores(graph: StepGraph) -> AttentionScores:
    """Scores of every attention in forward; fused ones are found by the names of PyTorch's kernels."""
    eager: list[tuple[int, int]] = []
    for softmax, scores in eager_scores(graph).items():
        shape = _tensors(graph, graph.ops[softmax])[0]["t"]
        eager.append((sum(graph.storages[s].bytes for s in scores), math.prod(shape[:-1]) * _ROW_BYTES))
    fused: list[tuple[int, int]] = []
    for op in graph.forward_ops:
        tensors = _tensors(graph, op)
        if short_op(op.name).startswith(_FUSED) and len(tensors) >= 2:
            query, key = tensors[0], tensors[1]
            rows = math.prod(query["t"][:-1])
            stored = [s for s in op.makes[1:] if s in graph.stored]  # the first is the output itself
            probabilities = rows * key["t"][-2] * _ITEM_BYTES.get(query["dtype"], 4)
            fused.append((sum(graph.storages[s].bytes for s in stored), probabilities))
    return AttentionScores(
        len(eager), sum(b for b, _ in eager), sum(f for _, f in eager),
        len(fused), sum(b for b, _ in fused), sum(e for _, e in fused),
    )  # fmt: skip


def eager_scores(graph: StepGraph) -> dict[int, set[int]]:
    """Stored storages that hold attention's scores, by the softmax op.

    A softmax over at least three dimensions is taken for one of scores: what as many elements wide leads to it from a
    matrix product, and from it to the next one.
    """
    readers: dict[int, list[Op]] = {}
    for op in graph.forward_ops:
        for s in op.reads:
            readers.setdefault(s, []).append(op)
    found = {}
    for op in graph.forward_ops:
        tensors = _tensors(graph, op) if op.name == "aten._softmax.default" else []
        if tensors and len(tensors[0]["t"]) >= 3:
            found[op.id] = _scores(graph, readers, op, math.prod(tensors[0]["t"]))
    return {op: scores for op, scores in found.items() if scores}


def _tensors(graph: StepGraph, op: Op) -> list[dict]:
    """Descriptions of the op's tensor arguments; none in a graph that was made without signatures."""
    args = graph.signatures[op.signature].get("args", []) if graph.signatures else []
    return [a for a in args if isinstance(a, dict) and "t" in a]


def _scores(graph: StepGraph, readers: dict[int, list[Op]], softmax: Op, elements: int) -> set[int]:
    """Stored storages with ``elements`` elements between the product before ``softmax`` and the one after."""
    wide = range(elements, 8 * elements + 512)  # bytes: one to eight an element, rounded up by an allocator
    found: set[int] = set()
    before, after = list(softmax.reads), list(softmax.makes)
    while before:
        s = before.pop()
        maker = graph.storages[s].op
        if s in found or maker is None or graph.storages[s].bytes not in wide:
            continue
        found.add(s)
        before += graph.ops[maker].reads if short_op(graph.ops[maker].name) not in _PRODUCTS else ()
    while after:
        s = after.pop()
        if s in found or graph.storages[s].bytes not in wide:
            continue
        found.add(s)
        for op in readers.get(s, []):
            after += op.makes if short_op(op.name) not in _PRODUCTS else ()
    return found & graph.stored
