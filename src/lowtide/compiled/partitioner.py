"""PyTorch's partitioner with a given set of forward values to save; the rest of its work is unchanged."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import fx
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from lowtide.compiled import collectives
from lowtide.errors import PlanMismatchError

Seen = Callable[[fx.Graph, Any, list[fx.Node], int], None]
_MEMORY_BUDGETS = tuple(tenths / 10 for tenths in range(1, 10))


class PlannedPartitioner(CustomPartitionerFn):
    """Partitions a joint graph so that exactly the named values are saved; without names as PyTorch does by itself.

    PyTorch's cache of compiled code asks for ``uuid()``: it holds all that the result depends on, or one plan's code
    would be handed to another process that has another plan.

    Args:
        saved: Names of forward nodes; None: PyTorch's own choice.
        seen: Told of the graph, its classification, the values chosen and how many the layer returns, before the graph
            is split. It is no part of the identity.
    """

    def __init__(self, saved: Sequence[str] | None, seen: Seen | None = None) -> None:
        self.saved = None if saved is None else tuple(sorted(saved))
        self._seen = seen

    def __getstate__(self) -> dict[str, Any]:
        return {"saved": self.saved, "_seen": None}  # the cache's key pickles the configuration

    def uuid(self) -> str:
        return "lowtide-" + hashlib.sha256(repr(("saved", self.saved)).encode()).hexdigest()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        choose = partitioners.choose_saved_values_set

        def chosen(graph: fx.Graph, info: Any, memory_budget: float = 1) -> list[fx.Node]:
            values = choose(graph, info, memory_budget) if self.saved is None else self._named(graph)
            if self._seen is not None:
                self._seen(graph, info, values, int(options["num_fwd_outputs"]))
            return values

        with patch.object(partitioners, "choose_saved_values_set", chosen):
            forward, backward = partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **options)
        if self.saved is not None:
            self._check_random(forward, backward)
            self._check_sent(forward, backward)
        return forward, backward

    def _named(self, graph: fx.Graph) -> list[fx.Node]:
        assert self.saved is not None
        by_name = {node.name: node for node in graph.nodes}
        missing = [name for name in self.saved if name not in by_name]
        if missing:
            raise PlanMismatchError(
                f"the plan saves {', '.join(missing[:3])}, which the compiled layer does not have. Plan it again: "
                "the layer, PyTorch or its settings have changed."
            )
        inputs = [n for n in graph.nodes if n.op == "placeholder" and "tangents" not in str(n.target)]
        return inputs + [by_name[name] for name in self.saved]

    @staticmethod
    def _check_random(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """A draw from the generator that backward makes again would be another draw."""
        drawn = {node.name for node in forward.graph.nodes if draws(node)}
        again = [node.name for node in backward.graph.nodes if node.name in drawn and draws(node)]
        if again:
            raise PlanMismatchError(f"backward would draw {', '.join(again)} anew. Save them.")

    @staticmethod
    def _check_sent(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """No gather more than without a plan."""
        again = sorted({*collectives.sent_by(forward.graph)} & {*collectives.sent_by(backward.graph)})
        if again:
            raise PlanMismatchError(f"backward would send {', '.join(again)} anew. Save what it gives.")


class ChoicesFoundError(Exception):
    """Raised in place of a partition: nothing more is wanted."""


class BudgetedChoices(CustomPartitionerFn):
    """What PyTorch saves under each ``torch._functorch.config.activation_memory_budget``.

    Attributes:
        found: Nodes of the joint graph, inputs among them.
    """

    def __init__(self) -> None:
        self.found: list[list[fx.Node]] = []

    def uuid(self) -> str:
        return "lowtide-choices"

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> NoReturn:
        choose = partitioners.choose_saved_values_set

        def noted(graph: fx.Graph, info: Any, memory_budget: float = 1) -> NoReturn:
            for budget in _MEMORY_BUDGETS:
                self.found.append(choose(graph, info, budget))
            raise ChoicesFoundError

        with patch.object(partitioners, "choose_saved_values_set", noted):
            partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **options)
        raise ChoicesFoundError


def draws(node: fx.Node) -> bool:
    """Whether ``node`` takes numbers from a generator. Attention does where it has dropout."""
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return _argument(node, "dropout_p") != 0.0


def _argument(node: fx.Node, name: str) -> object:
    """What ``node`` is given as its argument ``name``; None where it has none."""
    arguments = node.target._schema.arguments
    place = next((i for i, argument in enumerate(arguments) if argument.name == name), None)
    if place is None:
        return None
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, arguments[place].default_value)
