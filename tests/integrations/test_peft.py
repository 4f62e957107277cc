"""Adapters of PEFT in the Trainer: most weights frozen, some trained whole, and what preparing for them leaves on."""

from typing import Any

import peft
import pytest
import torch
from support import checkpointing_word
from support.trainers import is_as_before, llama, train

from lowtide.integrations.transformers import LowtideCallback

pytestmark = pytest.mark.usefixtures("one_thread")
PROJECTIONS = ["q_proj", "v_proj", "up_proj", "down_proj"]


def adapted(prepare: Any = None, **settings: Any) -> peft.PeftModel:
    model = llama(hidden_size=32, intermediate_size=96, num_hidden_layers=2)
    if prepare is not None:
        model = prepare(model)
    config = peft.LoraConfig(r=4, target_modules=PROJECTIONS, lora_dropout=0.1, **settings)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    "settings",
    [dict(use_dora=True, modules_to_save=["lm_head"]), {}],
    ids=["dora-and-a-whole-module", "lora"],
)
@pytest.mark.slow
def test_a_run_is_the_plain_one_within_less(settings, tmp_path):
    """The embeddings are frozen: neither lowtide nor the Trainer's model needs inputs that require gradients."""
    plain = train(adapted(**settings), tmp_path, optim="adamw_torch")
    budget = plain.budget(0.6)
    callback = LowtideCallback(budget)

    ours = train(adapted(**settings), tmp_path, callback, optim="adamw_torch")

    assert ours.same_as(plain)
    assert callback.fit.status().planned_steps == 3
    assert max(ours.peaks[2:]) <= budget < max(plain.peaks)
    assert max(ours.peaks) <= budget + 0.1 * (budget - max(ours.resident))  # watched, and dropped for the first time
    assert is_as_before(ours.trainer.model)
    assert not ours.trainer.model.get_input_embeddings().weight.requires_grad


def prepared(model: Any) -> Any:
    """As for a quantised model; PEFT asks for nothing else."""
    model.is_loaded_in_8bit = True
    model = peft.prepare_model_for_kbit_training(model)
    model.is_loaded_in_8bit = False
    return model


def test_reentrant_checkpointing_that_preparing_leaves_on_is_off_and_told_once(tmp_path):
    plain = train(adapted(prepared), tmp_path)
    assert checkpointing_word.is_on(plain.trainer.model.base_model.model)
    callback = LowtideCallback("80%")

    ours = train(adapted(prepared), tmp_path, callback)

    assert ours.same_as(plain)
    status = callback.fit.status()
    assert status.planned_steps == 2  # the first ran with it: nobody knew what a step may take
    assert [r for r in status.reasons if "checkpoint" in r] == [
        "gradient checkpointing was on: switched off while the model is fitted, since a plan recomputes less. "
        'remove() switches it on again; checkpointing="keep" leaves it on'
    ]
    assert checkpointing_word.is_on(ours.trainer.model.base_model.model)
    assert "gradient_checkpointing" not in vars(ours.trainer.model)
