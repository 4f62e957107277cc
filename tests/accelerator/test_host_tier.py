"""The host tier: what moves to pinned memory and back has the bits of the plain step, whatever runs first."""

import gc
import threading
import time
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from support.offloads import movable, moving
from support.quick import thorough_but
from support.training_steps import differing, mlp, outcome, plain
from torch import nn

import lowtide
from accelerator.schedules import EARLY, LATE, RANDOM
from lowtide.device import pinning
from lowtide.errors import TierError
from lowtide.graph.costs import HOST, Link
from lowtide.measurement import links
from lowtide.recording import tape_costs
from lowtide.tape.offload.host_tier import HostCopy, HostTier, host_bytes
from lowtide.tracing.tracer import run_step
from lowtide.training import shared_tiers

ORDERS = {"late-early": (LATE, EARLY), "early-late": (EARLY, LATE)}
ORDERS |= {f"random {seed}": (RANDOM, RANDOM, seed) for seed in range(4)}
SOME_ORDERS = dict(list(ORDERS.items())[:3])
# The first in make test
SOME = [pytest.param(o, id=n, marks=pytest.mark.thorough if i else ()) for i, (n, o) in enumerate(SOME_ORDERS.items())]
NUMBERS = torch.arange(200_000.0)


@pytest.fixture(params=ORDERS.values(), ids=ORDERS)
def any_order(device, request):
    with device.schedule(*request.param):
        yield device


def made(factor, where="standin"):
    return torch.arange(200_000.0, device=where) * factor


def flat(tensor):
    return tensor.view(torch.float32).cpu()


def offloaded(where="standin", **how):
    """A model, a batch and a plan that moves all that may move."""
    model, batch = mlp(3, 32).to(where), torch.randn(64, 32, device=where)
    graph = lowtide.trace(model, batch)
    return model, batch, moving(graph, movable(graph), **how)


def steps_differ(model, batch, plan, steps=3):
    """Names of what differs from the plain step, in steps one after the other under ``plan``."""
    expected, found = plain(model, batch), []
    with lowtide.apply(model, plan) as applied:
        for _ in range(steps):
            model.zero_grad()
            torch.manual_seed(7)
            loss, _ = run_step(model, batch, None)
            loss.backward()
            found += differing(expected, outcome(model, loss))
    assert applied.counts.moved, "nothing moved: this is no test"
    return found


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "ahead"])
@pytest.mark.parametrize("in_flight", [0, 10_000], ids=["settled at once", "some in flight"])
def test_a_step_whose_tensors_move_is_the_plain_step(any_order, in_flight, ahead):
    model, batch, plan = offloaded(max_inflight_bytes=in_flight)
    if ahead:
        graph = lowtide.trace(model, batch)
        plan = moving(graph, movable(graph), max_inflight_bytes=in_flight, fetch_at=dict.fromkeys(movable(graph), 0))
    assert steps_differ(model, batch, plan) == []


def test_memory_of_what_moved_is_used_again_only_after_the_copy(any_order):
    tier, original, compute = HostTier(), made(2), torch.accelerator.current_stream()
    copy = tier.store(original.untyped_storage())
    assert torch.accelerator.current_stream() == compute
    del original
    copy.settle()
    others = [made(9) for _ in range(4)]
    assert flat(copy.fetch()).equal(NUMBERS * 2)
    assert len(others) == 4


def test_what_nobody_settles_is_copied_before_its_memory_is_used_again(any_order):
    tier, original = HostTier(), made(2)
    copy = tier.store(original.untyped_storage())
    block = copy._block.memory
    del original, copy
    made(9)
    torch.accelerator.synchronize()
    assert block[: NUMBERS.nbytes].view(torch.float32).equal(NUMBERS * 2)


def test_a_fetch_that_nobody_wants_writes_into_memory_of_nobody_else(any_order):
    tier, original = HostTier(), made(2)
    copy = tier.store(original.untyped_storage())
    copy.start_fetch()
    del copy
    others = [torch.full((200_000,), 9.0, device="standin") for _ in range(4)]  # one of them where the fetch writes
    torch.accelerator.synchronize()
    assert all(other.eq(9).all() for other in others)


def test_a_block_of_the_pool_is_written_again_only_when_its_last_fetch_is_over(any_order):
    tier, first, second = HostTier(), made(2), made(3)
    copy = tier.store(first.untyped_storage())
    copy.settle()
    copy.start_fetch()
    arrived = copy._buffer
    del copy  # the compute stream waits for the fetch, the stream of stores for nothing of it
    again = tier.store(second.untyped_storage())
    assert tier.pool.pinned_bytes == host_bytes(NUMBERS.nbytes)
    assert flat(arrived).equal(NUMBERS * 2)
    assert flat(again.fetch()).equal(NUMBERS * 3)


def test_a_block_is_written_again_only_when_a_fetch_for_another_stream_is_over(device):
    """A fetch that one stream waits for is not over for a store from another."""
    for seed in range(24):
        with device.schedule(LATE, RANDOM, seed=seed):
            tier, first, other = HostTier(), made(2), torch.Stream("standin")
            copy = tier.store(first.untyped_storage())
            arrived = copy.fetch()
            del copy
            with other:
                second = made(3)
                again = tier.store(second.untyped_storage())
                again.settle()
            other.synchronize()
            assert flat(arrived).equal(NUMBERS * 2)
            torch.accelerator.current_stream().wait_stream(other)
            assert flat(again.fetch()).equal(NUMBERS * 3)


def test_backward_and_forward_may_be_on_a_stream_of_the_users(any_order):
    model, batch, plan = offloaded()
    expected = plain(model, batch)
    side = torch.Stream("standin")
    side.wait_stream(torch.accelerator.current_stream())
    with side, lowtide.apply(model, plan):
        torch.manual_seed(7)
        loss, _ = run_step(model, batch, None)
        loss.backward()
    torch.accelerator.current_stream().wait_stream(side)
    assert differing(expected, outcome(model, loss)) == []


@cache
def two_streams():
    return torch.Stream("standin"), torch.Stream("standin")


class Branches(nn.Module):
    """Two branches on two streams of the user's, which wait for each other as they must."""

    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Tanh())
        self.branches = nn.ModuleList(mlp(3, width) for _ in range(2))

    def forward(self, x):
        current = torch.accelerator.current_stream()
        streams = two_streams()
        h, results = self.first(x), []
        for stream, branch in zip(streams, self.branches):
            stream.wait_stream(current)
            h.record_stream(stream)
            with stream:
                results.append(branch(h))
        for stream, result in zip(streams, results):
            current.wait_stream(stream)
            result.record_stream(current)
        return results[0] * results[1]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "ahead"])
def test_a_model_on_several_streams_of_the_users_is_right(device, order, ahead):
    model, batch = Branches().to("standin"), torch.randn(512, 64, device="standin")
    graph = lowtide.trace(model, batch)
    moved = movable(graph)
    fetches = {"max_inflight_bytes": 10_000, "fetch_at": dict.fromkeys(moved, 0)} if ahead else {}
    # In no other order: it frees gradients that other streams made before what reads them has run.
    expected = plain(model, batch)
    with device.schedule(*order), lowtide.apply(model, moving(graph, moved, **fetches)) as applied:
        torch.manual_seed(7)
        loss, _ = run_step(model, batch, None)
        loss.backward()
        torch.accelerator.synchronize()
    assert differing(expected, outcome(model, loss)) == [] and applied.counts.moved


def test_memory_that_another_stream_reads_is_used_again_only_after_that(device):
    other = torch.Stream("standin")
    with device.schedule(EARLY, LATE):
        copy = HostTier().store(made(2).untyped_storage())
        copy.start_fetch()
        with other:
            read = copy.fetch().view(torch.float32) + 0
        others = [made(9) for _ in range(4)]  # in memory that nobody has
        other.synchronize()
    assert read.cpu().equal(NUMBERS * 2) and len(others) == 4


def test_backward_may_be_on_another_stream_than_forward(any_order):
    model, batch, plan = offloaded()
    expected = plain(model, batch)
    side = torch.Stream("standin")
    with lowtide.apply(model, plan):
        torch.manual_seed(7)
        loss, _ = run_step(model, batch, None)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            loss.backward()
    torch.accelerator.current_stream().wait_stream(side)
    assert differing(expected, outcome(model, loss)) == []


def test_two_plans_share_a_pool(any_order):
    tier = HostTier()
    models = [mlp(2, 32).to("standin") for _ in range(2)]
    batches = [torch.randn(rows, 32, device="standin") for rows in (96, 160)]
    graphs = [lowtide.trace(model, batch) for model, batch in zip(models, batches)]
    plans = [moving(graph, movable(graph)) for graph in graphs]
    expected = [plain(model, batch) for model, batch in zip(models, batches)]
    pinned = []
    for _ in range(3):
        losses = []
        for model, batch, plan in zip(models, batches, plans):
            model.zero_grad()
            torch.manual_seed(7)
            with lowtide.tape.attach.applied(model, plan, {"host": tier}):
                losses.append(run_step(model, batch, None)[0])
        for loss in losses:
            loss.backward()
        gc.collect()
        pinned.append(tier.pool.pinned_bytes)
        for want, model, loss in zip(expected, models, losses):
            assert differing(want, outcome(model, loss)) == []
    assert len(set(pinned)) == 1, "the pool grew"


@pytest.mark.parametrize("shapes", [(1, 2, 3), (3, 2, 1), (2, 3, 1)], ids=str)
def test_a_pool_for_several_shapes_is_as_large_as_the_largest_needs(device, shapes):
    tier, sizes = HostTier(), [1 << 16, 3 << 17, 3 << 17, 1 << 20]
    for factor in shapes:
        tier.reserve(factor * size for size in sizes)
    needed = sum(host_bytes(3 * size) for size in sizes)
    assert tier.pool.pinned_bytes == needed

    for factor in (1, 2, 3, 2):  # steps of these shapes, whatever the order in which their tensors come
        copies = [tier.store(torch.zeros(factor * size // 4, device="standin").untyped_storage()) for size in sizes]
        for copy in copies:
            copy.settle()
        del copy, copies
    assert tier.pool.pinned_bytes == needed


@pytest.mark.parametrize("bytes_per_ms", thorough_but((3e5,), [3e6, 3e5, 3e4]))
@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "ahead"])
@pytest.mark.parametrize("in_flight", [0, 4 << 20], ids=["settled at once", "some in flight"])
def test_a_step_takes_what_was_predicted_stalls_included(device, bytes_per_ms, ahead, in_flight):
    """On the device's own clock, an op a millisecond: from copies that hide to copies that the step waits for."""
    model, batch = mlp(4, 64).to("standin"), torch.randn(4096, 64, device="standin")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    graph, link = lowtide.trace(model, batch), Link(bytes_per_ms * 1e3, bytes_per_ms * 1e3)
    fetch_at = dict.fromkeys(movable(graph), 0) if ahead else None
    plan = moving(graph, movable(graph), max_inflight_bytes=in_flight, fetch_at=fetch_at, link=link)
    with device.times(op_ms=1.0, copy_bytes_per_ms=bytes_per_ms), device.schedule(LATE, LATE):
        costs = lowtide.measure(graph)
        costs = replace(costs, dispatch_us=0, record_us=0, replay_us=0, links={HOST: link})
        with lowtide.apply(model, plan):
            for _ in range(2):
                torch.accelerator.synchronize()
                begin, end = (torch.Event("standin", enable_timing=True) for _ in range(2))
                begin.record()
                loss, _ = run_step(model, batch, None)
                loss.backward()
                end.record()
                end.synchronize()
    predicted = lowtide.simulate(graph, costs, plan)
    assert begin.elapsed_time(end) == pytest.approx(predicted.step_ms, rel=1e-3)
    assert bytes_per_ms > 1e5 or predicted.stall_ms > 0


def test_each_device_has_its_own_streams(any_order):
    tier = HostTier()
    originals = [made(2 + i, f"standin:{i}") for i in range(2)]
    copies = [tier.store(t.untyped_storage()) for t in originals]
    del originals
    for copy in copies:
        copy.settle()
    others = [made(9, f"standin:{i}") for i in range(2)]
    for i, copy in enumerate(copies):
        fetched = copy.fetch()
        assert fetched.device == others[i].device and flat(fetched).equal(NUMBERS * (2 + i))


def test_a_model_on_the_second_device_moves_there(any_order):
    assert steps_differ(*offloaded("standin:1"), steps=2) == []
    assert torch.accelerator.current_device_index() == 0


class Trouble(nn.Module):
    def forward(self, x):
        if x.requires_grad:
            x.register_hook(self.fail)
        return x

    def fail(self, gradient):
        raise ZeroDivisionError


def test_a_step_that_fails_with_copies_in_flight_leaves_the_next_one_right(any_order):
    model, batch, plan = offloaded(max_inflight_bytes=1 << 30)
    expected = plain(model, batch)
    with lowtide.apply(model, plan):
        loss, _ = run_step(model, batch, None)
        handle = model[4].weight.register_hook(Trouble().fail)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        del loss
        model.zero_grad()
        torch.manual_seed(7)
        loss, _ = run_step(model, batch, None)
        loss.backward()
    assert differing(expected, outcome(model, loss)) == []


def unpin_under_a_copy(device):
    """The tier goes while its copy has not run."""
    with device.schedule(LATE, LATE):
        before = device.unregistered_in_use()
        tier, original = HostTier(), made(2)
        copy = tier.store(original.untyped_storage())
        del copy, tier
        gc.collect()
        assert device.unregistered_in_use() == before


def test_pinned_memory_is_not_given_back_under_a_copy(device):
    unpin_under_a_copy(device)


def test_registered_memory_is_not_given_back_under_a_copy(device, monkeypatch):
    """Where memory is registered as it is (CUDA), nobody but us waits for the copies."""
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: device.host_register(address, size),
        cudaHostUnregister=device.host_unregister,
        cudaGetLastError=lambda: None,
    )
    monkeypatch.setattr(pinning, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(pinning, "cudart", lambda: runtime)
    unpin_under_a_copy(device)


def test_a_fit_whose_memory_cannot_be_pinned_plans_without_and_says_why(device):
    model, batch = mlp(2, 32).to("standin"), torch.randn(64, 32, device="standin")
    with device.pin_limit(1 << 20):
        fit = lowtide.fit(model, batch, budget="100%")
    assert fit.plan.counts["cpu_offload"] == 0
    assert any("planned without other tiers: 32.00 MiB of host memory" in reason for reason in fit.status().reasons)
    with device.pin_limit(1 << 20), pytest.raises(TierError, match="of host memory could not be pinned"):
        lowtide.fit(mlp(2, 32).to("standin"), batch, budget="60%", offload=lowtide.Offload(host_budget="1GiB"))


@pytest.mark.parametrize("batch", [None, torch.zeros(64, 32)], ids=["watched", "with a batch"])
def test_a_fit_that_cannot_measure_the_link_plans_without_the_host(device, batch, monkeypatch):
    monkeypatch.setattr(links, "_known", {})
    model = mlp(2, 32).to("standin")
    batch = None if batch is None else batch.to("standin")
    torch.accelerator.empty_cache()
    with device.capacity(16 << 20):
        fit = lowtide.fit(model, batch, budget="100%")
    assert any("standin has not the 32.00 MiB left" in reason for reason in fit.status().reasons)
    fit.remove()


def test_the_link_is_not_measured_in_a_step(device, monkeypatch):
    """Measuring takes more of the device than the steps here may."""
    monkeypatch.setattr(links, "_known", {})
    model, batch = mlp(2, 32).to("standin"), torch.randn(64, 32, device="standin")
    with lowtide.fit(model, budget="70%") as fit:
        torch.accelerator.reset_peak_memory_stats(0)
        model(batch).square().mean().backward()
        fit.wait()
        assert torch.accelerator.max_memory_allocated(0) < links._LARGE


def test_a_pool_that_cannot_be_pinned_leaves_the_model_as_it_was(device):
    model, batch, plan = offloaded()
    expected = plain(model, batch)
    with device.pin_limit(1), pytest.raises(TierError, match="could not be pinned"):
        with lowtide.apply(model, plan):
            pass
    torch.manual_seed(7)
    loss, _ = run_step(model, batch, None)
    loss.backward()
    assert differing(expected, outcome(model, loss)) == []


def test_what_finds_no_room_in_a_full_pool_is_told_by_name(device):
    tier = HostTier(host_bytes(NUMBERS.nbytes))
    held = tier.store(made(2).untyped_storage())
    with pytest.raises(TierError, match="the host tier is full: host_budget=.* of which .* are pinned, and .* more"):
        tier.store(made(3).untyped_storage())
    assert flat(held.fetch()).equal(NUMBERS * 2)


@pytest.fixture
def fast_link(monkeypatch):
    """So that plans move what they may."""
    monkeypatch.setattr(shared_tiers, "measured_link", lambda *_: Link(1e13, 1e13))


def test_a_fit_with_a_full_pool_goes_on_and_says_so(device, fast_link):
    model, batch = mlp(8, 64).to("standin"), torch.randn(512, 64, device="standin")

    def step():
        """Two forward passes before one backward: twice as much is to move as was planned."""
        torch.manual_seed(7)
        loss = sum(run_step(model, batch, None)[0] for _ in range(2))
        loss.backward()
        found = outcome(model, loss)
        model.zero_grad()
        return found

    expected, offload = step(), lowtide.Offload(host_budget="1MiB")
    with device.schedule(LATE, EARLY), lowtide.fit(model, batch, budget="40%", offload=offload) as fit:
        assert fit.plan.counts["cpu_offload"]
        for _ in range(2):
            assert differing(expected, step()) == []
        reasons = [reason for reason in fit.status().reasons if "stayed on the device" in reason]
    assert len(reasons) == 1 and "the host tier is full: host_budget=" in reasons[0]
    assert reasons[0].endswith("Raise host_budget=, or run backward before the next forward pass")


def fail(*_):
    raise ZeroDivisionError


def run_failing_step(model, batch, where):
    """A step that fails in its ``forward``, in the ``loss`` or in its ``backward``, with tensors on the way."""
    hooked = {"forward": model[5].register_forward_hook, "backward": model[6].weight.register_hook}
    handle = hooked[where](fail) if where in hooked else None
    try:
        with pytest.raises(ZeroDivisionError):
            loss = model(batch).square().mean()
            fail() if where == "loss" else loss.backward()
    finally:
        if handle is not None:
            handle.remove()
        model.zero_grad()


def right_step(model, batch):
    model.zero_grad()
    torch.manual_seed(7)
    loss, _ = run_step(model, batch, None)
    loss.backward()
    return outcome(model, loss)


def bytes_in_use(pool):
    gc.collect()
    return pool.pinned_bytes - sum(block.size() for block in (*pool._free, *pool._freed))


def goes(is_there, patience_s=5.0):
    """Whether what ``is_there`` tells of is gone in time."""
    end_s = time.monotonic() + patience_s
    while there := is_there():
        if time.monotonic() > end_s:
            break
        gc.collect()
        time.sleep(0.01)
    return not there


def bytes_held(pool):
    """Those in use once nothing goes any more."""
    goes(lambda: bytes_in_use(pool), patience_s=2.0)
    return bytes_in_use(pool)


@pytest.mark.parametrize("order", SOME)
def test_a_fit_whose_steps_fail_with_copies_in_flight_goes_on_right_and_leaks_nothing(device, order, fast_link):
    model, batch = mlp(5, 64).to("standin"), torch.randn(512, 64, device="standin")
    expected = plain(model, batch)
    with device.schedule(*order), lowtide.fit(model, batch, budget="50%") as fit:
        assert fit.plan.counts["cpu_offload"] > 1
        pool = fit._lifecycle.latest.tape.tiers["host"].pool
        pinned, there = pool.pinned_bytes, torch.accelerator.memory_allocated()
        for where in ("forward", "loss", "backward") * 2:
            run_failing_step(model, batch, where)
            device.finish_backward_threads()
            if where != "loss":  # whose copies are settled when the next step begins
                # A thread of autograd's may hold the failed step for a moment more, which is in no plan.
                assert goes(lambda: torch.accelerator.memory_allocated() > there), where
            if where == "forward":  # no backward comes any more
                assert bytes_held(pool) == 0, where
            assert differing(expected, right_step(model, batch)) == [], where
            # Copies that nobody fetched wait for the next step.
            assert bytes_held(pool) <= fit.plan.max_inflight_bytes, where
            # A block whose copy is still on its way serves no other: how many there are depends on who is late.
            assert pool.pinned_bytes <= 2 * pinned, where
            assert fit.status().in_force, where
        fit.remove()
        assert bytes_held(pool) == 0


@pytest.mark.parametrize("order", SOME)
def test_fits_on_two_devices_move_tensors_on_their_own_streams(device, order, fast_link, monkeypatch):
    used, start = [], HostCopy._start

    def noting(copy, stream, *to):
        used.append((copy._device.index, stream))
        return start(copy, stream, *to)

    monkeypatch.setattr(HostCopy, "_start", noting)
    monkeypatch.setattr(tape_costs, "_MOVE", 0.0)  # ops so small would rather run again
    models = [mlp(8, 64).to(f"standin:{i}") for i in range(2)]
    batches = [torch.randn(512, 64, device=f"standin:{i}") for i in range(2)]
    expected = [plain(*pair) for pair in zip(models, batches)]
    with device.schedule(*order):
        fits = [lowtide.fit(models[0], batches[0], budget="40%"), lowtide.fit(models[1], budget="40%")]
        for _ in range(3):
            for model, batch, want in zip(models, batches, expected):
                assert differing(want, right_step(model, batch)) == []
            for fit in fits:
                fit.wait()
    assert [fit.status().planned_steps for fit in fits] == [3, 2]  # the second one had to see a step first
    for i, fit in enumerate(fits):
        assert fit.plan.counts["cpu_offload"]
        own = set(fit._lifecycle.latest.tape.tiers["host"].streams(torch.device("standin", i)))
        assert {stream for index, stream in used if index == i} == own
        assert {stream.device.index for stream in own} == {i}
        fit.remove()


def test_what_is_pinned_is_in_host_memory_whatever_the_default_device(device):
    with torch.device("standin"):
        buffer = pinning.pinned_buffer(1 << 16)
    assert buffer.device.type == "cpu" and buffer.is_pinned()


def test_two_threads_take_pinned_memory_one_after_the_other(device, monkeypatch):
    """Both would find the budget untouched: the first one pins while the second one asks."""
    second, pinned = threading.Event(), pinning.pinned_buffer

    def pin(size):
        if threading.current_thread() is first:
            second.wait(0.5)
        else:
            second.set()
        return pinned(size)

    monkeypatch.setattr(pinning, "pinned_buffer", pin)
    tier = HostTier(host_bytes(1))
    failures = []

    def take():
        try:
            tier.pool.allocate(1)
        except TierError as full:
            failures.append(full)

    first = threading.Thread(target=take)
    threads = [first, threading.Thread(target=take)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(failures) == 1 and tier.pool.pinned_bytes == host_bytes(1)
    tier.pool.close()
