"""What an op will allocate is known before it runs for the first time."""

import itertools
import types

import pytest
import torch
from support.online_steps import under
from torch import nn

import lowtide
from lowtide.device.block_size import in_blocks
from lowtide.measurement.allocator import peak_bytes
from lowtide.step.operators import storage_of
from lowtide.tape.online import room
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.online.online_values import StoredValue, value_of_storage
from lowtide.tape.online.replays import chain_of, run_chain, transient_bytes
from lowtide.tape.online.room import ExpectedBytes

aten = torch.ops.aten
WIDE = torch.randn(50, 64)
ROWS = torch.randint(0, 50, (400,))


def expected(func, *args, **kwargs):
    known = ExpectedBytes()
    return known.of(known.key(func, args), func, args, kwargs)


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.index.Tensor, (WIDE, [ROWS]), {}),
        (aten.index_select.default, (WIDE, 0, ROWS), {}),
        (aten.cat.default, ([WIDE, WIDE, WIDE],), {}),
        (aten.add.Tensor, (WIDE[:, None], WIDE), {}),
        (aten._to_copy.default, (WIDE.bfloat16(),), {"dtype": torch.float64}),
        (aten.embedding_dense_backward.default, (torch.randn(3, 64), ROWS[:3], 50, -1, False), {}),
        (aten.select_backward.default, (WIDE, [8, 50, 64], 0, 3), {}),
        (aten.zeros_like.default, (WIDE,), {"dtype": torch.float32, "device": torch.device("cpu")}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, torch._ops.OpOverload) else "",
)
def test_at_first_sight_an_op_is_expected_to_make_what_it_makes(func, args, kwargs):
    assert expected(func, *args, **kwargs) == func(*args, **kwargs).nbytes


@pytest.mark.parametrize("func", [torch.ops.c10d.allreduce_.default, torch.ops._c10d_functional.all_reduce_.default])
def test_a_collective_that_writes_what_it_is_given_makes_nothing(func):
    assert expected(func, [WIDE]) == 0


@pytest.mark.parametrize(
    "func",
    [
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.huber_loss.default,
        aten.binary_cross_entropy_with_logits.default,
    ],
    ids=str,
)
def test_at_first_sight_a_loss_is_expected_to_take_what_its_kernel_takes(func):
    args = torch.rand(512, 64), torch.rand(512, 64)
    # A device's thread of autograd may let go meanwhile of what it holds of a backward before.
    number_bytes = in_blocks(1, torch.get_default_device().type)
    assert peak_bytes(lambda: func(*args)) == pytest.approx(expected(func, *args), rel=0.001, abs=number_bytes)


def test_views_and_writes_in_place_make_nothing():
    assert expected(aten.view.default, WIDE, [64, 50]) == 0
    assert expected(aten.mul_.Tensor, WIDE.clone(), 2.0) == 0


def test_asking_draws_no_random_numbers_and_writes_nothing():
    state, before = torch.get_rng_state(), WIDE.clone()
    expected(aten.native_dropout.default, WIDE, 0.5, True)
    expected(aten.mul_.Tensor, WIDE, 2.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(WIDE, before)
    assert WIDE._version == 0


def test_where_the_size_depends_on_values_it_is_guessed():
    assert expected(aten.masked_select.default, WIDE, WIDE > 0) == WIDE.nbytes
    assert expected(aten.index.Tensor, WIDE, [WIDE[:, 0] > 0]) == WIDE.nbytes


def test_what_it_made_is_expected_of_it_the_next_time():
    known = ExpectedBytes()
    key = known.key(aten.masked_select.default, (WIDE, WIDE > 0))
    known.learn(key, 1234)
    assert known.of(key, aten.masked_select.default, (WIDE, WIDE > 0), {}) == 1234


def test_a_product_may_make_any_multiple_of_what_it_reads():
    need, left, right = room.Need(aten.mm.default), torch.ones(100, 4), torch.ones(4, 100)
    need.note(1000 * 4, 256)

    assert need.at_most(left.nbytes + right.nbytes, [left, right]) >= (left @ right).nbytes
    assert need.at_most(1001 * 4, [left, right]) == float("inf")


def peaks(model_width: int, share: float) -> tuple[int, int]:
    """Of a watched first step in bfloat16, and what it may take: products reorder what they read."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(model_width, 4 * model_width), nn.GELU(), nn.Linear(4 * model_width, model_width))
        for _ in range(4)
    ]
    model, x = nn.Sequential(*layers), torch.randn(2048, model_width)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def step() -> None:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()

    plain = peak_bytes(step)
    resident = 2 * sum(p.nbytes for p in model.parameters()) + x.nbytes
    with lowtide.fit(model, budget=resident + int(share * plain)):
        return peak_bytes(step), int(share * plain)


@pytest.fixture
def steady_clock(monkeypatch):
    """Every op takes as long: what is let go, and so the peak, does not depend on the machine's load."""
    ticks = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-4)
    monkeypatch.setattr("lowtide.tape.online.online_tape.time", clock)
    monkeypatch.setattr("lowtide.device.timing.time", clock)  # of a step that is recorded


@pytest.mark.usefixtures("one_thread", "steady_clock")
def test_workspaces_are_in_the_budget_of_the_first_step(monkeypatch):
    monkeypatch.setattr(OnlineTape, "reserve", lambda self, size: None)  # for targets: there are none
    found, allowed = peaks(128, 0.6)
    assert found <= 1.005 * allowed
    monkeypatch.setattr(room, "_first_share", lambda func, args: 0.0)
    found, allowed = peaks(128, 0.6)
    assert found > 1.005 * allowed


class LargeWorkspaces(ExpectedBytes):
    """Each op takes three times what it makes besides, on every machine."""

    def of(self, key, func, args, kwargs):
        return 4 * super().of(key, func, args, kwargs)


def compared_bytes(value: StoredValue) -> int:
    """What comparing a value takes on a device, whose result is read later."""
    return value.bytes // 8 if value.run.stream is not None else 0


def test_room_for_making_a_value_again_has_its_ops_workspace():
    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    tape = OnlineTape(model, float("inf"), LargeWorkspaces())
    with under(tape, model):
        y = model(x).relu()
        value = value_of_storage(storage_of(y), tape.run_state)
        y.sum().backward()

    assert transient_bytes([value], [value]) == 4 * value.bytes + compared_bytes(value)


@pytest.mark.parametrize("budget", [0, float("inf")])  # shapes are asked for, or not
def test_room_for_making_a_value_again_has_what_its_kernel_was_measured_to_take(budget):
    model, x, known = nn.Linear(64, 64), torch.randn(64, 64), ExpectedBytes()
    tape = OnlineTape(model, budget, known)
    with under(tape, model):
        between = model(x)
        y = between.relu()
        value = value_of_storage(storage_of(y), tape.run_state)
        assert transient_bytes([value], [value]) == value.bytes + compared_bytes(value)
        known.learn_workspace(known.key(aten.relu.default, (between,)), 3 * y.nbytes)
        assert transient_bytes([value], [value]) == 4 * value.bytes + compared_bytes(value)
        y.sum().backward()


def test_making_values_again_takes_no_more_than_is_foreseen():
    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    tape = OnlineTape(model, float("inf"))
    with under(tape, model):
        y = 2 * model(x)  # nobody keeps what this reads
        kept = [y.relu()]
        kept.append(torch.cat(kept * 4).sin())
        values = [value_of_storage(storage_of(t), tape.run_state) for t in kept]
        del y
        loss = sum(t.square().sum() for t in kept)
        chain = chain_of(values)
        taken = peak_bytes(lambda: run_chain(chain, values, lambda value: None, _compared))
        tape.run_state.stream = None  # nothing is compared here
        foreseen = transient_bytes(chain, values)
        loss.backward()

    assert [v for v in chain if v not in values]
    assert taken == foreseen


@pytest.mark.parametrize("rows, unsplit", [(512, 1 << 20), (64, 0)])
def test_each_large_block_that_a_proof_holds_on_a_device_may_be_handed_out_whole(rows, unsplit):
    model, x = nn.Linear(1024, 1024), torch.randn(rows, 1024)
    tape = OnlineTape(model, float("inf"))
    with under(tape, model):
        between = model(x)
        y = between.sin().relu()  # nobody keeps the sine's result but the tape's recipes
        value = value_of_storage(storage_of(y), tape.run_state)
        chain = chain_of([value])
        stream, unsplit_here = tape.run_state.stream, tape.run_state.most_unsplit_bytes
        tape.run_state.stream, tape.run_state.most_unsplit_bytes = None, 0
        on_cpu = transient_bytes(chain, [value])
        tape.run_state.stream, tape.run_state.most_unsplit_bytes = object(), 1 << 20
        assert len(chain) == 2
        assert transient_bytes(chain, [value]) == on_cpu + unsplit + value.bytes // 8
        tape.run_state.stream, tape.run_state.most_unsplit_bytes = stream, unsplit_here
        y.sum().backward()


def _compared(_, made):
    return [(value, tensor) for value, tensor in made if not value.is_present]


@pytest.mark.usefixtures("one_thread")
def test_generator_states_that_recipes_hold_are_in_the_budget(monkeypatch):
    """A CPU's takes 5 kB: beside forty small masks that is the larger part."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(40)]
    model, x = nn.Sequential(*layers), torch.randn(64, 16)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    allowed = int(0.9 * peak_bytes(step))
    resident = sum(p.nbytes for p in model.parameters()) + x.nbytes
    with lowtide.fit(model, budget=resident + allowed):
        assert peak_bytes(step) <= 1.02 * allowed
    monkeypatch.setattr("lowtide.tape.online.online_tape.state_bytes", lambda device: 0)
    with lowtide.fit(model, budget=resident + allowed):
        assert peak_bytes(step) > 1.5 * allowed


def test_the_same_kernel_is_expected_to_take_as_large_a_share_of_other_shapes():
    known = ExpectedBytes()
    key = known.key(aten.add.Tensor, (WIDE, WIDE))
    known.learn(key, WIDE.nbytes)
    known.learn_workspace(key, 3 * WIDE.nbytes)
    double = torch.cat([WIDE, WIDE])
    assert (
        known.of(known.key(aten.add.Tensor, (double, double)), aten.add.Tensor, (double, double), {})
        == 4 * double.nbytes
    )


def test_of_two_kernels_on_the_same_shapes_the_larger_workspace_is_expected():
    """A convolution copies an input whose memory is in another order, and the next one on such shapes need not."""
    known = ExpectedBytes()
    key = known.key(aten.relu.default, (WIDE,))
    known.learn(key, WIDE.nbytes)
    for workspace in (3 * WIDE.nbytes, WIDE.nbytes):
        known.learn_workspace(key, workspace)
    assert known.known_workspace(key) == 3 * WIDE.nbytes
    assert known.of(key, aten.relu.default, (WIDE,), {}) == 4 * WIDE.nbytes
