"""What the planner is asked and what it answers, as plain data and as one line of JSON each. Never pickle."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.errors import BudgetInfeasibleError, LowtideError, PlannerFailedError
from lowtide.graph.costs import Costs
from lowtide.graph.json_format import costs_from_dict, costs_to_dict, from_dict
from lowtide.graph.step_graph import StepGraph, to_dict
from lowtide.plan import Plan


@dataclass(frozen=True)
class PlanRequest:
    """What ``lowtide.solve`` is called with.

    Attributes:
        budget: Absolute peak bytes, ``"6GiB"``, or ``"40%"`` of the plain step's activation memory; None where the
            method needs none.
        offload: Tier -> the most of it that a plan may use (bytes, ``"20GiB"``, or None: any amount).
        options: The other keyword arguments of ``solve``: ``n``, ``ratio``, ``time_limit_s``, ``node_limit``, ``gap``,
            ``budget_kind``.
        cache_dir: Directory that finished plans are kept in, such as ``PlanCache().directory``; None: they are not.
    """

    graph: StepGraph
    costs: Costs
    budget: int | str | None
    method: str = "exact"
    offload: Mapping[str, int | str | None] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: Path | None = None

    def to_json(self) -> str:
        """Raises: TypeError: an option is of a type that JSON does not have."""
        return json.dumps(
            {
                "graph": to_dict(self.graph),
                "costs": costs_to_dict(self.costs),
                "budget": self.budget,
                "method": self.method,
                "offload": dict(self.offload),
                "options": dict(self.options),
                "cache_dir": None if self.cache_dir is None else str(self.cache_dir),
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str | bytes) -> "PlanRequest":
        """Reads what ``to_json`` wrote. Raises: GraphFormatError: graph or costs are damaged."""
        body = json.loads(text)
        graph, costs = from_dict(body.pop("graph")), costs_from_dict(body.pop("costs"))
        cache_dir = body.pop("cache_dir")
        return PlanRequest(graph, costs, cache_dir=None if cache_dir is None else Path(cache_dir), **body)


@dataclass(frozen=True)
class Answer:
    """A plan, or why there is none.

    Attributes:
        final: No other answer to the request follows.
        cached: The plan comes from the cache.
        reason: What the user should know besides, one line; "" if there is nothing.
    """

    result: Plan | LowtideError
    final: bool = True
    cached: bool = False
    reason: str = ""

    def to_json(self) -> str:
        body: dict[str, Any] = {"final": self.final, "cached": self.cached, "reason": self.reason}
        match self.result:
            case Plan() as plan:
                body["plan"] = plan.to_json()
            case BudgetInfeasibleError() as error:
                body["infeasible"] = [str(error), error.budget_bytes, error.least_bytes, error.proven_bytes]
            case error:
                body["failed"] = str(error)
        return json.dumps(body, separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> "Answer":
        """Reads what ``to_json`` wrote.

        Raises:
            ValueError, TypeError, KeyError: this is no answer. (``GraphFormatError`` is a ``ValueError``.)
        """
        body = json.loads(text)
        result: Plan | LowtideError
        if "plan" in body:
            result = Plan.from_json(body.pop("plan"))
        elif "infeasible" in body:
            message, budget, least, proven = body.pop("infeasible")
            result = BudgetInfeasibleError(message, budget_bytes=budget, least_bytes=least, proven_bytes=proven)
        else:
            result = PlannerFailedError(body.pop("failed"))
        return Answer(result, **body)
