"""``fit.run``: a step that runs out of memory is undone and runs again within less, with the same bits."""

import copy
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from support.training_steps import run
from support.watched_training import Layered, activation_bytes, batch_of, reasons_of, resident_bytes
from torch import nn

import lowtide
from lowtide.device.out_of_memory import is_out_of_memory, missing_bytes
from lowtide.step.restore import TrainingState
from lowtide.training import accumulated_gradients, recovery
from lowtide.units import parse_budget

pytestmark = pytest.mark.usefixtures("one_thread")
REFUSED = "CUDA out of memory."


class Tight(nn.Module):
    """What runs through it is refused memory, in ``where``: ``times`` times after ``after`` that were granted."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.after, self.times, self.error = "", 0, 0, torch.OutOfMemoryError(REFUSED)

    def refuse(self, where, after=0, times=1, error=None):
        self.where, self.after, self.times = where, after, times
        self.error = error or self.error

    def ask(self, where):
        if where != self.where:
            return
        self.after -= 1
        if self.after < 0 < self.times:
            self.times -= 1
            raise self.error

    def forward(self, x):
        self.ask("forward")
        if x.requires_grad:
            x.register_hook(lambda _: self.ask("backward"))
        return x


class Moving(nn.Module):
    """Dropout before and after ``tight``, and buffers that move."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.tight, self.second = Layered(2), nn.BatchNorm1d(64), Tight(), Layered(2)

    def forward(self, x):
        return self.second(self.tight(self.norm(self.first(x))))


def step(model, x):
    """Draws from every generator."""
    loss = model(x + random.random() + np.random.rand()).square().mean() * torch.rand(())
    loss.backward()
    return loss.item()


def micro_batches(model, x):
    return [step(model, part) for part in x.chunk(2)]


def moved(model):
    """All that a step moves, as bytes; None for a gradient that is None."""
    grads = [p.grad for p in model.parameters()]
    tensors = [*grads, *model.buffers(), torch.get_rng_state()]
    numbers = [random.getstate(), np.random.get_state()[1].tolist()]
    return [None if t is None else t.detach().cpu().numpy().tobytes() for t in tensors] + numbers


def seed():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def budget_for(model, share=1.0):
    """The model's memory, gradients, and ``share`` of the activations."""
    return 2 * resident_bytes(model) + int(share * activation_bytes(model, batch_of()))


@pytest.fixture
def model():
    return Moving()


@pytest.fixture
def fit(model):
    with lowtide.fit(model, budget=budget_for(model)) as fit:
        yield fit


@pytest.mark.parametrize("what", [step, micro_batches])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["none", "accumulated"])
def test_a_step_runs_again_with_the_same_bits(model, fit, where, accumulates, what):
    plain = copy.deepcopy(model)
    seed()
    if accumulates:
        step(plain, batch_of())
    expected = what(plain, batch_of()), moved(plain)

    seed()
    if accumulates:
        step(model, batch_of())
    grads, budget = [p.grad for p in model.parameters()], fit.status().budget_bytes
    model.tight.refuse(where, after=1 if what is micro_batches else 0)

    assert (fit.run(what, batch_of()), moved(model)) == expected

    assert model.tight.times == 0
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True) if grad is not None)
    assert fit.status().budget_bytes < budget
    assert "out of memory: the budget is" in reasons_of(fit)


def test_the_plan_of_a_failed_step_goes_and_a_leaner_one_comes(model):
    with lowtide.fit(model, budget=budget_for(model, 0.8)) as fit:
        fit.run(step, batch_of())
        fit.wait()
        fit.run(step, batch_of())
        assert fit.status().in_force
        before = fit.plan.predicted_peak_bytes

        model.tight.refuse("backward")
        fit.run(step, batch_of())
        assert all(plan.predicted_peak_bytes < before for plan in fit.plans)  # one may be there already
        fit.wait()
        fit.run(step, batch_of())

        assert fit.status().in_force
        assert fit.plan.predicted_peak_bytes <= fit.status().budget_bytes < before


@pytest.mark.parametrize(
    ("guarded", "broken"),
    [
        ((TrainingState, "restore"), lambda self: None),
        ((accumulated_gradients.GradientsBefore, "restore"), lambda self: ""),
        ((accumulated_gradients.GradientsBefore, "_before_addition"), lambda self, gradient, grad: None),
    ],
    ids=["state", "gradients", "copies"],
)
def test_each_thing_that_is_undone_is_needed(model, fit, monkeypatch, guarded, broken):
    plain = copy.deepcopy(model)
    seed()
    expected = [step(plain, batch_of()) for _ in range(2)], moved(plain)

    monkeypatch.setattr(*guarded, broken)
    seed()
    losses = [step(model, batch_of())]
    model.tight.refuse("backward")
    try:
        losses.append(fit.run(step, batch_of()))
    except torch.OutOfMemoryError as error:  # gradients were added to and not copied: that is seen
        assert "wrote gradients" in error.__notes__[0]
    assert (losses, moved(model)) != expected


def test_gradients_that_nobody_had_are_never_copied(model, fit, monkeypatch):
    monkeypatch.setattr(accumulated_gradients.GradientsBefore, "_before_addition", None)
    fit.run(step, batch_of())


def test_gradients_are_copied_one_by_one_as_backward_adds_to_them(model, fit):
    step(model, batch_of())
    kept = []
    model.tight.ask = lambda where: kept.extend(  # half-way, in forward and in backward
        [sum(g.copy is not None for g in gradients._gradients.values())]
    )
    made = accumulated_gradients.GradientsBefore.__init__
    gradients = None

    def note(self, spare_bytes):
        nonlocal gradients
        gradients = self
        made(self, spare_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulated_gradients.GradientsBefore, "__init__", note)
        fit.run(step, batch_of())
    behind = len(list(model.second.parameters()))
    assert kept == [0, behind]


def test_other_weights_that_the_step_trains_are_undone_too(model, fit):
    head = nn.Linear(64, 8)
    plain, plain_head = copy.deepcopy(model), copy.deepcopy(head)

    def with_head(model, head):
        def step(model, x):
            loss = head(model(x)).square().mean()
            loss.backward()
            return loss.item()

        return step

    seed()
    losses = [with_head(plain, plain_head)(plain, batch_of()) for _ in range(3)]
    seed()
    ours = []
    for refused in (False, False, True):
        if refused:
            model.tight.refuse("backward")
        ours.append(fit.run(with_head(model, head), batch_of()))
    assert ours == losses
    assert moved(head) == moved(plain_head)


def test_other_weights_that_are_seen_too_late_are_not_added_to_twice(model, fit):
    head = nn.Linear(64, 8)
    head(torch.randn(2, 64)).sum().backward()

    def with_head(model, x):
        head(model(x)).square().mean().backward()

    fit.run(step, batch_of())  # from now on, it is taken for a step that trains the model alone
    model.tight.refuse("backward")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit.run(with_head, batch_of())
    assert "what its backward added to is not known" in caught.value.__notes__[0]

    before = moved(head)
    model.tight.refuse("backward")
    fit.run(with_head, batch_of())  # now it is known
    assert moved(head) != before


def test_an_earlier_backward_that_nobody_looked_at_is_not_undone_by_halves(model, fit):
    fit.run(step, batch_of())  # from now on, it is taken for a step of one backward
    model.tight.refuse("forward", after=1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit.run(micro_batches, batch_of())
    assert "what its backward added to is not known" in caught.value.__notes__[0]
    model.tight.refuse("forward", after=1)
    fit.run(micro_batches, batch_of())


def test_the_copies_are_no_part_of_the_recorded_step(model):
    graphs = []
    for call in (lambda fit: step(model, batch_of()), lambda fit: fit.run(step, batch_of())):
        model.zero_grad()
        step(model, batch_of())
        with lowtide.fit(model, budget=budget_for(model)) as fit:
            call(fit)
            fit.wait()
            graphs.append([op.name for op in fit.graph.ops])
    assert graphs[0] == graphs[1]


def test_a_step_that_never_fits_ends_with_its_own_first_error(model, fit):
    step(model, batch_of())
    seed()
    before, budget = moved(model), fit.status().budget_bytes
    tight, errors = model.tight, []
    tight.ask = lambda where: where == "backward" and raise_new(errors)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit.run(step, batch_of())

    assert caught.value is errors[0]
    assert 3 <= len(errors) <= 8
    assert caught.value.__notes__[0].startswith("lowtide ran the step again within ")
    assert caught.value.__notes__[0].count("iB") == len(errors) - 1
    assert moved(model) == before
    # One giant batch does not make all later steps slow.
    assert 0.85 * budget < fit.status().budget_bytes < budget

    del tight.ask
    fit.run(step, batch_of())
    fit.wait()
    fit.run(step, batch_of())
    assert fit.status().in_force


def raise_new(errors):
    errors.append(torch.OutOfMemoryError(REFUSED))
    raise errors[-1]


def test_nothing_is_tried_below_the_least_that_the_planner_knows(model):
    with lowtide.fit(model, budget=budget_for(model, 0.05)) as fit:
        fit.run(step, batch_of())
        fit.wait()
        fit.run(step, batch_of())
        assert "running at the least there is" in reasons_of(fit)
        model.tight.refuse("backward", times=2)
        budget = fit.status().budget_bytes
        with pytest.raises(torch.OutOfMemoryError) as caught:
            fit.run(step, batch_of())
        assert "the least budget that there is" in caught.value.__notes__[0]
        assert model.tight.times == 1
        assert fit.status().budget_bytes == budget


def writes_a_weight(model, x):
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    step(model, x)


def writes_the_batch(model, x):
    step(model, x.add_(1))


def clips_gradients(model, x):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    step(model, x)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (writes_a_weight, "it wrote a parameter"),
        (writes_the_batch, "it wrote the batch"),
        (clips_gradients, "it wrote gradients by other means than backward"),
    ],
)
def test_what_cannot_be_undone_does_not_run_again(model, fit, what, why):
    step(model, batch_of())
    model.tight.refuse("forward")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit.run(what, batch_of())
    assert caught.value.__notes__[0] == f"lowtide did not run the step again: {why}."


def test_with_other_ranks_nothing_runs_again(model, fit, monkeypatch):
    monkeypatch.setattr(recovery, "_has_other_ranks", lambda: True)
    model.tight.refuse("forward")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit.run(step, batch_of())
    assert "other ranks" in caught.value.__notes__[0]


def test_other_errors_are_the_users(model, fit):
    model.tight.refuse("backward", error=ValueError("mine"))
    budget = fit.status().budget_bytes
    with pytest.raises(ValueError, match="mine") as caught:
        fit.run(step, batch_of())
    assert not hasattr(caught.value, "__notes__")
    assert fit.status().budget_bytes == budget
    assert fit.run(step, batch_of()) > 0


def test_the_failed_run_holds_no_memory_while_the_next_one_runs(model, fit):
    held = []

    def holding(model, x):
        gc.disable()
        alive = [reference for reference in held if reference() is not None]
        kept = model.first(x)
        held.append(weakref.ref(kept))
        (lambda: (kept, step(model, x)))()  # a frame of the traceback whose function has a closure
        return len(alive)

    model.tight.refuse("backward")
    try:
        assert fit.run(holding, batch_of()) == 0
    finally:
        gc.enable()
    assert len(held) == 2


def test_the_outermost_run_is_the_one_that_runs_again(model, fit):
    outer = []

    def with_a_run_inside(model, x):
        outer.append(x)
        return fit.run(step, x)

    model.tight.refuse("backward")
    fit.run(with_a_run_inside, batch_of())
    assert len(outer) == 2


def test_after_remove_a_run_is_plain(model, fit):
    fit.remove()
    model.tight.refuse("forward")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit.run(step, batch_of())
    assert not hasattr(caught.value, "__notes__")


def test_a_percentage_that_waits_for_its_first_step_runs_again_too(model):
    with lowtide.fit(model, budget="80%") as fit:
        model.tight.refuse("backward", times=2)
        fit.run(step, batch_of())
        fit.wait()
        fit.run(step, batch_of())
        assert fit.status().in_force


# -- whose error it is --------------------------------------------------------------------------------------


def test_another_models_error_changes_nothing(model, fit):
    other, budget = nn.Sequential(nn.Linear(64, 64), Tight()), fit.status().budget_bytes
    output = model(batch_of())  # our backward is still to come
    other[1].refuse("backward")
    with pytest.raises(torch.OutOfMemoryError):
        other(output.detach()).sum().backward()
    other[1].refuse("forward")
    with pytest.raises(torch.OutOfMemoryError):
        other(output)
    assert fit.status().budget_bytes == budget

    other[1].refuse("backward")  # one that trains both is ours
    with pytest.raises(torch.OutOfMemoryError):
        other(output).sum().backward()
    assert fit.status().budget_bytes < budget


# -- how much -----------------------------------------------------------------------------------------------


def test_what_was_missing_is_read_from_the_message():
    cuda = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 512.00 MiB "
        "is free. Including non-PyTorch memory, this process has 78.60 GiB memory in use."
    )
    cpu = torch.device("cpu")
    assert missing_bytes(torch.OutOfMemoryError(cuda), cpu) == 3 * 2**29
    assert missing_bytes(torch.OutOfMemoryError(cuda.replace("512.00 MiB", "3.00 GiB")), cpu) is None
    assert missing_bytes(torch.OutOfMemoryError("no memory"), cpu) is None
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert 2**54 < missing_bytes(caught.value, cpu) < 2**55
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_the_budget_is_lower_by_what_was_missing(model, fit):
    fit.run(step, batch_of())
    fit.wait()
    fit.run(step, batch_of())
    peak = fit.plan.predicted_peak_bytes
    missing = 64 * 1024
    message = f"CUDA out of memory. Tried to allocate {missing // 1024 + 1}.00 KiB. of which 1.00 KiB is free."
    model.tight.refuse("forward", error=torch.OutOfMemoryError(message))
    fit.run(step, batch_of())
    assert fit.status().budget_bytes == peak - missing


_LIMITED = """
import resource, sys, torch, lowtide
torch.set_num_threads(1)
torch.manual_seed(0)
layers = []
for _ in range(8):
    layers += [torch.nn.Linear(64, 64), torch.nn.Hardswish(), torch.nn.Dropout(0.1)]
model, x = torch.nn.Sequential(*layers), torch.randn(131072, 64)  # 32 MiB a tensor, 24 of them stored: 768 MiB
def step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss.item()
fit = lowtide.fit(model, budget=900 * 2**20)  # more than there is
fit.run(step, x[:64])
torch.manual_seed(1)
if sys.argv[1] == "limited":
    used = next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (used + 500 * 2**20,) * 2)
print(fit.run(step, x), sum(p.grad.double().sum().item() for p in model.parameters()))
assert ("out of memory" in str(fit.status())) == (sys.argv[1] == "limited")
"""


@pytest.mark.thorough
def test_a_real_limit_of_memory_gives_the_same_bits():
    assert run(_LIMITED, "limited") == run(_LIMITED, "free")


def held(error):
    """Bytes by name in the note on what held the memory."""
    (note,) = [note for note in error.__notes__ if "it holds" in note or "this step held" in note]
    rows = [line.split(maxsplit=2) for line in note.splitlines()[1:]]
    return note, {name: parse_budget(number + unit) for number, unit, name in rows}


def test_the_error_says_by_module_what_held_the_memory(model, fit):
    model.tight.refuse("forward", times=99)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit.run(step, batch_of())

    note, rows = held(caught.value)
    # Each of the two layers before keeps its hidden tensor, and the norm its input.
    assert note.startswith("lowtide: when memory ran out, this step held\n")
    made = {name for name, size in rows.items() if size >= batch_of().nbytes}
    assert any(name.startswith("first") for name in made) and "norm" in made
    assert not any(name.startswith("second") for name in rows)  # it had not run


def test_so_does_an_error_that_fit_run_did_not_see(model, fit):
    model.tight.refuse("forward")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(model, batch_of())
    assert "norm" in held(caught.value)[1]


def test_under_a_plan_the_error_says_what_its_peak_holds(model):
    with lowtide.fit(model, budget=budget_for(model, 0.7)) as fit:
        step(model, batch_of())
        fit.wait()
        model.tight.refuse("backward")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(model, batch_of())
        note, rows = held(caught.value)
        assert "ran under a plan for" in note
        assert sum(rows.values()) == pytest.approx(fit.plan.predicted_peak_bytes, rel=0.01)
