"""The structure of a step: what is part of it, and what it says of a difference."""

from dataclasses import replace

from support.toy_graphs import chain, decoder

from lowtide.graph.structure import structure_difference, structure_hash


def test_bytes_and_workspaces_are_no_part_of_it():
    small, large = decoder(tokens=8), decoder(tokens=32)
    spacious = replace(large, ops=tuple(replace(op, workspace_bytes=7) for op in large.ops))

    assert structure_hash(small) == structure_hash(spacious)
    assert structure_difference(small, spacious) == ""


def test_the_first_difference_is_named():
    graph = chain(4)
    ops = (*graph.ops[:2], replace(graph.ops[2], name="aten.other.default"), *graph.ops[3:])
    events = (graph.events[1], graph.events[0], *graph.events[2:])

    assert structure_difference(graph, replace(graph, ops=ops)) == (
        "op 2 is aten.other.default (reads [2], makes [3]), not aten.op.default (reads [2], makes [3])"
    )
    assert structure_difference(graph, replace(graph, events=events)) == "event 0 is pack 0, not run 0"
    assert structure_difference(graph, replace(graph, saved=graph.saved[:-1])) == "3 saved tensors, not 4"
    assert structure_difference(graph, replace(graph, ops=graph.ops[:-1])) == "7 ops, not 8"


def test_sizes_of_inputs_are_no_part_of_it_and_their_dtypes_are():
    graph = replace(chain(), calls=("train input_ids=int64[2,48]",))

    assert structure_difference(graph, replace(graph, calls=("train input_ids=int64[3,64]",))) == ""
    assert structure_difference(graph, replace(graph, calls=("train input_ids=int32[2,48]",))) != ""
    assert structure_difference(graph, replace(graph, calls=("eval input_ids=int64[2,48]",))) != ""


def test_what_must_be_saved_is_part_of_it():
    graph = chain()
    storages = (*graph.storages[:1], replace(graph.storages[1], fixed="written in place"), *graph.storages[2:])

    assert structure_difference(graph, replace(graph, storages=storages)).startswith("storage 1 is")
