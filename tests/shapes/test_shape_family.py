"""Graphs of unseen shapes, to the byte; refused or noticed where they cannot be."""

from dataclasses import replace

import pytest
from support.toy_graphs import chain
from support.watched_shapes import MODELS, decoder_family, decoder_of, watched

from lowtide.graph.step_graph import to_dict
from lowtide.shapes.shape_family import ShapeFamily

LENGTHS = (48, 64, 96)


def family_of(kind, *shapes, padded):
    family = ShapeFamily()
    for shape in shapes:
        family.add(shape, watched(kind, *shape, padded=padded))
    return family


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_fourth_length_follows_exactly_from_three(kind, padded):
    family = family_of(kind, *((2, n) for n in LENGTHS), padded=padded)

    derived = family.derive((2, 160))
    real = watched(kind, 2, 160, padded=padded)

    assert derived.extrapolated
    assert derived.check(real) == ""
    assert derived.graph.calls == real.calls
    assert derived.graph.provenance["batch"] == real.provenance["batch"]
    arguments = [derived.graph.signatures[op.signature] for op in derived.graph.ops]
    assert arguments == [real.signatures[op.signature] for op in real.ops]


def test_the_derived_graph_is_the_real_one_but_for_how_signatures_are_numbered():
    derived = family_of("llama", *((2, n) for n in LENGTHS), padded=False).derive((2, 160)).graph
    real = to_dict(watched("llama", 2, 160, padded=False))
    found = to_dict(derived)

    assert found.keys() == real.keys()
    different = {name for name in real if found[name] != real[name]}
    assert different <= {"signatures", "ops", "provenance"}


def test_a_llama_is_confirmed_by_three_lengths_and_consistent_with_two():
    family = family_of("llama", *((2, n) for n in LENGTHS[:2]), padded=False)
    two = family.derive((2, 160))
    family.add((2, 96), watched("llama", 2, 96, padded=False))
    three = family.derive((2, 160))

    assert not two.confirmed and two.unconfirmed > 0
    assert three.confirmed and three.unconfirmed == 0
    assert two.graph.storages == three.graph.storages
    assert not family.derive((2, 80)).extrapolated


def test_plain_attention_needs_a_fourth_length_to_be_confirmed():
    family = family_of("bert", *((2, n) for n in LENGTHS), padded=False)
    assert not family.derive((2, 160)).confirmed

    family.add((2, 128), watched("bert", 2, 128, padded=False))

    assert family.derive((2, 160)).confirmed


def test_batch_and_length_follow_from_four_shapes():
    family = family_of("llama", (2, 48), (2, 64), (3, 48), (3, 64), padded=True)

    assert family.derive((4, 160)).check(watched("llama", 4, 160, padded=True)) == ""


def test_a_batch_of_one_runs_other_ops_and_is_another_family():
    family = family_of("llama", (2, 48), (2, 64), padded=False)
    alone = watched("llama", 1, 48, padded=False)

    assert family.fits(watched("llama", 3, 48, padded=False))
    assert not family.fits(alone)
    with pytest.raises(ValueError, match=r"the graph of \(1, 48\) is of another family: op \d+ is .* Start a new one"):
        family.add((1, 48), alone)


def test_a_kernel_that_takes_another_workspace_beyond_a_threshold_is_noticed():
    family = family_of("llama", *((2, n) for n in LENGTHS), padded=False)

    derived = family.derive((2, 200))
    difference = derived.check(watched("llama", 2, 200, padded=False))

    assert derived.extrapolated
    assert "the workspace of op" in difference and "attention" in difference


def test_a_real_graph_of_other_ops_is_noticed():
    derived = decoder_family((2, 8), (2, 16), (2, 24)).derive((2, 32))

    assert derived.check(decoder_of(2, 32)) == ""
    assert derived.check(chain()).startswith(
        "op 0 is aten.op.default (reads [0], makes [1]), not aten.embedding.default"
    )


def test_one_wrong_byte_is_noticed():
    derived = decoder_family((2, 8), (2, 16), (2, 24)).derive((2, 32))
    real = decoder_of(2, 32)
    storages = tuple(replace(s, bytes=s.bytes + (s.id == 5)) for s in real.storages)
    ops = tuple(replace(op, workspace_bytes=int(op.id == 7)) for op in real.ops)

    size = real.storages[5].bytes
    assert derived.check(replace(real, storages=storages)).endswith(f"has {size + 1} bytes, not {size}")
    assert "the workspace of op 7" in derived.check(replace(real, ops=ops))
    assert derived.check(replace(real, resident={"parameters": 1001})).endswith("has 1001 bytes, not 1000")


def test_an_unvaried_dimension_has_no_other_value():
    family = decoder_family((2, 8), (2, 16), (2, 24))

    assert family.derive((3, 16)) is None
    assert family.why_not((3, 16)) == "dimension 0 was 2 in every example: watch (3, 16)"
    assert family.why_not((2, 17)) == ""


def test_sizes_that_are_no_polynomials_are_not_derived():
    family = ShapeFamily()
    for length in (6, 7, 8, 9):
        family.add((length,), decoder_of(1, -(-length // 8) * 8))

    assert family.derive((20,)) is None
    assert "bytes in the examples, which leaves open" in family.why_not((20,))


def test_an_empty_family_derives_nothing():
    assert ShapeFamily().derive((2, 8)) is None
    assert ShapeFamily().why_not((2, 8)) == "no shape was watched yet: watch one"


def test_an_example_is_its_own_derivation():
    family = decoder_family((2, 8))

    derived = family.derive((2, 8))

    assert derived.confirmed and derived.graph is family.examples[0].graph


def test_other_sizes_at_the_same_dimensions_are_refused():
    family = decoder_family((2, 8), (2, 16))

    family.add((2, 16), decoder_of(2, 16))
    assert len(family.examples) == 2
    with pytest.raises(ValueError, match=r"two graphs of \(2, 16\) differ: .* Sizes depend on more"):
        family.add((2, 16), decoder_of(2, 17))
    with pytest.raises(ValueError, match=r"dimensions=\(16,\) are 1, the family has 2"):
        family.derive((16,))


def test_what_others_hold_on_the_device_is_neither_derived_nor_compared():
    family = ShapeFamily()
    for length, other in ((8, 70), (16, 50), (24, 10)):
        family.add((length,), replace(decoder_of(1, length), resident={"parameters": 1000, "other": other}))

    derived = family.derive((32,))

    assert derived.graph.resident == {"parameters": 1000, "other": 70}
    assert derived.check(replace(decoder_of(1, 32), resident={"parameters": 1000, "other": 3})) == ""
