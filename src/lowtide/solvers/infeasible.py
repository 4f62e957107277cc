"""The error for a budget that no plan fits: what would do, what is proven, and which op needs most memory."""

from collections.abc import Callable

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.lower_bound.bound import bound_peak, bound_peak_with_offload
from lowtide.solvers.peak_report import bottleneck, inside_compiled_code, modules_at_peak
from lowtide.solvers.search_context import SearchContext
from lowtide.units import format_bytes

_MOST_MODULES = 4


def residents_error(
    graph: StepGraph, budget_bytes: int, search: Callable[[], BudgetInfeasibleError]
) -> BudgetInfeasibleError:
    """The error for a budget below what lives through the whole step, which no plan changes: nothing is searched.

    Args:
        search: Gives the error of a search, whose amounts are those of this one, once somebody asks for them.
    """

    def searched() -> tuple[int, int]:
        error = search()
        return error.least_bytes, error.proven_bytes

    rows = [(part, format_bytes(count)) for part, count in graph.resident.items() if count]
    width = max(len(name) for name, _ in rows)
    lines = [
        f"no plan fits budget={format_bytes(budget_bytes)}: {_both(graph.resident_bytes)} live through the whole step"
        f"{'' if graph.start_bytes == graph.resident_bytes else ', or are gradients that are there at its end'}."
    ]
    lines += [f"  {name:<{width}}  {value}" for name, value in rows]
    lines.append("Raise the budget, keep fewer bytes for each parameter, or shard the model.")
    return BudgetInfeasibleError("\n".join(lines), budget_bytes=budget_bytes, searched=searched)


def infeasible_error(
    context: SearchContext,
    budget_bytes: int,
    least: Candidate,
    *,
    method: str,
    offload: bool = False,
    way_out: str = "",
) -> BudgetInfeasibleError:
    """The error for a budget below the peak of ``least``, the candidate with the least peak that the method found.

    Args:
        offload: Whether the method may offload storages: then the bound for plans that offload nothing is not quoted.
        way_out: What to do besides raising the budget; by default to reduce the batch, or to use ``exact``.
    """
    graph, timeline = context.graph, context.simulated(least).timeline
    asked, found = format_bytes(budget_bytes), _both(timeline.peak_bytes)
    proven = 0 if method != "exact" else bound_peak_with_offload(graph) if offload else bound_peak(graph)
    lines = [f"no plan fits budget={asked}: method={method!r} needs at least {found}."]
    if method == "exact" and offload:
        lines = [f"no plan found fits budget={asked}: the leanest, other tiers used, needs {found}."]
        if proven > budget_bytes:
            lines = [f"no plan fits budget={asked}, other tiers used: every plan needs at least {_both(proven)}.",
                     f"The leanest found needs {found}."]  # fmt: skip
    elif method == "exact":
        lines = [f"no plan found fits budget={asked}: the leanest needs {found}, none less than {_both(proven)}."]
        if proven > budget_bytes:
            leanest = "" if proven == timeline.peak_bytes else f", the leanest found {found}"
            lines = [f"no plan fits budget={asked}: every plan needs at least {_both(proven)}{leanest}."]
    rows = [(part, format_bytes(count)) for part, count in graph.resident.items() if count]
    rows.append(("bottleneck", bottleneck(graph, least, timeline)))
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name:<{width}}  {value}" for name, value in rows]
    held = list(modules_at_peak(graph, least, timeline).items())[:_MOST_MODULES]
    lines += ["What the leanest holds besides at its peak:"] if held else []
    lines += [f"  {format_bytes(size):>11}  {module}" for module, size in held]
    other = way_out or ("reduce the batch" if method == "exact" else 'use method="exact"')
    inside = inside_compiled_code(graph, least, timeline, budget_bytes)
    lines.append(f"Raise the budget to {timeline.peak_bytes} bytes or more, or {other}.{inside}")
    return BudgetInfeasibleError(
        "\n".join(lines), budget_bytes=budget_bytes, least_bytes=timeline.peak_bytes, proven_bytes=proven
    )


def _both(count: int) -> str:
    return f"{format_bytes(count)} ({count} bytes)"
