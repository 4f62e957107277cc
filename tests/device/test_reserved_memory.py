"""Predicted reserved memory against the statistics of an allocator that hands memory out."""

import gc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.allocations import play, traces
from support.case_graphs import EXPECTED, load_case
from support.quick import examples, thorough_but

import lowtide
from lowtide.graph.costs import Costs
from lowtide.plan import Moves
from lowtide.simulation.allocator_peaks import resident_blocks, training_peaks
from lowtide.simulation.block_log import block_log
from lowtide.simulation.caching_allocator import CachingAllocator
from lowtide.solvers.dispatch import solve

GIB = 1 << 30


@pytest.fixture
def empty(accelerator):
    """The device without anything on it: memory that nobody writes, more than the machine has."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == 0
    with accelerator.poison(False), accelerator.capacity(8 * GIB):
        yield accelerator
        torch.accelerator.empty_cache()


def on_the_device(changes, every=1):
    """Allocated and reserved bytes of the device's allocator after every so many changes."""
    tensors, states = {}, []
    for at, (number, size) in enumerate(changes):
        if size:
            tensors[number] = torch.empty(size, dtype=torch.uint8, device="standin")
        else:
            del tensors[number]
        if at % every == 0:
            states.append((torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()))
    return states


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@given(trace=traces())
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_allocations_take_what_the_model_says(empty, expandable, trace):
    torch.accelerator.empty_cache()
    with empty.expandable_segments(expandable):
        assert on_the_device(trace) == play(CachingAllocator(expandable_segments=expandable), trace)


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize("case", thorough_but({"toy", "unet", "vit", "autocast", "lora"}, EXPECTED))
def test_steps_of_real_models_take_what_the_model_says(empty, case, ratio, expandable):
    graph, costs = load_case(case)
    plan = solve(graph, costs, method="knapsack", ratio=ratio)
    residents = [(-1 - number, size) for number, size in enumerate(resident_blocks(graph))]
    step = block_log(graph, plan.action_of(), plan.replays_of(), plan.moves)
    changes = [*residents, *step, *step]

    with empty.expandable_segments(expandable):
        found = on_the_device(changes, every=97)
    assert found == play(CachingAllocator(expandable_segments=expandable), changes)[::97]


@pytest.mark.parametrize("how", thorough_but(("plain", "watched"), ["plain", "rehearsed", "watched"]))
def test_training_reserves_what_was_predicted_and_no_more_than_its_budget(empty, how):
    """Activations of 9.2 MiB fill no segment: two of them in 20. The plain step reserves 64 MiB for 57 allocated."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(16, 1200), torch.nn.ReLU(), torch.nn.Linear(1200, 16))]
    model, batch = torch.nn.Sequential(*layers).to("standin"), torch.randn(2000, 16, device="standin")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    fit = None
    if how == "plain":
        graph = lowtide.trace(model, (batch,))
        predicted = lowtide.simulate(graph, Costs((1.0,) * len(graph.ops)), {}).reserved_peak_bytes
    else:
        given = (batch,) if how == "rehearsed" else None
        fit = lowtide.fit(model, given, budget="60MiB", budget_kind="reserved", method="knapsack")
        if given is None:
            train(model, batch)
            fit.wait()
            train(model, batch)
        predicted = fit.plan.predicted_reserved_peak_bytes
        assert predicted <= 60 << 20 and fit.plan.counts["recompute"] > 0
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    train(model, batch, steps=3)

    assert torch.accelerator.max_memory_reserved() == predicted
    if fit is not None:
        assert fit.status().in_force
        fit.remove()


@pytest.mark.parametrize("kept", [True, False], ids=["gradients kept", "gradients freed"])
def test_a_training_that_begins_reserves_what_was_predicted(empty, kept):
    """The first step of the optimizer makes its state in what activations have left, so later steps need more."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(600, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 600))]
    model, batch = torch.nn.Sequential(*layers).to("standin"), torch.randn(500, 600, device="standin")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    graph = lowtide.trace(model, (batch,), optimizer=optimizer)
    predicted = training_peaks(graph, {}, {}, Moves(), gradients_kept=kept)
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()

    for _ in range(4):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not kept)

    assert torch.accelerator.max_memory_reserved() == predicted.reserved_bytes
    # What is not split off a block may differ.
    assert torch.accelerator.max_memory_allocated() == pytest.approx(predicted.counted_bytes, rel=0.02)


def train(model, batch, steps=1):
    for _ in range(steps):
        model(batch).square().mean().backward()
