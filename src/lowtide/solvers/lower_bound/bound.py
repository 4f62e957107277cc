"""Lower bounds that hold for every plan: a least step time for a budget, and a least peak, from a linear relaxation.

A plan may recompute any set of storages, and replay each op any number of times, as early as backward first asks for
something that needs it. The bound shares no formulation with the MILP of ``exact.py``: its rows state only what memory
every plan needs (``unavoidable.py``). Without one of them, or with a later moment in one, the bound is weaker and still
holds.

After Checkmate's relaxation (Jain et al. 2020, https://arxiv.org/abs/1910.02653), whose matrix of stages and ops is
cut down to a few columns an op. Differs: two families of rows keep it tight. An unstored storage that is kept for a
replay is *pinned* until that replay, as recipes pin it. And an op runs again only in a burst that also runs its
*post-dominator*: the next op on every path from it to what was asked for (Cooper, Harvey and Kennedy 2001, "A simple,
fast dominance algorithm").

Symbols (stages t as in ``unavoidable.py``; an op has a grid of stages, ends of its slots i, as in ``columns.py``):

    s_x       1: x is saved                             D_j = A_{j,last}  1: op j is replayed at all
    A_{j,i}   1: op j has been replayed by slot i       N_{j,i}           1: j is replayed in slot i; N_{j,0} = A_{j,0}
    K_{x,t}   1: unstored x is pinned through stage t   V_{x,i}           1: x, brought back, is held beyond slot i

    minimise  sum_j ms_j sum_i N_{j,i} + record_ms D_j
    such that s_x + A_{j,t} >= 1                             backward asks for x, made by j, in stage t
              A_{j,t} <= s_p + A_{maker(p),t}                a replay finds what it reads
              A_{j,t} <= A_{d,t}                             d: post-dominator of j among what leads to stages up to t
              D_j + sum s_x <= outputs of j                  what is saved is not made again
              N_{j,i} >= A_{j,i} - A_{j,i-1}
              s_x + V_{x,i-1} + N_{j,i} >= 1                 ... each time that it asks
              N_{j,i} <= s_p + V_p + N_p                     every replay finds what it reads there and then;
                                                             of an unstored p only what is pinned until then, K_p
              V_{x,i} <= V_{x,i-1} + N_{j,i}
              K_{x,t} >= D_j - A_{j,t} - D_{maker(x)}        for each reader j of x
              floor + sum m (s + K + V) <= budget            at every moment that may bind
              floor + own_{j,i} N_{j,i} + sum m s <= budget  while j runs again in slot i: own is what it reads, makes
                                                             and needs for itself; floor the least, and s what is saved
                                                             through all of the slot's bursts

Where plans may offload, ``relaxation.py`` has rows for the links as well.

Known weakness: of a burst only one op at a time counts, beside what is saved and without what is held for later, so
near the least peak the bound stays below what any plan takes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.graph.costs import Costs
from lowtide.graph.memo import memo_of, once_per_graph
from lowtide.graph.step_graph import StepGraph
from lowtide.solvers import tuning
from lowtide.solvers.lower_bound.relaxation import Relaxation
from lowtide.solvers.lower_bound.unavoidable import unavoidable, unavoidable_with_offload
from lowtide.solvers.search_context import SearchContext

MOVES_HOLD_FOR = "every plan that saves, recomputes or moves, whenever it does; what links can carry counts, not when"
HOLDS_FOR = "every plan that saves or recomputes, whatever it replays, when and how often; not for offloading"


@dataclass(frozen=True)
class Bound:
    """What holds for every plan within one budget.

    Attributes:
        step_ms: No plan has a shorter step; infinite where no plan fits.
        ms_per_byte: How much one more byte of budget lowers ``step_ms``: a price for small changes.
    """

    step_ms: float
    ms_per_byte: float


def bound_time(context: SearchContext, budget_bytes: int, capacities: Mapping[str, int | None] | None = None) -> Bound:
    """Return the least step time that any plan within ``budget_bytes`` can have.

    Args:
        capacities: Most bytes that plans may offload, by tier; None: any number.
    """
    # The search asks for it, and the plan that comes of the search.
    costs, memo = context.costs, {} if capacities else memo_of(context.graph)
    key = (bound_time, budget_bytes, costs.op_ms, costs.dispatch_us, costs.record_us, costs.replay_us)
    if key not in memo:
        memo[key] = _bound_time(context, budget_bytes, capacities)
    return memo[key]


def _bound_time(context: SearchContext, budget_bytes: int, capacities: Mapping[str, int | None] | None) -> Bound:
    if context.plain.peak_bytes <= budget_bytes:
        return Bound(context.costs.plain_step_ms, 0.0)
    always = (unavoidable_with_offload if capacities else unavoidable)(context.graph)
    if always.floor_bytes.max() > budget_bytes:
        return Bound(math.inf, 0.0)
    floor_ms, model = context.floor_ms, Relaxation(context, budget_bytes, capacities)
    answer = model.program.relax()
    if not math.isfinite(answer.objective):
        return Bound(floor_ms if math.isnan(answer.objective) else math.inf, 0.0)
    price = -sum(float(answer.duals[row]) for row in model.moments) * model.ms_unit / model.byte_unit
    return Bound(floor_ms + max(answer.objective * (1 - tuning.BOUND_TOLERANCE), 0.0) * model.ms_unit, max(price, 0.0))


@once_per_graph
def bound_peak_with_offload(graph: StepGraph) -> int:
    """Return a peak that no plan stays below, whatever it recomputes or offloads: absolute allocated bytes."""
    return int(unavoidable_with_offload(graph).floor_bytes.max(initial=graph.resident_bytes))


@once_per_graph
def bound_peak(graph: StepGraph) -> int:
    """Return the least peak that any plan can have: absolute allocated bytes."""
    least = int(unavoidable(graph).floor_bytes.max())
    model = Relaxation(SearchContext(graph, Costs((0.0,) * len(graph.ops))), None)
    answer = model.program.relax()
    if not math.isfinite(answer.objective):
        return least
    claimed = answer.objective * (1 - tuning.BOUND_TOLERANCE) * model.byte_unit
    return max(least, graph.start_bytes + math.floor(claimed))
