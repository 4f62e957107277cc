"""The error for a budget that no plan fits: what would do, what is proven, and which op needs most memory."""

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.lower_bound.bound import bound_peak, bound_peak_with_offload
from lowtide.solvers.peak_report import bottleneck
from lowtide.units import format_bytes


def infeasible_error(
    graph: StepGraph, costs: Costs, budget_bytes: int, least: Candidate, *, method: str, offload: bool = False
) -> BudgetInfeasibleError:
    """The error for a budget below the peak of ``least``, the candidate with the least peak that the method found.

    Args:
        offload: Whether the method may offload storages: then the bound for plans that offload nothing is not quoted.
    """
    timeline = simulate_actions(graph, costs, least.actions, least.replays, least.moves)
    need = format_bytes(timeline.peak_bytes)
    asked, found = format_bytes(budget_bytes), f"{need} ({timeline.peak_bytes} bytes)"
    lines = [f"no plan fits budget={asked}: method={method!r} needs at least {found}."]
    proven = 0 if method != "exact" else bound_peak(graph) if not offload else bound_peak_with_offload(graph)
    if method == "exact" and offload:
        lines = [f"no plan found fits budget={asked}: the leanest, other tiers used, needs {found}."]
        if proven > budget_bytes:
            floor = f"{format_bytes(proven)} ({proven} bytes)"
            lines = [f"no plan fits budget={asked}, other tiers used: every plan needs at least {floor}.",
                     f"The leanest found needs {found}."]  # fmt: skip
    elif method == "exact":
        floor = f"{format_bytes(proven)} ({proven} bytes)"
        if proven == timeline.peak_bytes:
            lines = [f"no plan fits budget={asked}: every plan needs at least {found}."]
        elif proven > budget_bytes:
            lines = [f"no plan fits budget={asked}: every plan needs at least {floor}, the leanest found {found}."]
        else:
            lines = [f"no plan found fits budget={asked}: the leanest needs {found}, none less than {floor}."]
    rows = [(part, format_bytes(count)) for part, count in graph.resident.items() if count]
    rows.append(("bottleneck", bottleneck(graph, least, timeline)))
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name:<{width}}  {value}" for name, value in rows]
    other = "reduce the batch" if method == "exact" else 'use method="exact"'
    lines.append(f"Raise the budget to {timeline.peak_bytes} bytes or more, or {other}.")
    return BudgetInfeasibleError(
        "\n".join(lines), budget_bytes=budget_bytes, least_bytes=timeline.peak_bytes, proven_bytes=proven
    )
