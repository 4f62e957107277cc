"""Watched fits at ten capacities of a device: each step finishes, or its error says by name what was held."""

import gc
import sys

import pytest
import torch
import transformers

import lowtide
from lowtide.device.packing import lay_together

MIB = 2**20
PLENTY_MIB = 81079
LEAST_MIB = 130  # of those below: what has to be there at once takes 118, and what lies between blocks the rest
CAPACITIES_MIB = (220, 200, 185, 170, 155, 140, 130, 120, 105, 90)  # the plain step takes 182 and reserves more


@pytest.fixture
def set_capacity(cuda):
    """``cuda_standin.set_capacity``, or of its prototype; afterwards there is plenty again."""
    package = sys.modules.get("cuda_standin") or sys.modules.get("standin_cuda")
    if package is None:
        pytest.skip("the capacity of a GPU is what it is")
    yield package.set_capacity
    package.set_capacity(PLENTY_MIB)


def llama_and_batch():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, intermediate_size=688,
        vocab_size=1000, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda().train()
    ids = torch.randint(0, 1000, (8, 256)).cuda()
    return model, {"input_ids": ids, "labels": ids}


def watched(set_capacity, capacity_mib):
    """How many of three watched steps finished, the notes of those that did not, and the fit's status."""
    gc.collect()  # what other tests left would keep its segments, with the model's parameters between
    torch.cuda.empty_cache()
    model, batch = llama_and_batch()
    gc.collect()
    torch.cuda.empty_cache()
    set_capacity(capacity_mib)
    finished, told = 0, []
    with lowtide.fit(model, budget="auto", offload=lowtide.Offload(host_budget=None)) as fit:
        for _ in range(3):
            try:
                model(**batch).loss.backward()
                finished += 1
            except torch.OutOfMemoryError as error:
                told.append("".join(getattr(error, "__notes__", [])))
            model.zero_grad()
        return finished, told, fit.status()


@pytest.mark.slow
@pytest.mark.parametrize("capacity_mib", CAPACITIES_MIB)
def test_a_watched_step_finishes_or_its_error_says_what_was_held(set_capacity, capacity_mib):
    finished, told, _ = watched(set_capacity, capacity_mib)

    assert finished + len(told) == 3
    assert all("when memory ran out, this step held" in note or "at its peak it holds" in note for note in told)


@pytest.mark.slow
@pytest.mark.parametrize("capacity_mib", [c for c in CAPACITIES_MIB if c >= LEAST_MIB])
def test_a_watched_step_finishes_where_its_least_fits(set_capacity, capacity_mib):
    finished, told, _ = watched(set_capacity, capacity_mib)

    assert (finished, told) == (3, [])


@pytest.mark.slow
@pytest.mark.parametrize("capacity_mib", [c for c in CAPACITIES_MIB if c <= 120])
def test_where_nothing_fits_the_error_says_so_and_the_way_out(set_capacity, capacity_mib):
    finished, told, _ = watched(set_capacity, capacity_mib)

    assert finished == 0
    assert all("does not fit in what the device has. Reduce the batch" in note for note in told)


def test_memory_in_pieces_is_made_whole_by_laying_together_what_lives(set_capacity):
    """Each segment of 20 MiB has one block in use: no tensor of 30 MiB finds room in the 54 that are free."""
    gc.collect()
    torch.cuda.empty_cache()
    set_capacity((torch.cuda.memory_reserved() >> 20) + 60)
    blocks = [torch.full((MIB // 2,), float(n), device="cuda") for n in range(30)]
    kept = blocks[::10]
    del blocks
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")

    assert lay_together([block.untyped_storage() for block in kept], torch.device("cuda"))

    torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert [block.unique().tolist() for block in kept] == [[0.0], [10.0], [20.0]]
