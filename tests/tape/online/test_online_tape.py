"""The online tape: within its budget without a plan, bit for bit, and loud where it cannot be exact."""

import collections
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from support.gpu import is_gpus
from support.online_steps import Steps, online, recorded, recording_of, under
from support.random_programs import draw
from support.training_steps import differing, outcome, plain
from support.unseen_memory import memory_of
from torch import nn

import lowtide
from lowtide.errors import ReplayError
from lowtide.measurement.allocator import peak_bytes
from lowtide.tape.online import online_tape, release
from lowtide.tape.online.live_bytes import LiveBytes
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.online.release import Releaser
from lowtide.tape.online.writes import Writes

pytestmark = pytest.mark.usefixtures("one_thread")


class Transformer(nn.Module):
    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8 if n else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
            for n in range(5)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


MODELS = {
    "transformer": lambda: (Transformer(), torch.randn(8, 64, 64)),
    "conv net": lambda: (ConvNet(), torch.randn(4, 3, 32, 32)),
}


def live_of_plain(model, batch):
    return online(model, batch, float("inf"))[1].live.peak


@pytest.mark.parametrize("share", [0.8, 0.5, 0.35])
@pytest.mark.parametrize("name", MODELS)
def test_a_first_step_keeps_its_budget_bit_for_bit(name, share):
    model, batch = MODELS[name]()
    budget = share * live_of_plain(model, batch)

    found, tape = online(model, batch, budget)

    assert differing(plain(model, batch), found) == []
    assert tape.releaser.num_released > 0
    assert tape.problem == ""
    largest = 4 * 8 * 32 * 32 * 4 if name == "conv net" else 0  # where not even one proof fits beside what lives
    assert tape.live.peak <= 1.02 * budget + largest + tape.releaser.over_bytes
    of_kernels = name == "conv net" and is_gpus(batch.device)  # whose workspaces are no tensors of the step
    assert tape.releaser.over_bytes == 0 or share < 0.5 or of_kernels  # below, the step may need more


class Functional(nn.Module):
    """No numbered layer: nothing tells where one ends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        for _ in range(12):
            x = x + torch.tanh(x @ self.weight).sin().exp().sigmoid()
        return x


@pytest.mark.parametrize("share", [0.85, 0.6, 0.4])
def test_a_model_without_layers_keeps_its_budget_too(share):
    model, x = Functional(), torch.randn(256, 64)
    budget = share * live_of_plain(model, x)

    found, tape = online(model, x, budget)

    assert differing(plain(model, x), found) == []
    assert tape.releaser.num_released > 0
    assert tape.live.peak <= 1.02 * budget


class Messages(nn.Module):
    """A graph network: what saved tensors are made from (both ends of each edge) is as large, and saved by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(64, 32) for _ in range(8))
        self.update = nn.ModuleList(nn.Linear(64, 32) for _ in range(8))

    def forward(self, x, source, target):
        for message, update in zip(self.message, self.update, strict=True):
            sent = nn.functional.silu(message(torch.cat([x[source], x[target]], -1)))
            received = torch.zeros_like(x).index_add(0, target, sent)
            x = x + nn.functional.silu(update(torch.cat([x, received], -1)))
        return x


@pytest.mark.parametrize("share", [0.5, 0.36])
def test_room_is_left_for_proofs_that_take_more_than_what_they_prove(share, monkeypatch, repeated):
    model, (source, target) = Messages(), torch.randint(0, 300, (2, 2000))
    batch = torch.randn(300, 32), source, target
    repeated(lambda: [t for t in plain(model, batch).values() if t is not None])
    budget = share * live_of_plain(model, batch)

    found, tape = online(model, batch, budget)

    assert differing(plain(model, batch), found) == []
    assert tape.live.peak <= 1.005 * budget

    monkeypatch.setattr(Releaser, "_limit_bytes", property(lambda self: self.budget_bytes))
    assert online(model, batch, budget)[1].live.peak > 1.01 * budget


def test_live_bytes_are_the_allocators():
    model, batch = MODELS["transformer"]()
    found = {}

    def step():
        found["tape"] = online(model, batch, float("inf"))[1]

    step()
    with_copies = peak_bytes(step)
    copies = sum(p.nbytes for p in model.parameters())  # ``online`` trains a copy of the model
    gradients_and_loss = 3 * copies
    assert 0 <= with_copies - copies - found["tape"].live.peak <= gradients_and_loss


def test_when_the_step_is_over_nothing_is_held():
    model, batch = MODELS["transformer"]()

    _, tape = online(model, batch, 0.4 * live_of_plain(model, batch))

    assert tape.num_claims == 0
    assert len(list(tape._holdings)) == 0


def test_when_the_step_is_over_a_loss_that_somebody_holds_holds_no_batch():
    model, batch = MODELS["transformer"]()
    tape = OnlineTape(model, float("inf"))
    storage = weakref.ref(batch.untyped_storage())

    with under(tape, model):
        loss = model(batch).square().mean()
        loss.backward()
    tape.end_step()
    del batch

    assert loss.isfinite() and storage() is None


EQUAL, DIFFERS, REFUSED, SAME_ERROR, OTHER_ERROR = "equal", "differs", "refused by name", "same error", "other error"


def result_of(seed: int, length: int, *, steps: int = 1) -> str:
    """How the last of some steps of a random program ends with everything released that may be."""
    model, x = draw(seed, length)
    try:
        expected = plain(model, x)
    except RuntimeError as error:
        expected = error
    earlier = Steps(model, 0)
    try:
        for _ in range(steps - 1):
            earlier.run(x)
        found = online(model, x, 0, make=recorded)[0] if steps == 1 else earlier.run(x)[0]
    except lowtide.LowtideError:
        return SAME_ERROR if isinstance(expected, RuntimeError) else REFUSED
    except RuntimeError:
        return SAME_ERROR if isinstance(expected, RuntimeError) else OTHER_ERROR
    if isinstance(expected, RuntimeError):
        return SAME_ERROR
    return DIFFERS if differing(expected, found) else EQUAL


def tally(seeds: range, length: int, *, steps: int = 1) -> collections.Counter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return collections.Counter(result_of(seed, length, steps=steps) for seed in seeds)


@pytest.mark.parametrize("length", [6, 14])
def test_no_random_program_is_silently_wrong(length, monkeypatch):
    monkeypatch.setattr(release, "_LEAST_BYTES", 0)

    found = tally(range(length * 1000, length * 1000 + 40), length)

    assert set(found) <= {EQUAL, REFUSED, SAME_ERROR}, found
    assert found[EQUAL] > 20


@pytest.mark.parametrize("length", [6, 14])
def test_no_random_program_is_silently_wrong_in_a_later_step(length, monkeypatch):
    """What the first step has proven is not proven again, and no mode sees backward."""
    monkeypatch.setattr(release, "_LEAST_BYTES", 0)

    found = tally(range(length * 1000, length * 1000 + 40), length, steps=3)

    assert set(found) <= {EQUAL, REFUSED, SAME_ERROR}, found
    assert found[EQUAL] > 20


@pytest.mark.slow
def test_none_of_a_thousand_random_programs_is_silently_wrong(monkeypatch):
    monkeypatch.setattr(release, "_LEAST_BYTES", 0)

    found = sum((tally(range(10**5, 10**5 + 350), length) for length in (6, 9, 14)), collections.Counter())

    assert set(found) <= {EQUAL, REFUSED, SAME_ERROR}, found


# -- guards, each with what happens without it ------------------------------------------------------------------


class RawWriteBefore(nn.Module):
    """Writes the input of ``sin`` past every version counter, before memory is short."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        hidden = x @ self.weight
        y = hidden.sin()
        z = y * y
        memory_of(hidden)[0, 0] = 9.0
        return (z.cos() * hidden.detach()).tanh().exp().sigmoid()


def test_what_another_run_would_make_otherwise_is_kept(monkeypatch):
    model, x = RawWriteBefore(), torch.randn(64, 64)

    found, tape = online(model, x, 0)

    assert differing(plain(model, x), found) == []
    assert tape.releaser.differed

    monkeypatch.setattr(release, "same_storage_bits", lambda a, b: True)
    monkeypatch.setattr(release, "sum_of_words", lambda tensor: 0)
    assert differing(plain(model, x), online(model, x, 0)[0]) != []


class RawWriteAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        out = (x @ self.weight).sin().square().cos().tanh().exp().sigmoid()
        memory_of(x)[0, 0] += 1.0  # recipes read it, and no version counts this
        return out


def test_a_raw_write_after_a_release_is_an_error_and_no_wrong_gradient(monkeypatch):
    model, x = RawWriteAfter(), torch.randn(64, 64)

    with pytest.raises(ReplayError, match="gives other bits than in the forward pass"):
        online(model, x.clone(), 0)

    monkeypatch.setattr(release, "sum_of_words", lambda tensor: 0)
    assert differing(plain(model, x.clone()), online(model, x.clone(), 0)[0]) != []


class WritesWhatRecipesRead(nn.Module):
    """A buffer that was read is written in place: backward does not mind, a recipe does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("shift", torch.zeros(64))

    def forward(self, x):
        y = (x @ self.weight + self.shift).sin()
        z = (y * 2).cos().tanh()
        with torch.no_grad():
            self.shift.add_(1.0)
        return z.exp()


def test_what_was_released_is_made_again_before_its_inputs_are_written(monkeypatch):
    model, x = WritesWhatRecipesRead(), torch.randn(64, 64)

    found, _ = online(model, x, 0)

    assert differing(plain(model, x), found) == []

    monkeypatch.setattr(Writes, "keep_what_reads", lambda self, targets: None)
    with pytest.raises(ReplayError):
        online(model, x, 0)


def test_random_ops_draw_the_same_numbers_again(monkeypatch):
    model, x = Transformer(layers=2), torch.randn(4, 32, 64)
    budget = 0.4 * live_of_plain(model, x)

    assert differing(plain(model, x), online(model, x, budget)[0]) == []

    monkeypatch.setattr(online_tape, "draws_random_numbers", lambda func, args, kwargs: False)
    assert differing(plain(model, x), online(model, x, budget)[0]) != []


def test_a_saved_tensor_that_was_written_is_the_error_that_plain_raises():
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def step(model, x):
        y = model(x).exp()
        loss = y.sum()
        with torch.no_grad():
            y.add_(1)
        return loss

    for budget in (0, float("inf")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            online(model, x, budget, step=step)


@pytest.mark.own_errors
def test_an_error_of_the_tape_does_not_end_the_step(monkeypatch):
    model, x = MODELS["transformer"]()

    def fail(*_):
        raise KeyError("of our own")

    monkeypatch.setattr(Releaser, "_price", fail)
    found, tape = online(model, x, 0)

    assert differing(plain(model, x), found) == []
    assert "KeyError" in tape.problem


def test_thrashing_ends_at_a_ceiling(monkeypatch):
    monkeypatch.setattr(release, "_REPLAYS_PER_OP", 1)
    model, x = MODELS["transformer"]()

    found, tape = online(model, x, 0.05 * live_of_plain(model, x))

    assert differing(plain(model, x), found) == []
    assert tape.releaser.thrashing
    assert tape.releaser.over_bytes > 0


def test_a_conjugated_view_that_is_saved_first_does_not_change_the_others():
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            z = torch.complex(x @ self.weight, x)
            return (z.conj() * z + z.mul(1j)).imag

    model, x = Complex(), torch.randn(16, 16)

    for budget in (0, float("inf")):
        assert differing(plain(model, x), online(model, x, budget)[0]) == []


def test_live_bytes_forget_an_earlier_step():
    live = LiveBytes()
    kept = torch.zeros(1000).untyped_storage()
    live.add(kept)
    live.restart()
    assert (live.now, live.peak) == (0, 0)
    del kept
    assert live.now == 0


def test_two_steps_under_one_model_do_not_take_each_others_storages_for_their_own():
    torch.manual_seed(0)
    model, x = nn.Linear(32, 32), torch.randn(16, 32)
    carried = []

    def step():
        tape = OnlineTape(model, 0)
        with under(tape, model):
            model.weight.data = model.weight.data * 2  # made by an op of this step, read by the next
            loss = model(x).sin().exp().sum()
            loss.backward()
        carried.append(outcome(model, loss))
        model.zero_grad()

    step()
    step()
    torch.manual_seed(0)
    reference = nn.Linear(32, 32)
    for found in carried:
        reference.weight.data = reference.weight.data * 2
        loss = reference(x).sin().exp().sum()
        loss.backward()
        assert differing(outcome(reference, loss), found) == []
        reference.zero_grad()


@pytest.mark.parametrize("sees_itself", [False, True])
def test_proofs_and_releases_are_no_ops_of_the_step_wherever_they_start(sees_itself, monkeypatch):
    """FSDP2 gathers parameters in a hook, where the mode is on: room is made there too."""
    if sees_itself:
        monkeypatch.setattr("lowtide.tape.online.release._own_work", nullcontext)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))), torch.randn(64, 64)
    watch = recorded(model, 1 << 40)
    with under(watch, model):
        recording = recording_of(watch)
        recording.begin_call(model, (x,), {})
        y = model(x)
        num_ops = len(recording.recorder.builder.ops)
        watch.releaser.budget_bytes = watch.live.now
        watch.releaser.prove_rest()
        watch.releaser.make_room(x.nbytes)
        assert watch.releaser.num_released > 0
        assert (len(recording.recorder.builder.ops) > num_ops) == sees_itself
        if not sees_itself:
            y.sum().backward()
