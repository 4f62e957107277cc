"""Times of a derived graph's ops."""

from dataclasses import replace

import pytest
from support.toy_graphs import decoder_costs, unit_costs
from support.watched_shapes import decoder_family, decoder_of, watched

from lowtide.shapes.derived_costs import interpolated_costs
from lowtide.shapes.shape_family import ShapeFamily


def test_times_proportional_to_bytes_are_found():
    small, large, asked = decoder_of(1, 16), decoder_of(1, 64), decoder_of(1, 32)
    bare = [replace(decoder_costs(g), op_ms=tuple(_moved(g))) for g in (small, large, asked)]

    for known in ([(small, bare[0])], [(small, bare[0]), (large, bare[1])]):
        found = interpolated_costs(known, asked)
        assert found.op_ms == pytest.approx(bare[2].op_ms)
        assert found.source == "interpolated" and found.dispatch_us == bare[0].dispatch_us


def _moved(graph):
    """Bytes of each op's storages; one of what makes nothing, as views do."""
    return [sum(graph.storages[s].bytes for s in {*op.reads, *op.makes}) if op.makes else 1 for op in graph.ops]


def test_the_nearer_example_counts_more():
    graphs = [decoder_of(1, n) for n in (16, 64)]
    costs = [unit_costs(graphs[0]), replace(unit_costs(graphs[1]), op_ms=(4.4,) * len(graphs[1].ops))]

    near_small, near_large = (interpolated_costs(list(zip(graphs, costs)), decoder_of(1, n)) for n in (20, 50))

    op = next(op for op in graphs[0].ops if op.makes and all(graphs[0].storages[s].bytes > 8 for s in op.makes)).id
    small_bytes, large_bytes = (_moved(g)[op] for g in graphs)
    for found, length, lower, upper in ((near_small, 20, 0.0, 0.5), (near_large, 50, 0.5, 1.0)):
        scaled = [1.0 * _moved(decoder_of(1, length))[op] / small_bytes,
                  4.4 * _moved(decoder_of(1, length))[op] / large_bytes]  # fmt: skip
        share = (found.op_ms[op] - scaled[0]) / (scaled[1] - scaled[0])
        assert lower < share < upper


def test_a_view_takes_the_same_time_at_every_length():
    small, large = (watched("llama", 2, n, padded=False) for n in (48, 96))
    views = [op.id for op in small.ops if not op.makes and not op.writes]

    found = interpolated_costs([(small, unit_costs(small))], large)

    assert views and all(found.op_ms[op] == 1.0 for op in views)
    assert any(ms > 1.0 for ms in found.op_ms)


def test_a_family_has_costs_where_every_example_has():
    family = decoder_family((1, 8), (1, 16))
    assert len(family.derive((1, 12)).costs.op_ms) == len(decoder_of(1, 12).ops)

    family.add((1, 24), decoder_of(1, 24))

    assert family.derive((1, 12)).costs is None
    assert ShapeFamily().derive((1, 12)) is None
