"""Which values of a layer to save: sets along the trade-off of bytes, backward peak and time, by lowtide's solver."""

from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.compiled.layer_graph import LayerGraph
from lowtide.errors import BudgetInfeasibleError
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers.dispatch import solve

_SHARES = (0.0, 0.12, 0.25, 0.4, 0.6, 0.8, 1.0)  # of what the layer stores where nothing is recomputed
_CASTS = ("convert_element_type", "_to_copy")  # of Inductor's graphs, and before its decompositions
_TIGHT = 0.75  # of the peak in backward that a set has: how much less the next one may take


@dataclass(frozen=True)
class SavedSet:
    """One way to split a layer into forward and backward.

    Attributes:
        names: Forward values that are saved besides the layer's inputs; None: PyTorch's own choice.
        stored_bytes: Of these values.
        forward_bytes: Most that lives in forward, by simulation, which writes nothing in place.
        backward_bytes: Most that lives in backward, saved values included, by simulation.
        recompute_ms: What backward computes again.
    """

    names: tuple[str, ...] | None
    stored_bytes: int
    forward_bytes: int
    backward_bytes: int
    recompute_ms: float

    @property
    def peak_bytes(self) -> int:
        """Most that lives in either, by simulation."""
        return max(self.forward_bytes, self.backward_bytes)


def front(layer: LayerGraph, shares: Iterable[float] = _SHARES) -> list[SavedSet]:
    """Sets from nothing saved to everything, each also with a lower peak in backward where there is one; and what
    selective checkpointing keeps."""
    everything = _evaluated(layer, {})
    # What Inductor fuses into its readers takes less than the sum of its ops, so that this set is faster than it looks.
    selective = _evaluated(layer, solve(layer.graph, layer.costs, method="selective").action_of())
    found: dict[tuple[str, ...] | None, SavedSet] = {selective.names: selective}
    for share in shares:
        wide = within(layer, int(share * everything.stored_bytes), None)
        if wide is None:
            continue
        found.setdefault(wide.names, wide)
        tight = within(layer, wide.stored_bytes, int(_TIGHT * wide.backward_bytes))
        if tight is not None:
            found.setdefault(tight.names, tight)
    return sorted(
        (s for s in found.values() if not any(_beats(other, s) for other in found.values())),
        key=lambda s: (s.stored_bytes, s.backward_bytes),
    )


def _beats(one: SavedSet, other: SavedSet) -> bool:
    """Whether ``one`` is better in something and worse in nothing."""
    mine = one.stored_bytes, one.backward_bytes, one.recompute_ms
    theirs = other.stored_bytes, other.backward_bytes, other.recompute_ms
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def least(layer: LayerGraph) -> SavedSet:
    """The set that saves no byte more than it must."""
    return within(layer, 0, None) or _evaluated(layer, {})


def within(layer: LayerGraph, stored_bytes: int, backward_bytes: int | None) -> SavedSet | None:
    """The fastest set that stores and takes no more than that; None where the solver finds none."""
    total = sum(s.bytes for s in layer.graph.storages)
    stored_bytes += _fixed_bytes(layer)
    slack = 4 * total if backward_bytes is None else max(0, backward_bytes - stored_bytes)
    return _fastest(layer, slack, slack + stored_bytes)


def _fixed_bytes(layer: LayerGraph) -> int:
    """Of what is never made again. A seed is such: where masks are drawn from it again, it is stored in their place."""
    return sum(s.bytes for s in layer.graph.storages if s.fixed and s.id in layer.names)


def saving(layer: LayerGraph, names: Iterable[str]) -> SavedSet:
    """The set of these values, of which sizes and times are those of ``layer``."""
    kept = set(names)
    return _evaluated(layer, {s: SAVE if name in kept else RECOMPUTE for s, name in layer.names.items()})


def within_peak(layer: LayerGraph, peak_bytes: int, rest_bytes: int = 0) -> SavedSet | None:
    """The fastest set for a step whose peak is at most that, where the layer is most of the step; None where the solver
    finds none. What it takes may be somewhat more: a value is made again once, and inputs are cast again.

    Args:
        rest_bytes: What the rest of the model takes while all lives that the layer stores.
    """
    return _fastest(layer, rest_bytes, peak_bytes)


def _fastest(layer: LayerGraph, slack: int, peak_bytes: int) -> SavedSet | None:
    graph = layer.with_slack(slack)
    try:
        plan = solve(graph, layer.costs, max(1, peak_bytes + graph.resident_bytes))
    except BudgetInfeasibleError:
        return None
    return _evaluated(layer, plan.action_of())


def least_peak(layer: LayerGraph) -> SavedSet:
    """The set with the lowest peak that the solver finds, where the layer is the whole step."""
    try:
        plan = solve(layer.graph, layer.costs, 1)
    except BudgetInfeasibleError as error:
        plan = solve(layer.graph, layer.costs, error.least_bytes)
    return _evaluated(layer, plan.action_of())


def _casts_of_inputs(layer: LayerGraph) -> list[int]:
    """Stored values that are a layer's input in another dtype: the input is there anyway, and smaller where it matters.

    Where a cast were saved in its place, the input would be gone in backward, and the step's plan counts it as there.
    """
    graph = layer.graph
    makers = {s: graph.ops[op] for s in graph.stored & layer.names.keys() if (op := graph.storages[s].op) is not None}
    return [
        s
        for s, op in makers.items()
        if any(cast in op.name for cast in _CASTS) and all(graph.storages[read].op is None for read in op.reads)
    ]


def _evaluated(layer: LayerGraph, actions: dict[int, str]) -> SavedSet:
    graph = layer.graph
    actions = actions | dict.fromkeys(_casts_of_inputs(layer), RECOMPUTE)
    kept = [s for s in layer.names if s in graph.stored and actions.get(s, SAVE) == SAVE]
    # A replay may read what backward itself does not: it is saved where the plan says so.
    kept += [s for s, action in actions.items() if action == SAVE and s not in graph.stored and s in layer.names]
    once = {s: a for s, a in actions.items() if a in (SAVE, RECOMPUTE)}
    line = simulate_actions(graph, layer.costs, once)
    turn = next(i for i, event in enumerate(graph.events) if event == (0, layer.turn_op))
    return SavedSet(
        tuple(sorted(layer.names[s] for s in kept)),
        sum(graph.storages[s].bytes for s in kept),
        max(line.event_peak_bytes[:turn], default=0),
        max(line.event_peak_bytes[turn + 1 :], default=0),
        line.recompute_ms,
    )
