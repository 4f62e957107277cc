"""What is written during backward: an op may be replayed as long as what it reads has not been written yet.

An optimizer that steps inside backward (LOMO, https://arxiv.org/abs/2306.09782; ``register_post_accumulate_grad_hook``)
writes each weight once its gradient is complete. By then backward has asked for all that was made with it.
"""

from collections import defaultdict

from lowtide.graph.facts import step_facts
from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import StepGraph


@once_per_graph
def ops_written_under(graph: StepGraph) -> frozenset[int]:
    """Forward ops that a replay might run after something has written what they read.

    A replay runs when backward unpacks what the op makes, or what is made of that. The last of these moments counts,
    whatever a plan recomputes.
    """
    facts = step_facts(graph)
    written: dict[int, list[int]] = defaultdict(list)  # storage from before the step -> events
    for op in graph.ops:
        for storage in op.writes:
            if graph.storages[storage].op is None and not graph.storages[storage].fixed:
                written[storage].append(facts.run_event[op.id])
    if not written:
        return frozenset()
    last_unpack: dict[int, int] = {}
    for number, spans in facts.unpack_spans.items():
        storage = graph.saved[number]
        last_unpack[storage] = max([last_unpack.get(storage, -1), *(first for first, _ in spans)])
    last_replay: dict[int, int] = {}
    found = set()
    for op in reversed(graph.forward_ops):
        moments = [last_unpack.get(s, -1) for s in op.makes]
        moments += [last_replay.get(reader, -1) for s in op.makes for reader in facts.readers.get(s, ())]
        last_replay[op.id] = last = max(moments, default=-1)
        if any(facts.run_event[op.id] < at < last for s in op.reads for at in written.get(s, ())):
            found.add(op.id)
    return frozenset(found)
