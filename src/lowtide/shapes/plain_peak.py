"""The plain step's peak for any sizes, from one run of the judge.

Which storages live at an event follows from a graph's structure alone. So the bytes at an event are a sum of sizes,
each so many times, and the judge counts how often: it replays the step once with sizes that are powers of two so far
apart that their sums can be read as counts.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.simulation.simulator import simulate_actions

_COUNT_BYTES = 4  # of one count: as many storages


class PlainPeak:
    """Peaks of the plain step of one structure.

    Args:
        class_of: A number for each storage and then for each op's workspace: equal ones always have equal sizes.
            More entries may follow.
    """

    def __init__(self, graph: StepGraph, class_of: Sequence[int]) -> None:
        num_storages, num_classes = len(graph.storages), max(class_of) + 1
        units = [1 << (8 * _COUNT_BYTES * number) for number in class_of]
        counting = replace(
            graph,
            resident={},
            storages=tuple(replace(s, bytes=unit) for s, unit in zip(graph.storages, units)),
            ops=tuple(replace(op, workspace_bytes=unit) for op, unit in zip(graph.ops, units[num_storages:])),
        )
        timeline = simulate_actions(counting, Costs(op_ms=(0.0,) * len(graph.ops)), {})
        found = {n.to_bytes(_COUNT_BYTES * num_classes, "little") for n in set(timeline.event_peak_bytes)}
        self._counts = np.frombuffer(b"".join(found), dtype="<u4").reshape(len(found), num_classes)

    def peak_bytes(self, size_of_class: Sequence[int]) -> int:
        """The peak beside what is there before the step."""
        return int((self._counts @ np.asarray(size_of_class, dtype=np.int64)).max())
