"""One variant for each layer, so that the step fits and is fastest: a small integer program. Plain data, no torch.

The step is a row of *moments*: code between layers, a layer's forward, a layer's backward. The live bytes of a moment
are those of the watched step, changed by what other variants store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.solvers.milp.highs import LinearProgram

BETWEEN, FORWARD, BACKWARD = "between layers", "forward", "backward"
_GAP, _NODE_LIMIT, _TIME_LIMIT_S = 5e-4, 20_000, 20.0  # at 1e-4, 32 layers alike take all of the time
_SCALE = 1e-6  # bytes in rows as megabytes: numbers near 1


@dataclass(frozen=True)
class Option:
    """What one variant means for a layer.

    Attributes:
        stored_bytes: Held from forward to backward.
        forward_bytes, backward_bytes: Peaks beyond what lives when each begins.
        step_ms: Forward and backward.
    """

    name: str
    stored_bytes: int
    forward_bytes: int
    backward_bytes: int
    step_ms: float


@dataclass(frozen=True)
class Moment:
    """A part of the step.

    Attributes:
        kind: ``between layers``, ``forward`` or ``backward``.
        layer: Which one, for the latter two.
        live_bytes: When it begins, without anything that layers store.
        extra_bytes: Peak beyond that, between layers.
        open: Layers that have run forward and not finished backward, with how often.
    """

    kind: str
    layer: str
    live_bytes: int
    extra_bytes: int
    open: Mapping[str, int]


@dataclass(frozen=True)
class Choice:
    """A variant by layer, with the step's peak in bytes and the layers' time."""

    variants: dict[str, str]
    peak_bytes: int
    layers_ms: float


def called(layer: str) -> str:
    """What messages call a layer; the name of the model itself is empty."""
    return layer or "the model"


def peak_of(moments: Sequence[Moment], options: Mapping[str, Sequence[Option]], variants: Mapping[str, str]) -> int:
    """The step's peak in bytes, with that variant for each layer."""
    chosen = {layer: next(o for o in found if o.name == variants[layer]) for layer, found in options.items()}
    return max((_bytes_in(moment, chosen) for moment in moments), default=0)


def peak_moment(
    moments: Sequence[Moment], options: Mapping[str, Sequence[Option]], variants: Mapping[str, str]
) -> Moment | None:
    """The moment at which the peak is reached first."""
    chosen = {layer: next(o for o in found if o.name == variants[layer]) for layer, found in options.items()}
    return max(moments, key=lambda moment: _bytes_in(moment, chosen), default=None)


def _bytes_in(moment: Moment, chosen: Mapping[str, Option]) -> int:
    stored = sum(count * chosen[layer].stored_bytes for layer, count in moment.open.items())
    own = 0
    if moment.kind == FORWARD:
        own = chosen[moment.layer].forward_bytes
    elif moment.kind == BACKWARD:
        own = chosen[moment.layer].backward_bytes
    return moment.live_bytes + moment.extra_bytes + stored + own


def fastest_within(
    moments: Sequence[Moment], options: Mapping[str, Sequence[Option]], budget_bytes: int
) -> Choice | None:
    """The fastest choice whose peak is at most ``budget_bytes``; None if there is none."""
    return _solved(moments, options, budget_bytes)


def least_peak(moments: Sequence[Moment], options: Mapping[str, Sequence[Option]]) -> Choice:
    """The choice with the lowest peak."""
    found = _solved(moments, options, None)
    assert found is not None  # any choice has a peak
    return found


def _solved(
    moments: Sequence[Moment], options: Mapping[str, Sequence[Option]], budget_bytes: int | None
) -> Choice | None:
    program = LinearProgram()
    column: dict[tuple[str, str], int] = {}
    for layer, found in options.items():
        for option in found:
            cost = option.step_ms if budget_bytes is not None else 0.0
            column[layer, option.name] = program.column(cost, integer=True)
        program.row({column[layer, o.name]: 1.0 for o in found}, lower=1.0, upper=1.0)
    peak = program.column(1.0, upper=float("inf")) if budget_bytes is None else None
    for moment in moments:
        terms: dict[int, float] = {}
        for layer, count in moment.open.items():
            for option in options[layer]:
                terms[column[layer, option.name]] = count * option.stored_bytes * _SCALE
        if moment.kind != BETWEEN:
            for option in options[moment.layer]:
                own = option.forward_bytes if moment.kind == FORWARD else option.backward_bytes
                key = column[moment.layer, option.name]
                terms[key] = terms.get(key, 0.0) + own * _SCALE
        there = (moment.live_bytes + moment.extra_bytes) * _SCALE
        if peak is None:
            assert budget_bytes is not None
            program.row(terms, upper=budget_bytes * _SCALE - there)
        else:
            program.row({**terms, peak: -1.0}, upper=-there)
    result = program.minimise(gap=_GAP, slack=0.0, node_limit=_NODE_LIMIT, time_limit_s=_TIME_LIMIT_S)
    if not len(result.values):
        return None
    variants = {
        layer: max(found, key=lambda o, at=layer: result.values[column[at, o.name]]).name  # type: ignore[misc]
        for layer, found in options.items()
    }
    peak_bytes = peak_of(moments, options, variants)
    if budget_bytes is not None and peak_bytes > budget_bytes:  # the program counts in floating point
        return _solved(moments, options, budget_bytes - (peak_bytes - budget_bytes))
    by_name = {(layer, o.name): o.step_ms for layer, found in options.items() for o in found}
    return Choice(variants, peak_bytes, sum(by_name[item] for item in variants.items()))
