"""Checkpointing of a chain with equal steps, optimal for a known length: binomial schedules.

Griewank and Walther 2000, "Algorithm 799: revolve: an implementation of checkpointing for the reverse or adjoint mode
of computational differentiation", ACM TOMS 26(1), https://doi.org/10.1145/347837.347846

    l        steps (repeated layers)
    c        snapshots held at once, that of the chain's start included (``n`` in ``solve``)
    β(c, r)  binomial(c + r, c): most steps that c snapshots reverse with no step run forward more than r times
    t(l, c)  = r l - β(c + 1, r - 1), for β(c, r - 1) < l <= β(c, r): least forward steps beyond one run of each step

Differs: steps are layers, taken to be equal, and a snapshot is the input of a layer; what comes before the first layer
and after the last one runs plainly. A layer is replayed op by op, as backward asks, so that its last ops, which
backward does not need, run no more often than its output is needed.

Known weakness: counts snapshots, not bytes, and never keeps what is inside a layer but for the last one, so the fastest
schedule it has replays every layer but one.
"""

from math import comb

from lowtide.solvers.published.chain import ALL, BACKWARD, CK, EMPTY, Step, StepChain
from lowtide.solvers.published.lazy_candidates import LazyCandidate
from lowtide.solvers.search_context import SearchContext


def repetitions(steps: int, snapshots: int) -> int:
    """r: how often a step runs forward at most, beyond the run that its backward follows."""
    r = 0
    while comb(snapshots + r, snapshots) < steps:
        r += 1
    return r


def extra_steps(steps: int, snapshots: int) -> int:
    """t(l, c), the least number of forward steps beyond one run of each.

    Example:
        >>> extra_steps(10, 3)  # with the first snapshot alone it would be 45
        15
    """
    r = repetitions(steps, snapshots)
    return r * steps - comb(snapshots + r, snapshots + 1)  # β(c + 1, r - 1)


def revolve_schedule(steps: int, snapshots: int) -> list[Step]:
    """An optimal schedule for stages 0 to ``steps`` - 1.

    Raises:
        ValueError: ``steps`` or ``snapshots`` is not positive.
    """
    if steps < 1 or snapshots < 1:
        raise ValueError(f"{steps} steps cannot be reversed with {snapshots} snapshots. Both must be at least 1.")
    return _reverse(0, steps, snapshots)


def _reverse(start: int, end: int, snapshots: int) -> list[Step]:
    """Steps that undo stages ``start`` to ``end`` - 1; the input of ``start`` is one of the ``snapshots``."""
    if end - start == 1:
        return [Step(ALL, start), Step(BACKWARD, start)]
    middle = start + _advance(end - start, snapshots)
    found = [Step(CK, start), *(Step(EMPTY, k) for k in range(start + 1, middle))]
    if snapshots == 1:
        return [*found, Step(ALL, middle), Step(BACKWARD, middle), *_reverse(start, middle, 1)]
    return [*found, *_reverse(middle, end, snapshots - 1), *_reverse(start, middle, snapshots)]


def _advance(steps: int, snapshots: int) -> int:
    """How far the next snapshot lies: of all optimal distances the smallest."""
    if snapshots == 1:
        return steps - 1
    least = extra_steps(steps, snapshots)
    return next(
        d for d in range(1, steps) if d + extra_steps(steps - d, snapshots - 1) + extra_steps(d, snapshots) == least
    )


def revolve(context: SearchContext, n: int | None = None) -> list[LazyCandidate]:
    """The plan with ``n`` snapshots, or those with every number of snapshots that makes a difference.

    Raises:
        ValueError: no layer repeats, or ``n`` is not a positive int.
    """
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise ValueError(f"n={n!r} is not a positive int. Write n=3 to hold three layer inputs at a time.")
    chain = StepChain(context, "revolve")
    most = max(len(chain.layers) - 1, 1)
    counts = [min(n, most)] if n else range(1, most + 1)
    return [chain.lazy_candidate(step_schedule(chain, snapshots)) for snapshots in counts]


def step_schedule(chain: StepChain, snapshots: int) -> list[Step]:
    """The schedule of the layers, with all that surrounds them run plainly."""
    first, last, count = chain.layers.start, chain.layers.stop - 1, len(chain.outputs)
    schedule = [Step(kind, stage + first) for kind, stage in revolve_schedule(len(chain.layers), snapshots)]
    around = schedule.index(Step(ALL, last)) + 1
    after = range(last + 1, count)
    tail = [*(Step(ALL, k) for k in after), *(Step(BACKWARD, k) for k in reversed(after))]
    before, undone = [Step(ALL, k) for k in range(first)], [Step(BACKWARD, k) for k in reversed(range(first))]
    return [*before, *schedule[:around], *tail, *schedule[around:], *undone]
