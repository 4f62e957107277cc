"""What follows from a few watched steps, and what no longer does once it was wrong."""

from dataclasses import replace

import pytest
from support.toy_graphs import decoder_costs
from support.watched_shapes import decoder_of

from lowtide.shapes.call_shapes import CallShape
from lowtide.shapes.shape_statistics import ShapeStatistics


def shape_of(batch, length):
    return CallShape("ids=int64[2]", (batch, length))


def note(statistics, batch, length, graph=None):
    graph = graph or decoder_of(batch, length)
    return statistics.note((shape_of(batch, length),), graph, decoder_costs(graph))


def other_sizes(graph):
    return replace(graph, storages=tuple(replace(s, bytes=s.bytes + 8) for s in graph.storages))


@pytest.fixture
def statistics():
    found = ShapeStatistics()
    for length in (8, 16, 24):
        assert note(found, 4, length) == ""
    return found


def test_the_graph_of_another_length_is_that_of_its_own_step(statistics):
    shapes, derived = statistics.derive(shape_of(4, 12))

    assert shapes == (shape_of(4, 12),)
    assert derived.check(decoder_of(4, 12)) == ""
    assert not statistics.knows(shape_of(3, 12))


def test_a_mistake_between_the_examples_ends_deriving(statistics):
    assert "sizes" in note(statistics, 4, 20, other_sizes(decoder_of(4, 20)))

    assert not statistics.knows(shape_of(4, 12)) and not statistics.wants(shape_of(4, 12))


@pytest.mark.parametrize("other", [decoder_of(4, 40, layers=2), other_sizes(decoder_of(4, 40))], ids=["ops", "sizes"])
def test_a_mistake_beyond_the_examples_ends_deriving_there(statistics, other):
    assert statistics.knows(shape_of(4, 48))

    assert note(statistics, 4, 40, other) != ""

    assert statistics.knows(shape_of(4, 12))
    assert not statistics.knows(shape_of(4, 48))


def test_what_has_changed_is_forgotten(statistics):
    statistics.forget(shape_of(4, 8))

    assert not statistics.knows(shape_of(4, 12))


def test_a_last_batch_with_fewer_rows_does_not_spoil_what_is_known():
    statistics = ShapeStatistics()
    for batch, length in ((4, 8), (4, 16), (4, 24), (3, 10)):
        note(statistics, batch, length, other_sizes(decoder_of(batch, length)))

    assert statistics.knows(shape_of(4, 9))


def test_a_kernel_that_takes_another_workspace_below_some_length_does_not_spoil_what_is_known():
    statistics = ShapeStatistics()
    short = decoder_of(4, 2)
    note(statistics, 4, 2, replace(short, ops=tuple(replace(op, workspace_bytes=1000) for op in short.ops)))
    for length in (8, 16, 24):
        note(statistics, 4, length)

    assert statistics.knows(shape_of(4, 12)) and not statistics.knows(shape_of(4, 3))


def test_later_calls_have_the_sizes_that_follow_from_the_first():
    statistics = ShapeStatistics()
    for length in (8, 16, 24):
        graph = decoder_of(4, length)
        statistics.note((shape_of(4, length), shape_of(2, length)), graph, decoder_costs(graph))

    assert statistics.derive(shape_of(4, 12))[0] == (shape_of(4, 12), shape_of(2, 12))


def test_later_calls_that_do_not_follow_leave_nothing_known():
    statistics = ShapeStatistics()
    for length, other in ((8, 5), (16, 9), (24, 6)):
        graph = decoder_of(4, length)
        statistics.note((shape_of(4, length), shape_of(2, other)), graph, decoder_costs(graph))

    assert not statistics.knows(shape_of(4, 12))
