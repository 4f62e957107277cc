"""The methods that need no solver, by the name under which ``solve`` knows them."""

from __future__ import annotations

from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.every_n import every_n
from lowtide.solvers.full import full
from lowtide.solvers.selective import selective
from lowtide.solvers.sqrt_n import sqrt_n
from lowtide.solvers.structure import close

CLASSICS = ("none", "full", "every_n", "sqrt_n", "selective")


def classic(graph: StepGraph, method: str, n: int | None = None) -> dict[int, str]:
    """Actions of one classic method.

    Raises:
        ValueError: the graph has no repeated layers and the method needs them, or ``n`` makes no sense.
    """
    if method == "none":
        return close(graph, ())
    if method == "every_n":
        return every_n(graph, 2 if n is None else n)
    return {"full": full, "sqrt_n": sqrt_n, "selective": selective}[method](graph)


def classic_actions(graph: StepGraph) -> list[dict[int, str]]:
    """The actions of every classic that applies to ``graph``: starting points and upper bounds for a search."""
    found = []
    for method in CLASSICS:
        try:
            found.append(classic(graph, method))
        except ValueError:  # no layer repeats
            continue
    return found
