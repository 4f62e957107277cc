"""Offloaded storages come back bit by bit, when the plan says, or the step stops with the reason."""

import copy
import errno
import gc
import os
import random
import re
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.offloads import flip_a_bit, movable, moving
from support.toy_graphs import chain, decoder, linear_tanh, unit_costs
from support.training_steps import Net, differing, is_clean, live_tensors, mlp, outcome, plain, same_state, state_of
from support.virtual_links import Clock, VirtualTier
from torch import nn

import lowtide
from lowtide.errors import TierError
from lowtide.graph.costs import DISK, Link
from lowtide.graph.step_graph import RUN, UNPACK
from lowtide.measurement.allocator import peak_bytes
from lowtide.plan import CPU_OFFLOAD, DISK_OFFLOAD, Decision, Moves
from lowtide.simulation.simulator import simulate_actions
from lowtide.tape.offload.disk_tier import DiskTier
from lowtide.tape.offload.offloaded_tensor import OffloadedTensor, Transfers
from lowtide.tracing.tracer import run_step


class Block(nn.Module):
    """Attention, dropout, in-place activations and views: one decoder layer's worth of ways to store."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(y)
        return x + self.mlp(x)


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def tokens() -> torch.Tensor:
    return torch.randn(2, 16, 32, generator=torch.Generator(torch.get_default_device()).manual_seed(1))


def under(model, batch, plan, *, backward=torch.Tensor.backward, step=None, **options):
    """One step of a copy of ``model`` under ``plan``: what came out, and what the tape met."""
    model = copy.deepcopy(model)
    torch.manual_seed(7)
    with lowtide.apply(model, plan, **options) as applied:
        loss, _ = run_step(model, batch, step)
    backward(loss)
    return outcome(model, loss), applied.counts


def moves(plan: lowtide.Plan) -> int:
    return sum(d.action in (CPU_OFFLOAD, DISK_OFFLOAD) for d in plan.decisions)


def test_everything_moved_gives_the_same_bits_and_the_predicted_peak():
    model, batch = blocks(), tokens()
    graph = lowtide.trace(model, batch)
    plan = moving(graph, movable(graph), max_inflight_bytes=50_000)

    ours, counts = under(model, batch, plan)

    assert counts.moved == moves(plan) > 20 and counts.mismatched == 0
    assert differing(plain(model, batch), ours) == []
    proof = lowtide.verify(model, batch, plan, rounds=0)
    assert proof.equal and proof.measured_peak_bytes == plan.predicted_peak_bytes < plan.plain_peak_bytes


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_saved_recomputed_and_moved_gives_the_same_bits_and_the_predicted_peak(seed):
    chance = random.Random(seed)
    model, batch = blocks(2), tokens()
    graph = lowtide.trace(model, batch)
    fate = {s: chance.choice(["save", "recompute", "move", "move"]) for s in movable(graph)}
    moved = [s for s, f in fate.items() if f == "move"]
    unpacks = sum(kind == UNPACK for kind, _ in graph.events)
    plan = moving(
        graph,
        moved,
        recomputed=[s for s, f in fate.items() if f == "recompute"],
        max_inflight_bytes=chance.choice([0, 10_000, 100_000]),
        fetch_at={s: chance.randrange(unpacks) for s in moved if chance.random() < 0.7},
    )

    ours, counts = under(model, batch, plan)

    assert counts.moved == moves(plan) and counts.mismatched == 0
    assert differing(plain(model, batch), ours) == []
    measured = lowtide.verify(model, batch, plan, rounds=0).measured_peak_bytes
    assert measured == plan.predicted_peak_bytes


def test_a_storage_that_many_refer_to_is_moved_once():
    def forward(self, x):
        h = torch.tanh(self.layers[0](x))
        return self.layers[1](h) + self.layers[2](h.view(2, -1, 8).reshape(-1, 8)) * h.flip(0)

    model, batch = Net(forward), torch.randn(4, 8)
    graph = lowtide.trace(model, batch)
    read = Counter(graph.saved)
    shared = max(movable(graph), key=lambda s: read[s])
    assert read[shared] >= 3

    ours, counts = under(model, batch, moving(graph, [shared]))

    assert counts.moved == 1 and differing(plain(model, batch), ours) == []


def test_what_an_in_place_op_completes_is_moved_as_it_is_in_the_end():
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(inplace=True), nn.Conv1d(8, 4, 3))
    batch = torch.randn(2, 4, 16)
    graph = lowtide.trace(model, batch)
    finished = [op.completes_inplace for op in graph.ops if op.completes_inplace is not None]
    storage = next(s for s in movable(graph) if graph.storages[s].op in finished)

    ours, counts = under(model, batch, moving(graph, [storage]))

    assert counts.moved == 1 and differing(plain(model, batch), ours) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_comes_back(dtype):
    layers = [nn.Linear(8, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 8, dtype=dtype)]
    model, batch = nn.Sequential(*layers), torch.randn(4, 8, dtype=dtype)

    def step(model, batch):
        return model(batch).abs().float().sum()

    graph = lowtide.trace(model, batch, step=step)

    ours, counts = under(model, batch, moving(graph, movable(graph)), step=step)

    assert counts.moved and differing(plain(model, batch, step), ours) == []


def test_a_second_backward_over_a_retained_graph_fetches_again():
    model, batch = blocks(2), tokens()
    graph = lowtide.trace(model, batch)
    every = movable(graph)
    plan = moving(graph, every[::2], recomputed=every[1::2], fetch_at=dict.fromkeys(every[::4], 3))

    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    ours, _ = under(model, batch, plan, backward=twice)

    other = copy.deepcopy(model)
    torch.manual_seed(7)
    loss, _ = run_step(other, batch, None)
    twice(loss)
    assert differing(outcome(other, loss), ours) == []


def test_a_kept_copy_that_came_on_demand_is_not_fetched_again_when_its_time_comes():
    model, batch = mlp(4, 16), torch.randn(8, 16)
    graph = lowtide.trace(model, batch)
    last = movable(graph)[-1]
    unpacks = sum(kind == UNPACK for kind, _ in graph.events)
    reads = []
    preadv = os.preadv

    def counted(*how):
        reads.append(how)
        return preadv(*how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        plan = moving(graph, [last], fetch_at={last: unpacks - 1})
        under(model, batch, plan, backward=lambda loss: (loss.backward(retain_graph=True), gc.collect()))
    assert len(reads) == 1


def test_a_gradient_of_a_gradient_is_exact():
    model, batch = mlp(3, 8), torch.randn(4, 8)

    def step(model, batch):
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    graph = lowtide.trace(model, batch, step=step)

    ours, counts = under(model, batch, moving(graph, movable(graph)), step=step)

    assert counts.moved and differing(plain(model, batch, step), ours) == []


def test_several_passes_before_their_backward_each_have_their_own():
    model, batch = mlp(4, 16), torch.randn(8, 16)
    graph = lowtide.trace(model, batch)
    ours, other = copy.deepcopy(model), copy.deepcopy(model)
    with lowtide.apply(ours, moving(graph, movable(graph), fetch_at=dict.fromkeys(movable(graph), 1))):
        losses = []
        for k in range(3):
            ours_loss, _ = run_step(ours, batch * (k + 1), None)
            losses.append(ours_loss)
    sum(losses).backward()

    total = sum(run_step(other, batch * (k + 1), None)[0] for k in range(3))
    total.backward()
    assert differing(outcome(other, total), outcome(ours, total)) == []


def test_after_a_step_nothing_of_it_is_left():
    model, batch = blocks(2), tokens()
    graph = lowtide.trace(model, batch)
    plan = moving(graph, movable(graph), fetch_at=dict.fromkeys(movable(graph), 0))
    threads = threading.active_count()
    with lowtide.apply(model, plan) as applied:
        run_step(model, batch, None)[0].backward()
        model.zero_grad(set_to_none=True)
        before = live_tensors()
        run_step(model, batch, None)[0].backward()
        model.zero_grad(set_to_none=True)
        assert live_tensors() == before
        tier = weakref.ref(applied._tape.tiers[DISK])
        space = applied._tape.tiers[DISK].space
    assert space.end_bytes == 0  # all of the file is free again
    del applied
    gc.collect()

    assert tier() is None and threading.active_count() == threads and is_clean(model)


def test_a_forward_pass_without_backward_leaves_nothing_either():
    model, batch = mlp(4, 16), torch.randn(8, 16)
    graph = lowtide.trace(model, batch)
    plan = moving(graph, movable(graph), max_inflight_bytes=1 << 20)
    with lowtide.apply(model, plan):
        before = live_tensors()
        run_step(model, batch, None)
    gc.collect()

    assert live_tensors() <= before


def test_memory_is_free_once_the_copy_has_settled():
    model, batch = mlp(6, 64), torch.randn(256, 64)
    graph = lowtide.trace(model, batch)
    plan = moving(graph, movable(graph))

    def step():
        with lowtide.apply(model, plan):
            loss, _ = run_step(model, batch, None)
        loss.backward()

    step()
    model.zero_grad()
    assert peak_bytes(step) == plan.predicted_peak_bytes - plan.start_bytes


# In-place writes


def writing(when):
    """A step that writes in place to what autograd has stored."""

    def step(model, batch):
        h = torch.tanh(model[0](batch))
        y = model[1](h)
        if when == "at once":
            with torch.no_grad():
                h.add_(1)
        z = model[2](y)
        if when == "later":
            with torch.no_grad():
                h.mul_(2)
        return z.square().mean()

    return step


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_write_after_the_copy_set_out_raises_plain_autograds_error(when):
    model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(4, 8)
    graph = lowtide.trace(model, batch, step=writing("never"))
    h = next(s for s in movable(graph) if "tanh" in graph.ops[graph.storages[s].op].name)
    with pytest.raises(RuntimeError) as theirs:
        plain(model, batch, writing(when))

    with pytest.raises(RuntimeError) as ours:
        under(model, batch, moving(graph, [h]), step=writing(when))

    numbers = r"\[torch\.((standin|cuda)\.)?FloatTensor \[4, 8\]\].* is at version \d+; expected version \d+ instead"
    assert re.search(numbers, str(ours.value)) and "modified by an inplace operation" in str(theirs.value)


# Schedules, on a clock


def run_on_virtual_clock(graph, actions, moves, link):
    """The tape's transfers on a virtual clock, with ops of one millisecond each: the tier and the clock."""
    clock = Clock()
    tier = VirtualTier(clock, link)
    transfers = Transfers({DISK: tier}, moves.max_inflight_bytes)
    copies = {}
    for kind, number in graph.events:
        if kind == RUN:
            clock.compute(1.0)
            for output, s in enumerate(graph.ops[number].makes):
                if actions.get(s) == DISK_OFFLOAD:
                    size = graph.storages[s].bytes
                    move = Decision(s, DISK_OFFLOAD, size, number, output, stored=True, fetch_at=moves.fetch_at.get(s))
                    copies[s] = OffloadedTensor(number, move, None)
                    transfers.send(copies[s], torch.UntypedStorage(size))
        elif kind == UNPACK:
            transfers.on_unpack()
            copy_ = copies.pop(graph.saved[number], None)
            if copy_ is not None:
                copy_.stored.fetch()
            del copy_
    return tier, clock


@pytest.mark.parametrize("seed", range(40))
def test_the_tape_moves_and_waits_exactly_when_the_simulator_says(seed):
    chance = random.Random(seed)
    graph = chance.choice([chain(8, size=12), linear_tanh(6, 16), decoder(layers=2, hidden=8, inner=16, tokens=2)])
    actions = dict.fromkeys(chance.sample(movable(graph), chance.randint(1, len(movable(graph)))), DISK_OFFLOAD)
    unpacks = sum(kind == UNPACK for kind, _ in graph.events)
    moves = Moves(
        chance.choice([0, 30, 200, 10_000]),
        {s: chance.randrange(unpacks) for s in actions if chance.random() < 0.7},
    )
    link = Link(10 ** chance.uniform(3, 6), 10 ** chance.uniform(3, 6), chance.choice([0.0, 0.3]))

    line = simulate_actions(graph, unit_costs(graph, links={DISK: link}), actions, moves=moves)
    tier, clock = run_on_virtual_clock(graph, actions, moves, link)

    assert [t.direction for t in line.transfers] == [t[0] for t in tier.transfers]
    times = [(t.bytes, t.start_ms, t.end_ms, t.waited_ms) for t in line.transfers]
    assert times == [pytest.approx(tuple(t[1:]), abs=1e-9) for t in tier.transfers]
    assert clock.now_ms == pytest.approx(line.step_ms)


def test_a_copy_on_a_slow_link_holds_memory_until_the_limit_settles_it():
    clock = Clock()
    tier = VirtualTier(clock, Link(1e3, 1e3))
    transfers = Transfers({DISK: tier}, max_inflight_bytes=100)
    copies = [OffloadedTensor(i, Decision(i, DISK_OFFLOAD, 40, i, 0, stored=True), None) for i in range(3)]

    for each in copies[:2]:
        transfers.send(each, torch.UntypedStorage(40))
    assert [c.stored.original is None for c in copies[:2]] == [False, False] and clock.now_ms == 0
    transfers.send(copies[2], torch.UntypedStorage(40))

    assert [c.stored.original is None for c in copies] == [True, False, False]
    assert clock.now_ms == 40.0  # a byte a millisecond, and only the oldest was waited for


# Failing devices


def fails(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("max_inflight_bytes", [0, 1 << 20])
def test_a_full_disk_stops_the_step_with_the_reason_and_no_gradient(monkeypatch, max_inflight_bytes):
    model, batch = mlp(4, 16), torch.randn(8, 16)
    graph = lowtide.trace(model, batch)
    monkeypatch.setattr(os, "pwrite", fails)

    with pytest.raises(TierError) as caught:
        with lowtide.apply(model, moving(graph, movable(graph), max_inflight_bytes=max_inflight_bytes)):
            run_step(model, batch, None)[0].backward()

    assert str(caught.value) == (
        "the disk tier failed: 512 B could not be written: No space left on device.\n"
        "No gradient has been computed from them. Make room there, or pass another directory with scratch_dir=."
    )
    assert all(p.grad is None for p in model[0].parameters()) and is_clean(model)


def test_a_device_that_cannot_be_read_stops_backward_with_the_reason(monkeypatch):
    model, batch = mlp(4, 16), torch.randn(8, 16)
    graph = lowtide.trace(model, batch)
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))

    with pytest.raises(TierError, match="could not be read: Input/output error.\nNo gradient .* not to be trusted"):
        under(model, batch, moving(graph, movable(graph)))


def test_a_bit_that_flips_on_disk_is_found_by_the_checksum(monkeypatch):
    model, batch = mlp(4, 16), torch.randn(8, 16)
    graph = lowtide.trace(model, batch)
    plan = moving(graph, movable(graph))
    with monkeypatch.context() as patch:
        flip_a_bit(patch)
        with pytest.raises(TierError, match="the checksum of what came back from byte 0|from byte \\d+ is not that"):
            under(model, batch, plan, offload=lowtide.Offload(checksums=True))

    ours, _ = under(model, batch, plan, offload=lowtide.Offload(checksums=True))
    assert differing(plain(model, batch), ours) == []


def test_a_file_that_may_not_grow_stops_a_real_step():
    script = """
        import resource, signal, torch, lowtide
        from support.offloads import flip_a_bit, movable, moving
        from support.training_steps import mlp, run_step
        model, batch = mlp(4, 64), torch.randn(256, 64)
        graph = lowtide.trace(model, batch)
        plan = moving(graph, movable(graph))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            with lowtide.apply(model, plan):
                run_step(model, batch, None)[0].backward()
        except lowtide.TierError as error:
            assert "File too large" in str(error) and all(p.grad is None for p in model.parameters())
            print("stopped")
    """
    here = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=env, capture_output=True, text=True)
    assert ran.stdout == "stopped\n", ran.stderr


# Tiers that are not there


def test_a_plan_for_a_tier_that_is_not_here_is_refused_and_the_model_untouched():
    model, batch = mlp(4, 16), torch.randn(8, 16)
    graph = lowtide.trace(model, batch)
    before = state_of(model)

    with pytest.raises(TierError, match="there is no host tier beside a model on cpu"):
        with lowtide.apply(model, moving(graph, movable(graph), action=CPU_OFFLOAD)):
            pytest.fail("applied")

    assert is_clean(model) and same_state(before, state_of(model))


def test_a_scratch_directory_that_is_not_there_leaves_the_model_untouched(tmp_path):
    model, batch = mlp(4, 16), torch.randn(8, 16)
    graph = lowtide.trace(model, batch)
    before = state_of(model)

    with pytest.raises(TierError, match="cannot hold a scratch file: No such file or directory"):
        with lowtide.apply(
            model, moving(graph, movable(graph)), offload=lowtide.Offload(scratch_dir=tmp_path / "missing")
        ):
            pytest.fail("applied")

    assert is_clean(model) and same_state(before, state_of(model))


# The file


def test_space_in_the_file_is_reused_and_merged():
    tier = DiskTier(budget_bytes=5 * 4096)
    a, b, c = (tier.store(torch.UntypedStorage(4000)) for _ in range(3))
    for copy_ in (a, b, c):
        copy_.settle()
    del a, b, copy_
    gc.collect()
    joined = tier.store(torch.UntypedStorage(8000))  # where the first two were

    assert (joined.fetch().numel(), tier.space.end_bytes) == (8000, 3 * 4096)
    with pytest.raises(TierError) as caught:
        tier.store(torch.UntypedStorage(3 * 4096))
    assert str(caught.value) == (
        "the disk tier is full: disk_budget=20.00 KiB, of which 12.00 KiB are in use or in pieces, and 12.00 KiB more "
        "are wanted.\nRaise disk_budget=, or run backward before the next forward pass."
    )


def test_what_the_caller_writes_to_what_came_back_is_nobody_elses():
    tier = DiskTier()
    storage = torch.arange(100, dtype=torch.uint8, device="cpu").untyped_storage()
    ticket = tier.store(storage)

    first = ticket.fetch()
    first.zero_()

    assert torch.equal(ticket.fetch(), torch.arange(100, dtype=torch.uint8, device="cpu"))


def test_an_empty_storage_can_be_moved():
    assert DiskTier().store(torch.UntypedStorage(0)).fetch().numel() == 0
