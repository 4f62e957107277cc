"""Reference counts and live bytes agree at every moment that can be the peak."""

import pytest
from support.toy_graphs import chain

from lowtide.plan import DISK_OFFLOAD, RECOMPUTE, Moves
from lowtide.simulation.simulated_step import SimulatedStep


@pytest.mark.parametrize("fetch_at", [{}, {1: 0}])
@pytest.mark.parametrize("actions", [{}, {1: DISK_OFFLOAD}, {1: DISK_OFFLOAD, 2: RECOMPUTE}])
def test_what_is_alive_adds_up_to_the_live_bytes(actions, fetch_at):
    graph = chain(4, size=8)  # no workspace, no generator state
    moments = []

    def probe(references, live_bytes, replayed_op):
        alive = [s.bytes for s in graph.storages if s.op is not None and references.counts[s.id] > 0]
        alive += [graph.storages[s].bytes for s in references.materialised]
        alive += [] if replayed_op is None else [graph.storages[s].bytes for s in graph.ops[replayed_op].makes]
        moments.append((sum(alive), live_bytes))

    SimulatedStep(graph, actions, {}, Moves(8, fetch_at), probe).play(graph.events)

    fetches_and_replays = len(actions)
    assert len(moments) == len(graph.ops) + fetches_and_replays
    assert [alive for alive, _ in moments] == [live for _, live in moments]
