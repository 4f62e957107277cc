"""How long collectives take: by bytes, ranks and machines."""

import pytest

from lowtide.estimation.device_table import device_named
from lowtide.pretending.links import Links, links_of

LINKS = Links(ring=300e9, all_reduce=450e9, network=50e9)


def us(kind, size, ranks=8, nodes=1, **options):
    return LINKS.collective_us(kind, size, ranks, nodes, **options)


def test_a_lone_rank_sends_nothing():
    assert us("all_reduce", 1 << 30, ranks=1) == 0


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_gathering_sends_the_parts_of_all_other_ranks(kind):
    latency = us(kind, 0)

    assert us(kind, 10**9) - latency == pytest.approx(7 * 10**9 / 300e9 * 1e6)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    assert us("all_reduce", 8 * 10**9) - us("all_reduce", 0) == pytest.approx(2 * 7 * 10**9 / 450e9 * 1e6)


def test_between_machines_the_adapters_of_all_their_devices_are_used_up_to_the_ring():
    two = us("all_gather", 10**8, ranks=16, nodes=2) - us("all_gather", 0, ranks=16, nodes=2)
    alone = us("all_gather", 10**8, ranks=2, nodes=2) - us("all_gather", 0, ranks=2, nodes=2)

    assert two == pytest.approx(15 * 10**8 / 300e9 * 1e6)  # eight adapters of 50 GB/s are more than the ring
    assert alone == pytest.approx(10**8 / 50e9 * 1e6)


def test_calls_that_go_as_one_have_one_latency():
    assert us("send", 10**6) > us("send", 10**6, has_begun=True) == pytest.approx(10**6 / 300e9 * 1e6)


def test_more_machines_never_make_it_faster():
    times = [us("all_reduce", 10**8, ranks=8 * nodes, nodes=nodes) for nodes in (1, 2, 4, 16)]

    assert times == sorted(times)


def test_a_device_has_the_links_of_the_table_and_the_network_that_is_told():
    h100 = device_named("h100")

    assert links_of(h100).ring < h100.peer_link_bytes_per_s
    assert links_of(h100, 100e9).network == pytest.approx(0.9 * 100e9 / 8)
    assert links_of(h100, 100e9).network < links_of(h100).network
    assert links_of(device_named("l4")).ring < links_of(h100).ring / 5
