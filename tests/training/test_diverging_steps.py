"""Steps that run other ops than their plan: bitwise the same, within the budget, and told."""

import copy

import pytest
import torch
from support.watched_training import activation_bytes, batch_of, reasons_of, resident_bytes, same, train
from torch import nn

import lowtide
from lowtide.device import allocation_counter
from lowtide.measurement.allocator import peak_bytes
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.planned_bytes import PlannedBytes
from lowtide.tape.tape import Tape
from lowtide.training.kinds_of_steps import UsualKinds, WholeNumbers
from lowtide.training.planned_step import PlannedStep
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.step_memory import StepMemory

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN, EXTRA, SKIPPED, OTHER_OPS, WRITTEN = "plain", "extra layers", "skipped layers", "other ops", "written in place"


def block(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Changing(nn.Module):
    """Runs its layers, or what ``way`` says."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.extra = nn.ModuleList(block() for _ in range(3))
        self.way = PLAIN

    def forward(self, x, scale=1):
        for n, layer in enumerate(self.layers):
            if self.way == SKIPPED and n in (2, 5):
                continue
            if self.way == OTHER_OPS and n > 2:
                x = x + layer[2](nn.functional.silu(layer[0](x)).tanh().exp())
            else:
                h = layer(x)
                x = x + h.sigmoid() * 2
                if self.way == WRITTEN and n == 4:
                    h.add_(1.0)
            if self.way == EXTRA and n == 3:
                for layer in self.extra:
                    x = x + layer(x)
        return x


def with_gradients(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def allowance(model: nn.Module, share: float = 0.5) -> int:
    return int(share * activation_bytes(model, batch_of()))


def fitted(model: nn.Module, allowed: int) -> lowtide.Fit:
    """A fit of ``model`` with a plan for its plain way in force; gradients are there."""
    fit = lowtide.fit(with_gradients(model), budget=2 * resident_bytes(model) + allowed)
    step(model)
    fit.wait()
    step(model)
    assert fit.status().in_force
    return fit


def step(model: nn.Module) -> int:
    """The allocator's peak of one step."""
    model.zero_grad(set_to_none=False)
    return peak_bytes(lambda: model(batch_of()).square().mean().backward())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def no_online_rest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tape, "_diverge", lambda self, **how: False)


@pytest.mark.parametrize("way", [EXTRA, SKIPPED, OTHER_OPS])
def test_a_step_of_other_ops_goes_on_online_within_the_budget(way):
    model = Changing()
    plain = with_gradients(copy.deepcopy(model))
    allowed = allowance(model, 0.6)
    with fitted(model, allowed) as fit:
        model.way = plain.way = way
        peak = step(model)
        status = fit.status()
    step(plain)

    assert all(map(torch.equal, gradients(model), gradients(plain)))
    assert peak <= 1.005 * allowed
    assert not status.in_force and status.planned_steps == 1


def test_without_the_online_rest_it_takes_more(monkeypatch):
    model = Changing()
    allowed = allowance(model, 0.6)
    no_online_rest(monkeypatch)
    with fitted(model, allowed):
        model.way = EXTRA
        assert step(model) > 1.2 * allowed


def test_a_write_that_the_plan_does_not_know_spoils_no_replay():
    model = Changing()
    plain = copy.deepcopy(model)
    x = batch_of(512)  # so that what is stored sets the peak, and not the gradients
    with lowtide.fit(model, budget=resident_bytes(model) + x.nbytes + int(0.2 * activation_bytes(model, x))) as fit:
        for way in (PLAIN, PLAIN, WRITTEN):
            model.way = plain.way = way
            assert same(train(plain, [x]), train(model, [x]))
            fit.wait()
        assert fit.status().planned_steps == 1


def test_a_later_call_of_another_shape_is_online():
    model = Changing()
    plain = with_gradients(copy.deepcopy(model))
    allowed = allowance(model, 0.8)

    def two_calls(model, rows):
        model.zero_grad(set_to_none=False)
        return peak_bytes(lambda: (model(batch_of()).square().mean() + model(batch_of(rows)).mean()).backward())

    with lowtide.fit(with_gradients(model), budget=2 * resident_bytes(model) + allowed) as fit:
        two_calls(model, 32)
        fit.wait()
        two_calls(model, 32)
        assert fit.status().in_force
        peak = two_calls(model, 96)
        assert not fit.status().in_force
    two_calls(plain, 96)

    assert all(map(torch.equal, gradients(model), gradients(plain)))
    assert peak <= 1.005 * allowed


class Skipping(nn.Module):
    """Runs the layers that ``kept`` says, or what ``drawn`` says: no argument tells."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.drawn = tuple(range(layers))

    def forward(self, x, count=None):
        for n in self.drawn[:count]:
            x = x + self.layers[n](x).sigmoid() * 2
        return x


def skipping_fit(model: nn.Module) -> lowtide.Fit:
    return lowtide.fit(with_gradients(model), budget=2 * resident_bytes(model) + allowance(model, 0.6))


def skip(model: nn.Module, fit: lowtide.Fit, *args: object) -> None:
    plain = with_gradients(copy.deepcopy(model))
    for trained in (plain, model):
        trained.zero_grad(set_to_none=False)
        trained(batch_of(), *args).square().mean().backward()
    assert all(map(torch.equal, gradients(model), gradients(plain)))
    fit.wait()


def test_steps_that_never_repeat_run_online_and_that_is_told_once():
    model = Skipping()
    with skipping_fit(model) as fit:
        for n in range(40):
            model.drawn = tuple(range(8))[: 2 + n % 7] + (n % 8, n // 8)
            skip(model, fit)
        status = fit.status()

    assert sum("run online from now on" in reason for reason in status.reasons) == 1
    assert status.plans == 0 and not status.in_force


@pytest.mark.parametrize("sees_kinds", [True, False])
def test_the_usual_kind_of_step_keeps_its_plan_and_rarer_ones_leave_it(sees_kinds, monkeypatch):
    """Half of the steps skip a layer, each another one: no plan for these, though the first step was of them."""
    if not sees_kinds:
        monkeypatch.setattr(UsualKinds, "is_usual", lambda self, pattern, kind: False)
        monkeypatch.setattr(UsualKinds, "is_worth_a_plan", lambda self, pattern, kind: True)
    model = Skipping()
    with skipping_fit(model) as fit:
        for n in range(48):
            skipped = n // 2 % 8 if n % 2 == 0 else None
            model.drawn = tuple(m for m in range(8) if m != skipped)
            skip(model, fit)
            if n == 23:
                before = fit.status()
        status = fit.status()

    planned = status.planned_steps - before.planned_steps
    assert (planned == 12) == sees_kinds, (planned, status.reasons)


def test_a_kind_that_takes_the_place_of_the_usual_one_is_planned():
    model = Skipping()
    with skipping_fit(model) as fit:
        for n in range(32):
            model.drawn = tuple(range(8))[n >= 8 :]
            skip(model, fit)
        status = fit.status()

    assert status.in_force and status.planned_steps >= 7 + 8


@pytest.mark.parametrize("looks", [True, False])
def test_numbers_that_say_what_runs_give_each_kind_of_step_a_plan(looks, monkeypatch):
    if not looks:
        monkeypatch.setattr(WholeNumbers, "look", lambda self: None)
    model = Skipping()
    with skipping_fit(model) as fit:
        for n in range(24):
            skip(model, fit, 4 + n % 3)
            if n == 15:
                before = fit.status()
        status = fit.status()

    assert (status.planned_steps - before.planned_steps == 8) == looks, status.reasons
    assert (status.plans >= 3) == looks


@pytest.mark.parametrize("counts", [True, False])
def test_a_number_that_counts_steps_or_stays_makes_no_kinds(counts):
    model = Skipping()
    with skipping_fit(model) as fit:
        for n in range(30):
            model.drawn = tuple(range(8))[n == 2 :]
            skip(model, fit, 100 + n * counts)
        status = fit.status()

    assert status.in_force and status.planned_steps >= (16 if counts else 28)


def test_a_rare_divergence_leaves_the_plan_in_force():
    model = Changing()
    with lowtide.fit(model, budget=resident_bytes(model) + allowance(model)) as fit:
        for n in range(24):
            model.way = EXTRA if n % 5 == 4 else PLAIN
            train(model, [batch_of()])
            fit.wait()
        status = fit.status()

    assert "run online" not in reasons_of(fit)
    assert status.plans == 1 and status.planned_steps >= 16


@pytest.mark.parametrize("looks", [True, False])
def test_other_ops_under_a_plan_that_keeps_everything_are_noticed(looks, monkeypatch):
    monkeypatch.setattr(StepMemory, "planned_bytes", lambda self, step: None)  # it shows before the step is over
    if not looks:
        monkeypatch.setattr(PlannedStep, "makes_other_nodes", lambda self, made: False)
        monkeypatch.setattr(PlansByShape, "note_peak", lambda self, planned, peak: False)  # it shows as well
    model = Changing()
    allowed = allowance(model, 1.1)
    with fitted(model, allowed) as fit:
        assert fit.plan.counts["recompute"] == 0
        model.way = EXTRA
        step(model)
        assert ("ran other ops than its plan" in reasons_of(fit)) == looks == (not fit.status().in_force)
        model.way = PLAIN
        step(model)
        fit.wait()
        step(model)
        model.way = EXTRA
        assert (step(model) <= 1.005 * allowed) == looks  # its ops are followed one by one now


class Rows:
    """A batch whose sizes no signature shows."""

    def __init__(self, rows: int) -> None:
        self.x = batch_of(rows)


class OfRows(Changing):
    def forward(self, rows):
        return super().forward(rows.x)


class OfChosen(Changing):
    """Its data say how many rows take part."""

    def forward(self, rows):
        x = torch.zeros(512, rows.x.shape[1])
        x[: len(rows.x)] = rows.x + 100.0
        return super().forward(x[x[:, 0] > 50])


def no_look_at_planned_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepMemory, "planned_bytes", lambda self, step: None)


@pytest.mark.parametrize("is_looked_at", [True, False])
@pytest.mark.parametrize(  # where rows of the planned number are dropped, each of another size tells
    "model_of, keeps",
    [(OfRows, True), (OfChosen, True), (OfChosen, False)],
    ids=["hidden", "chosen", "chosen, dropped"],
)
def test_a_step_of_larger_sizes_than_planned_leaves_its_plan_within_the_budget(
    model_of, keeps, is_looked_at, monkeypatch
):
    allocation_counter.prepare(waits=True)
    if not is_looked_at:
        no_look_at_planned_bytes(monkeypatch)
    model = with_gradients(model_of())
    plain = with_gradients(copy.deepcopy(model))

    def run(model, rows):
        model.zero_grad(set_to_none=False)
        batch = Rows(rows)
        return peak_bytes(lambda: model(batch).square().mean().backward())

    allowed = int((1.05 if keeps else 0.7) * run(plain, 128))
    with lowtide.fit(model, budget=2 * resident_bytes(model) + allowed) as fit:
        for _ in range(3):
            run(model, 128)
            fit.wait()
        assert fit.status().in_force and (fit.plan.counts["recompute"] == 0) == keeps
        peak = run(model, 224)
        status = fit.status()
    plain_peak = run(plain, 224)

    assert all(map(torch.equal, gradients(model), gradients(plain)))
    assert (peak <= 1.01 * allowed) == is_looked_at and plain_peak > 1.4 * allowed
    assert any("more than planned" in reason for reason in status.reasons) == is_looked_at
    assert status.plan_left_steps == is_looked_at


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_model_without_modules_leaves_its_plan_between_two_of_its_ops(is_looked_at, monkeypatch):
    allocation_counter.prepare(waits=True)
    if not is_looked_at:
        monkeypatch.setattr(PlannedBytes, "is_passed", lambda self, op, has_run: False)

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(64))

        def forward(self, rows):
            x = torch.zeros(1024, 64)
            x[: len(rows.x)] = rows.x + 100.0
            x = x[x[:, 0] > 50] * self.scale
            for _ in range(16):
                x = torch.tanh(x * self.scale).sin()
            return x

    model = with_gradients(Chain())
    plain = with_gradients(copy.deepcopy(model))

    def run(model, rows):
        model.zero_grad(set_to_none=False)
        batch = Rows(rows)
        return peak_bytes(lambda: model(batch).square().mean().backward())

    allowed = int(0.5 * run(plain, 512))
    with lowtide.fit(model, budget=2 * resident_bytes(model) + allowed) as fit:
        for _ in range(3):
            run(model, 512)
            fit.wait()
        assert fit.status().in_force and fit.plan.counts["recompute"] > 0
        peak = run(model, 896)
        status = fit.status()
    run(plain, 896)

    assert all(map(torch.equal, gradients(model), gradients(plain)))
    assert (peak <= 1.02 * allowed) == is_looked_at == bool(status.plan_left_steps)


class Choosing(nn.Module):
    """Rows, before or inside a module of its own."""

    def forward(self, x, chosen_by):
        return x[x[:, 0] > 0 if chosen_by == "mask" else torch.arange(len(x) // 2)]


@pytest.mark.parametrize(
    "place, where",
    [("in a layer", "choose"), ("in the model", "the model"), ("in the loss", "the loss outside the model")],
)
@pytest.mark.parametrize("chosen_by", ["mask", "numbers of rows"])
def test_the_op_whose_sizes_depend_on_data_is_told_and_no_other(chosen_by, place, where):
    class Model(Changing):
        def __init__(self):
            super().__init__()
            self.choose = Choosing()

        def forward(self, x):
            if place == "in a layer":
                x = self.choose(x, chosen_by)
            if place == "in the model":
                x = self.choose.forward(x, chosen_by)
            return super().forward(x)

    def train(model):
        out = model(batch_of())
        if place == "in the loss":
            out = Choosing().forward(out, chosen_by)
        out.square().mean().backward()

    model = with_gradients(Model())
    with lowtide.fit(model, budget=2 * resident_bytes(model) + allowance(model)) as fit:
        train(model)
        fit.wait()
        train(model)
        assert fit.status().in_force
        told = [reason for reason in fit.status().reasons if "depend on data" in reason]

    assert [reason.split(" depend")[0] for reason in told] == [f"sizes of aten.index.Tensor in {where}"] * (
        chosen_by == "mask"
    )


def test_a_step_that_ends_short_of_its_plan_leaves_nothing_in_place():
    """What the conftest looks at after each test."""

    def train(model: nn.Module, *, times: int) -> None:
        h = model(batch_of())
        for _ in range(times):  # the plan drops outside the model
            h = h.repeat(1, 2).sigmoid()
        h.square().mean().backward()

    model = with_gradients(Changing())
    with lowtide.fit(model, budget=2 * resident_bytes(model) + allowance(model)) as fit:
        train(model, times=5)
        fit.wait()
        train(model, times=5)
        assert fit.status().in_force and fit.plan.counts["recompute"] > 0
        train(model, times=4)
        assert not fit.status().in_force


def test_evaluation_and_logging_between_steps_leave_the_plan_in_force():
    model = Changing()
    with fitted(model, allowance(model)) as fit:
        for _ in range(3):
            with torch.no_grad():
                model(batch_of(500))
            step(model)
            assert fit.status().in_force


def test_an_error_in_the_online_rest_ends_that_step_only():
    model = Changing()

    def failing(module, args):
        raise RuntimeError("theirs")

    with fitted(model, allowance(model)) as fit:
        model.way = EXTRA
        handle = model.extra[1].register_forward_pre_hook(failing)
        with pytest.raises(RuntimeError, match="theirs"):
            step(model)
        handle.remove()
        model.way = PLAIN
        for _ in range(2):
            plain = with_gradients(copy.deepcopy(model))
            step(model), step(plain)
            assert all(map(torch.equal, gradients(model), gradients(plain)))
            fit.wait()
        step(model)
        assert fit.status().in_force


def test_the_batch_counts_in_what_a_step_that_left_its_plan_may_take(monkeypatch):
    model = with_gradients(Changing())
    with fitted(model, allowance(model)) as fit:
        began, begin_step = [], OnlineTape.begin_step
        monkeypatch.setattr(StepMemory, "made_bytes", lambda self: None)
        monkeypatch.setattr(PlannedStep, "made_bytes_after", lambda self, op: 0)
        monkeypatch.setattr(OnlineTape, "begin_step", lambda self, size=0: began.append(size) or begin_step(self, size))
        model.way = EXTRA
        step(model)

        assert not fit.status().in_force and began == [batch_of().nbytes]
