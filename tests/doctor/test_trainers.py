"""Trainers that let the doctor look, and train the same afterwards."""

import functools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from support import checkpointing_word
from support.sick_setups import TOKENS, Stack, llama, mlp
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

from lowtide.integrations import transformers_doctor
from lowtide.integrations.transformers_doctor import DoctorCallback


def test_a_trainer_looks_when_training_begins(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(transformers_doctor.logger, "warning", said.append)

    def losses(*callbacks):
        model = llama(attention_dropout=0.1)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1,
            disable_tqdm=True, **checkpointing_word.asking(use_reentrant=False, preserve_rng_state=False),
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in TOKENS["input_ids"]] * 8
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    callback = DoctorCallback(only=["LT001", "LT003"])

    assert losses(callback) == losses()
    assert callback.found.codes == ("LT001", "LT003")
    assert len(said) == 1 and "WRONG LT003" in said[0]


class Sampling(Trainer):
    """As TRL's: the data set holds prompts, the loss counts, and inputs are made in the step."""

    sampled, counted = 0, 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._metrics = {"train": defaultdict(list)}

    def _prepare_inputs(self, raw):
        self.sampled += 1
        ids = torch.cat([raw["prompt"], torch.randint_like(raw["prompt"], 0, 64)], dim=1)
        return {"input_ids": ids, "labels": ids}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.counted += 1
        loss = model(**inputs).loss
        self._metrics["train"]["loss"].append(loss.item())
        return loss


def test_a_trainer_that_makes_its_inputs_in_the_step_is_looked_at_with_those(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_doctor.logger, "warning", lambda _: None)

    def trained(*callbacks):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
            remove_unused_columns=False,
            **checkpointing_word.asking(use_reentrant=False, preserve_rng_state=False),
        )  # fmt: skip
        rows = [{"prompt": row} for row in TOKENS["input_ids"]] * 8
        model = llama(attention_dropout=0.1)
        trainer = Sampling(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))
        trainer.train()
        assert not {"training_step", "_prepare_inputs"} & vars(trainer).keys()
        return trainer._metrics["train"]["loss"], trainer.sampled, trainer.counted

    callback = DoctorCallback(only=["LT001", "LT003"])
    looked = trained(callback)

    assert looked == trained()
    assert len(looked[0]) == looked[1] == looked[2] == 2
    assert callback.found.codes == ("LT001", "LT003")


def test_a_trainer_with_a_step_of_its_own_is_not_looked_at_on_several_ranks(monkeypatch):
    said, trainer = [], Sampling.__new__(Sampling)
    monkeypatch.setattr(transformers_doctor.logger, "warning", said.append)
    monkeypatch.setattr(transformers_doctor, "_calling_trainer", lambda: trainer)
    callback = DoctorCallback()

    callback.on_train_begin(SimpleNamespace(world_size=2), SimpleNamespace(), model=None)

    assert callback.found is None and "training_step" not in vars(trainer)
    assert len(said) == 1 and "could not look: Sampling" in said[0]


def lightning_losses(tmp_path, *callbacks, manual=False):
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            how = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            self.net, self.seen, self.automatic_optimization = Stack(lambda: mlp(0.2), how), [], not manual

        def training_step(self, batch, index):
            loss = self.net(batch).square().mean()
            self.log("loss", loss, on_epoch=True)
            if manual:
                self.manual_backward(loss)
                self.optimizers().step()
            return {"loss": loss}

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    torch.manual_seed(3)
    rows = torch.utils.data.DataLoader(torch.randn(32, 64), batch_size=16, shuffle=True)
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, default_root_dir=tmp_path, callbacks=list(callbacks), **options
    )
    trainer.fit(module, rows)
    return trainer.callback_metrics["loss_epoch"].item(), [p.sum().item() for p in module.parameters()]


def test_lightning_looks_at_the_first_batch(tmp_path):
    from lowtide.integrations import lightning_doctor

    callback = lightning_doctor.DoctorCallback(only=["LT001", "LT003"])

    with pytest.warns(UserWarning, match="WRONG LT003"):
        trained = lightning_losses(tmp_path, callback)

    assert trained == lightning_losses(tmp_path)
    assert callback.found.codes == ("LT001", "LT003")


def test_lightning_with_manual_optimization_is_told_of_and_trained(tmp_path):
    from lowtide.integrations import lightning_doctor

    callback = lightning_doctor.DoctorCallback(only=["LT001"])

    with pytest.warns(UserWarning, match="could not look: ValueError: with manual optimization"):
        trained = lightning_losses(tmp_path, callback, manual=True)

    assert trained == lightning_losses(tmp_path, manual=True) and callback.found is None
