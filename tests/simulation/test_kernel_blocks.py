"""Blocks of kernels as CUDA's allocator recorded them, and the workspaces that come with the first products."""

import math
from dataclasses import replace

import pytest
from support.case_graphs import load_case

from lowtide.graph.gradients import with_gradients_made
from lowtide.graph.products import is_product
from lowtide.graph.step_graph import NEW_GRADIENT
from lowtide.plan import Moves
from lowtide.simulation.allocator_peaks import allocator_peaks, training_peaks
from lowtide.simulation.block_log import block_log
from lowtide.simulation.kernel_blocks import output_order, temporaries

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "outputs", "blocks"),  # as recorded, in MiB but for the small ones
    [
        ("aten.sum.dim_IntList", [512], [8 * MIB, 512]),
        ("aten.sum.dim_IntList", [4096], [65536000, 512]),  # no whole MiB
        ("aten._scaled_dot_product_flash_attention_backward.default", 3 * [2 * MIB], [131072, 4 * MIB]),
        (
            "aten._scaled_dot_product_flash_attention_backward.default",
            [2 * MIB, MIB, MIB],
            [131072, 4 * MIB, 2 * MIB, 2 * MIB, 2 * MIB],
        ),
        ("aten._scaled_dot_product_efficient_attention_backward.default", 3 * [4 * MIB], [139264, 8 * MIB]),
        ("aten.sort.default", [131072, 131072], [414208]),  # small ones are one
        ("aten.bmm.default", [512], [3 * MIB + 512]),
    ],
)
def test_temporaries_are_cut_as_the_allocator_recorded_them(name, outputs, blocks):
    assert list(temporaries(name, sum(blocks), outputs)) == blocks


SWIN = [128, 64, 16, 16]  # windows and samples, heads, tokens, width


@pytest.mark.parametrize(
    ("query", "key", "blocks"),
    [
        (SWIN, SWIN, [524288, 134348800]),  # sums of 64 x 64 numbers for 16 tokens of 16 numbers
        ([32, 4, 256, 32], [32, 2, 256, 32], [131072, 8396800, 4 * MIB, 4 * MIB]),  # two heads share keys
        ([2, 1, 64, 256], [2, 1, 64, 256], [512, MIB + 512]),
    ],
)
def test_efficient_attention_takes_its_sums_as_one_block(query, key, blocks):
    """In float32, as the allocator recorded them."""
    outputs = [4 * math.prod(query), 4 * math.prod(key), 4 * math.prod(key)]
    name = "aten._scaled_dot_product_efficient_attention_backward.default"

    assert list(temporaries(name, sum(blocks), outputs, [query, query, key, key])) == blocks


def test_outputs_come_in_the_order_in_which_kernels_ask_for_them():
    assert list(output_order("aten.native_dropout.default", 2)) == [1, 0]
    assert list(output_order("aten.mm.default", 1)) == [0]


def test_a_threads_first_product_takes_its_workspace_and_no_step_gives_it_back():
    graph, _ = load_case("toy")
    first = next(op for op in graph.ops if is_product(op.name))
    log = block_log(graph, {}, {}, Moves(), workspaces=2000)

    kept = [(number, size) for number, size in log if number < 0]
    assert [size for _, size in kept] == [1000, 1000]  # forward's and backward's, and neither is freed
    before = [size for _, size in log[: log.index(kept[0])] if size]
    assert before[-1] == graph.storages[first.makes[-1]].bytes
    others = [size for number, size in log if number > 0]
    assert others == [size for _, size in block_log(graph, {}, {}, Moves())]


def test_temporaries_of_the_optimizer_are_reserved_and_no_part_of_what_is_counted():
    graph, _ = load_case("toy")
    graph = replace(graph, device="standin", optimizer_step_bytes=200 * MIB)
    plain = replace(graph, optimizer_step_bytes=0)

    with_step, without = (allocator_peaks(g, {}, {}, Moves(), expandable_segments=False) for g in (graph, plain))

    assert with_step.counted_bytes == without.counted_bytes
    assert with_step.reserved_bytes > without.reserved_bytes
    trained = training_peaks(graph, {}, {}, Moves(), expandable_segments=False)
    assert trained.counted_bytes >= 200 * MIB


def test_gradients_are_there_while_the_optimizer_takes_its_temporaries():
    graph, _ = load_case("decoder8_512")
    temporaries_bytes = 2000 * MIB  # more than all that backward frees
    graph = with_gradients_made(replace(graph, device="standin", optimizer_step_bytes=temporaries_bytes))
    gradients = sum(s.bytes for s in graph.storages if s.kind == NEW_GRADIENT)

    peaks = allocator_peaks(graph, {}, {}, Moves(), expandable_segments=False)

    assert peaks.reserved_bytes >= graph.start_bytes + gradients + temporaries_bytes
