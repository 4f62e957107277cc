"""Random small step graphs, their costs, and a link of a given speed: what the laws of solvers are tried on."""

from dataclasses import replace

from hypothesis import strategies as st
from support.toy_graphs import Step, decoder, decoder_costs

from lowtide.graph.costs import DISK, Costs, Link


@st.composite
def small_graphs(draw, most_ops=5):
    """Up to six storages made in forward, with siblings, shared inputs, in-place writes, random ops, workspace."""
    step = Step(resident=draw(st.sampled_from([0, 5])))
    parameter = step.parameter()
    made, left = [], 6
    for _ in range(draw(st.integers(2, most_ops))):
        count = max(min(draw(st.sampled_from([1, 1, 1, 2])), left), 1)
        left -= count
        reads = draw(st.lists(st.sampled_from(made[-4:]), unique=True, min_size=1, max_size=2)) if made else [parameter]
        stored = draw(st.lists(st.booleans(), min_size=len(reads) + count, max_size=len(reads) + count))
        outputs = step.op(
            *reads,
            makes=tuple(draw(st.integers(1, 12)) for _ in range(count)),
            saves=lambda out, reads=reads, stored=stored: [s for s, yes in zip((*reads, *out), stored) if yes],
            fixed=draw(st.sampled_from(["", "", "", "", "written in place"])),
            workspace=draw(st.sampled_from([0, 0, 3])),
            rng=draw(st.sampled_from([0, 0, 2])),
        )
        made += [outputs] if count == 1 else list(outputs)
    return step.graph(keep_output=draw(st.booleans()), backward_workspace=draw(st.sampled_from([0, 4])))


@st.composite
def small_cases(draw):
    graph = draw(small_graphs())
    most = draw(st.sampled_from([2, 9]))  # few values make ties, which the lower peak has to break
    op_ms = tuple(float(draw(st.integers(1, most))) for _ in graph.ops)
    return graph, Costs(op_ms=op_ms, dispatch_us=draw(st.sampled_from([0.0, 1000.0])))


def linked_decoder(speed, layers=2, latency_ms=0.0):
    """A decoder, and a link that could carry all it stores to and fro ``speed`` times in a step."""
    graph = decoder(layers=layers)
    costs = decoder_costs(graph)
    stored = sum(graph.storages[s].bytes for s in graph.stored)
    rate = 2 * speed * stored / costs.plain_step_ms * 1e3
    return graph, replace(costs, links={DISK: Link(rate, rate, latency_ms)})
