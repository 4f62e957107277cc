"""The joint graph of a captured layer, traced once: it is the same whatever is saved of it.

AOTAutograd traces forward and backward for each compilation, three seconds for eight layers in one graph. Here the
first compilation traces, and later ones get a copy of what that found.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import fx
from torch._functorch import config
from torch._functorch._aot_autograd import graph_compile


@dataclass(frozen=True)
class _Traced:
    """What tracing gave; ``noted``: what it wrote into the metadata of the forward."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    descriptions: tuple[Any, ...]
    noted: dict[str, Any]


class JointTrace:
    """Of one captured graph."""

    def __init__(self) -> None:
        self._traced: _Traced | None = None

    @contextmanager
    def reused(self) -> Iterator[None]:
        """Inside, the graph is compiled once."""
        trace = graph_compile.aot_dispatch_autograd_graph
        known = self._traced

        def traced(*args: Any, fw_metadata: Any, **options: Any) -> tuple[Any, ...]:
            if known is not None:
                vars(fw_metadata).update(known.noted)
                return _copy(known.module), _lists(known.inputs), _lists(known.descriptions), None
            before = dict(vars(fw_metadata))
            module, inputs, descriptions, of_subclasses = trace(*args, fw_metadata=fw_metadata, **options)
            # With numbered random states the trace moves a counter, and subclasses are described by what it notes.
            if of_subclasses is None and not config.functionalize_rng_ops:
                noted = {name: value for name, value in vars(fw_metadata).items() if before.get(name) is not value}
                # Later stages change the graph that they get.
                self._traced = _Traced(_copy(module), _lists(inputs), _lists(descriptions), noted)
            return module, inputs, descriptions, of_subclasses

        with patch.object(graph_compile, "aot_dispatch_autograd_graph", traced):
            yield


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """Nodes are new, and have the same names; constants are shared."""
    graph, old = fx.Graph(), module.graph
    outputs = graph.graph_copy(old, {})
    graph.output(outputs).meta = copy.copy(old.output_node().meta)
    graph.set_codegen(old._codegen)
    made = fx.GraphModule(module, graph)
    made.meta.update(module.meta)
    return made


def _lists(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(list(part) for part in parts)
