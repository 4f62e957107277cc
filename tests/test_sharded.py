"""Sharded training on two ranks: bitwise what it is without lowtide, and not one collective more."""

import pytest
import sharded
from ranks import on_every_rank


@pytest.fixture(scope="module")
def trained():
    return on_every_rank(sharded.all_ways)


@pytest.mark.parametrize("way", sharded.WAYS)
def test_fully_sharded_training_is_bitwise_the_same_and_sends_no_more(way, trained):
    for told in trained:
        plain, ours = told[way]
        for what in ("losses", "gradients", "state", "sent"):
            assert ours[what] == plain[what]
        assert ours["equal"] and ours["dropped"] > 0 and ours["mismatched"] == 0 and not ours["warnings"]
        assert ours["measured"] == pytest.approx(ours["predicted"], rel=0.02)
    first, second = (told[way][1] for told in trained)
    assert first["plan"].decisions == second["plan"].decisions
