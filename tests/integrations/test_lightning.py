"""lowtide as one argument of Lightning's Trainer: the same losses and weights, within the budget, then gone."""

import copy
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.training_steps import is_clean
from support.watched_training import Layered, resident_bytes
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader

from lowtide import IntegrationError
from lowtide.integrations import versions
from lowtide.measurement.allocator import measuring

lightning = pytest.importorskip("lightning.pytorch")

from lowtide.integrations.lightning import LowtideCallback  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

ROWS = 256


class Autoencoder(lightning.LightningModule):
    """Its training step calls its parts and never itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Layered(3), Layered(3)
        self.losses = []

    def loss(self, x):
        return F.mse_loss(self.decoder(self.encoder(x).tanh()), x)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.losses.append(self.loss(batch).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class CallsItself(Autoencoder):
    def forward(self, x):
        return self.decoder(self.encoder(x).tanh())

    def loss(self, x):
        return F.mse_loss(self(x), x)


class Functional(Autoencoder):
    """Its training step works on parameters, without a module's call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def loss(self, x):
        for _ in range(8):
            x = F.dropout(F.gelu(F.linear(x, self.weight)), 0.1, training=self.training)
        return x.square().mean()


class Adversarial(Autoencoder):
    """Manual optimization: two backwards and two optimizers in a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for part, optimizer in zip((self.decoder, self.encoder), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch) + part(batch).square().mean()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self):
        return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (self.decoder, self.encoder)]


class EachStep(lightning.Callback):
    """The allocator's peak of each training step, with what was resident; waits for the plan before some."""

    def __init__(self, lowtide=None, waits_before=(2,)):
        self.lowtide, self.waits_before = lowtide, waits_before
        self.peaks = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.lowtide is not None and len(self.peaks) in self.waits_before:
            self.lowtide.fit.wait()
        state = [t for s in trainer.optimizers for v in s.state.values() for t in v.values() if torch.is_tensor(t)]
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self._resident = resident_bytes(pl_module) + sum(t.nbytes for t in (batch, *state, *grads))
        self._measuring = measuring("cpu")
        self._counter = self._measuring.__enter__()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self._stop()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._stop()  # accumulated: no optimizer's step

    def _stop(self):
        if self._measuring is not None:
            self._measuring.__exit__(None, None, None)
            self.peaks.append(self._resident + self._counter.peak)
            self._measuring = None


def loader(num=6):
    return DataLoader(
        torch.randn(num * ROWS, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(1)),
        batch_size=ROWS,
    )


def trained(model, *callbacks, epochs=1, num=6, validates=False, library=lightning, **options):
    torch.manual_seed(3)
    trainer = library.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **{"enable_checkpointing": False, **options},
    )  # fmt: skip
    trainer.fit(model, loader(num), loader(1) if validates else None)
    return trainer


def same_weights(a, b):
    return all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))


def budget_between(peaks, model):
    """In bytes: less than what a plain run took, in which weights, gradients and AdamW's state were there."""
    resident = 4 * resident_bytes(model)
    return int(resident + 0.7 * (max(peaks) - resident))


CASES = {
    "parts": (Autoencoder, {}),
    "itself": (CallsItself, {}),
    "functional": (Functional, {}),
    "accumulated": (Autoencoder, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "bf16": (CallsItself, {"precision": "bf16-mixed"}),
    "validated": (Autoencoder, {"validates": True, "val_check_interval": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_bitwise_the_same_within_the_budget_and_under_a_plan(case):
    kind, options = CASES[case]
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    each_plain = EachStep()
    trained(plain, each_plain, **options)
    budget = budget_between(each_plain.peaks, model)
    ours = LowtideCallback(budget=budget)
    each = EachStep(ours)
    trainer = trained(model, ours, each, **options)

    assert model.losses == plain.losses
    assert same_weights(model, plain)
    status = ours.fit.status()
    assert status.steps == 6 and status.planned_steps in (4, 5), status  # the planner may answer before the second step
    assert ours.fit.plan.counts["recompute"] > 0
    assert max(each.peaks[2:]) <= budget < max(each_plain.peaks), (each.peaks, budget)
    assert is_clean(model)
    assert "training_step" not in vars(trainer.strategy)


def test_with_manual_optimization_every_backward_ends_a_step():
    torch.manual_seed(0)
    plain = Adversarial()
    model = copy.deepcopy(plain)
    trained(plain)
    ours = LowtideCallback(budget="80%")
    trained(model, ours, EachStep(ours))

    assert len(model.losses) == 12 and model.losses == plain.losses
    assert same_weights(model, plain)
    status = ours.fit.status()
    assert (status.steps, status.plans) == (12, 2) and 8 <= status.planned_steps <= 10, status
    assert all(plan.counts["recompute"] > 0 for plan in ours.fit.plans)
    assert is_clean(model)


def test_a_second_fit_of_the_trainer_is_fitted_anew_and_validation_between_is_none_of_it():
    torch.manual_seed(0)
    plain = Autoencoder()
    model = copy.deepcopy(plain)
    ours = LowtideCallback(budget="80%")
    each = EachStep(ours, waits_before=(2, 8))
    for m, callbacks in ((plain, ()), (model, (ours, each))):
        trainer = trained(m, *callbacks)
        first = ours.fit
        trainer.validate(m, loader(1), verbose=False)
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit_loop.max_epochs = 1
        trainer.fit(m, loader())

    assert len(model.losses) == len(plain.losses) > 8 and model.losses == plain.losses
    assert same_weights(model, plain)
    assert ours.fit is not first
    assert ours.fit.status().planned_steps in (4, 5)
    assert is_clean(model)


class Fails(lightning.Callback):
    def __init__(self, error):
        self.error = error

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 3:
            raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=repr)
def test_an_error_leaves_nothing_behind(error):
    model, ours = Autoencoder(), LowtideCallback(budget="80%")
    handler = signal.getsignal(signal.SIGINT)  # Lightning sets another, and exits
    with pytest.raises((ZeroDivisionError, SystemExit)):
        trained(model, ours, Fails(error))
    signal.signal(signal.SIGINT, handler)
    assert ours.fit.status().why_not == "the fit was removed"
    assert is_clean(model)
    again = LowtideCallback(budget="80%")
    trained(model, again)
    assert again.fit.status().steps == 6


def test_a_checkpoint_holds_nothing_of_lowtide(tmp_path):
    saved = {}
    for name, callbacks in (("plain", ()), ("ours", (LowtideCallback(budget="80%"),))):
        torch.manual_seed(0)
        keep = lightning.callbacks.ModelCheckpoint(tmp_path / name, save_last=True, every_n_train_steps=2)
        trained(Autoencoder(), keep, *callbacks, enable_checkpointing=True)
        saved[name] = torch.load(tmp_path / name / "last.ckpt", weights_only=True)
    plain, ours = saved["plain"], saved["ours"]
    assert ours.keys() == plain.keys()
    assert list(ours["state_dict"]) == list(plain["state_dict"])
    assert all(map(torch.equal, ours["state_dict"].values(), plain["state_dict"].values()))
    assert ours["callbacks"].keys() and "lowtide" not in str([*ours["callbacks"], *ours["loops"]]).lower()


def test_each_plan_and_the_end_are_logged(caplog):
    caplog.set_level("INFO")
    ours = LowtideCallback(budget="80%")
    trained(Autoencoder(), ours, EachStep(ours))
    lines = [record.getMessage() for record in caplog.records if "lowtide: " in record.getMessage()]
    assert lines[0] == "lowtide: the budget of a training step is 80%; the first steps are watched"
    planned = sum("planned beside training" in line for line in lines)
    assert planned in (1, 2)  # later steps find gradients in forward, which Lightning frees before backward
    assert re.match("lowtide: The plan is in force: [45] of 6 steps ran under a plan.", lines[-1])
    assert "Observed peak: " in lines[-1] and " Predicted overhead: up to " in lines[-1]


def test_the_library_under_its_older_name_is_the_same():
    older = pytest.importorskip("pytorch_lightning")
    torch.manual_seed(0)

    class Older(older.LightningModule):
        loss, training_step = Autoencoder.loss, Autoencoder.training_step
        configure_optimizers = Autoencoder.configure_optimizers

        def __init__(self):
            super().__init__()
            self.encoder, self.decoder, self.losses = Layered(3), Layered(3), []

    plain = Older()
    model, ours = copy.deepcopy(plain), LowtideCallback(budget="80%")
    trained(plain, library=older)
    trained(model, ours, library=older)
    assert same_weights(model, plain)
    assert ours.fit.status().steps == 6
    assert is_clean(model)


@pytest.mark.slow
def test_under_ddp_the_step_is_seen_at_the_modules_own_call():
    torch.manual_seed(0)
    plain = Autoencoder()
    model = copy.deepcopy(plain)
    ours = LowtideCallback(budget="80%")
    seam = lightning.callbacks.LambdaCallback(
        on_train_batch_start=lambda trainer, *_: seams.append(vars(trainer.strategy).get("training_step"))
    )
    seams = []
    try:
        trained(plain, strategy=lightning.strategies.DDPStrategy(process_group_backend="gloo"))
        trained(
            model, ours, EachStep(ours), seam, strategy=lightning.strategies.DDPStrategy(process_group_backend="gloo")
        )
    finally:
        torch.distributed.destroy_process_group()
    status = ours.fit.status()
    assert model.losses == plain.losses and same_weights(model, plain)
    assert (status.steps, status.calls) == (6, 6), status
    assert status.planned_steps in (4, 5), status  # the plan may be there before the second
    assert seams == [None] * 6
    assert is_clean(model)


def test_a_checkpoint_wrapper_is_off_while_the_module_is_fitted():
    plain, ours = Autoencoder(), LowtideCallback(budget="50%")
    wrapped = copy.deepcopy(plain)
    wrapped.decoder = checkpoint_wrapper(wrapped.decoder)
    before = wrapped.decoder.checkpoint_fn
    trained(plain)
    trained(wrapped, ours)

    assert wrapped.losses == plain.losses
    assert any("checkpoint_wrapper was on" in reason for reason in ours.fit.status().reasons)
    assert wrapped.decoder.checkpoint_fn is before


class FSDPStrategy(lightning.strategies.SingleDeviceStrategy):
    """Known by its name, as the real one cannot start without accelerators."""


def test_what_does_not_work_is_refused_before_training_starts(monkeypatch):
    one = LowtideCallback()
    cases = [
        ("there are two LowtideCallbacks", Autoencoder(), (one, LowtideCallback()), {}),
        ("strategy FSDPStrategy does not work.*FSDP1", Autoencoder(), (one,), {"strategy": FSDPStrategy("cpu")}),
    ]
    for message, model, callbacks, options in cases:
        with pytest.raises(IntegrationError, match=message):
            trained(model, *callbacks, **options)
        assert model.losses == [] and one.fit is None
    monkeypatch.setitem(versions.SUPPORTED, "lightning", ("99.0", "99.1"))
    with pytest.raises(IntegrationError, match="lightning .* was never tried"):
        trained(Autoencoder(), one)
    with pytest.raises(TypeError, match="batch= is not taken here"):
        LowtideCallback(batch=torch.zeros(1))


def test_numbers_go_to_the_trainers_loggers(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    callback = LowtideCallback("1GiB")
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=4, log_every_n_steps=2, callbacks=[callback], logger=CSVLogger(tmp_path),
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Autoencoder(), loader(4))

    header, *rows = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()
    found = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    assert [row["step"] for row in found] == ["1", "3"]
    assert float(found[-1]["lowtide_budget_bytes"]) == 2**30
    assert float(found[-1]["lowtide_observed_peak_bytes"]) == callback.fit.status().observed_peak_bytes
