"""TRL: fused losses outside the model, reference models, generation within the step, checkpointing by default.

Models and tokenizers are made here, with random weights: nothing is downloaded.
"""

from typing import Any

import pytest
import torch
import trl
from datasets import Dataset, disable_progress_bars
from support import checkpointing_word
from support.trainers import VOCABULARY, Run, WaitForPlan, arguments, is_as_before, llama, probed
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback

from lowtide.errors import IntegrationError
from lowtide.integrations import versions
from lowtide.integrations.transformers import LowtideCallback

pytestmark = pytest.mark.usefixtures("one_thread")
disable_progress_bars()


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """TRL's fused loss allocates a tile of 32768 words at a time, however few the model has."""
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 48)


def small() -> Any:
    return llama(hidden_size=32, intermediate_size=96, num_hidden_layers=2)


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = special + [f"w{n}" for n in range(VOCABULARY - len(special))]
    found = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def texts(length: int, seed: int, count: int = 16) -> list[str]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    numbers = torch.randint(0, VOCABULARY - 4, (count, length), generator=generator).tolist()
    return [" ".join(f"w{n}" for n in row) for row in numbers]


def run(kind: Any, config: Any, data: dict, callback: LowtideCallback | None = None, **own: Any) -> Run:
    found, model = Run(None), own.pop("model", None) or small()
    callbacks = own.pop("callbacks", [])
    if callback is not None:
        callbacks = [*callbacks, callback, WaitForPlan(callback)]
    found.trainer = probed(kind, found)(
        model=model, args=config, train_dataset=Dataset.from_dict(data), processing_class=tokenizer(),
        callbacks=callbacks, **own,
    )  # fmt: skip
    found.trainer.train()
    return found


def different_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


PAIRS = {"prompt": texts(6, 0), "chosen": texts(18, 1), "rejected": texts(18, 2)}
CASES = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, {"text": texts(30, 0)}, {}, {}),
    "sft-label-smoothing": (
        trl.SFTTrainer, trl.SFTConfig, {"text": texts(30, 0)}, dict(label_smoothing_factor=0.1, loss_type="nll"), {}
    ),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS, {}, {"ref_model": small}),
    "grpo": (
        trl.GRPOTrainer, trl.GRPOConfig, {"prompt": texts(6, 0)},
        dict(num_generations=4, max_completion_length=12, beta=0.0, max_steps=6),
        {"reward_funcs": lambda: different_words},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sft-label-smoothing", "dpo", "grpo"))]
)
def test_a_run_is_the_plain_one_within_less(name, tmp_path):
    kind, config_of, data, settings, own = CASES[name]

    def go(callback: LowtideCallback | None = None, **more: Any) -> Run:
        config = config_of(**arguments(tmp_path, bf16=False, **settings, **more))
        return run(kind, config, data, callback, **{key: make() for key, make in own.items()})

    checkpointed, plain = go(), go(gradient_checkpointing=False)
    budget = plain.budget(0.75)
    callback = LowtideCallback(budget)

    ours = go(callback)

    assert ours.same_as(checkpointed)
    assert ours.same_as(plain)
    assert max(ours.peaks) <= budget + 0.1 * (budget - max(ours.resident))
    assert budget < max(plain.peaks)
    status = callback.fit.status()
    assert status.planned_steps >= status.steps // 2
    assert status.planned_calls >= status.planned_steps
    assert sum("gradient checkpointing was on" in reason for reason in status.reasons) == 1
    assert is_as_before(ours.trainer.model)
    assert checkpointing_word.is_on(ours.trainer.model)


class LooksAtLayers(TrainerCallback):
    def __init__(self) -> None:
        self.checkpointed: list[list[bool]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.checkpointed.append([layer.gradient_checkpointing for layer in model.model.layers])


def test_generation_does_not_switch_checkpointing_on_again_nor_forget_which_layers(tmp_path):
    """TRL switches it off to generate, and then on for every layer."""
    looks, model = LooksAtLayers(), small()
    config = trl.GRPOConfig(
        **arguments(tmp_path, bf16=False, max_steps=2, num_generations=4, max_completion_length=4),
        gradient_checkpointing_kwargs={"every_n_layers": 2, "use_reentrant": False},
    )
    callbacks = [looks, LowtideCallback("8MiB")]  # a percentage is of a step that runs with checkpointing
    run(
        trl.GRPOTrainer, config, {"prompt": texts(6, 0)}, model=model, callbacks=callbacks,
        reward_funcs=different_words,
    )  # fmt: skip
    assert looks.checkpointed == [[False, False]] * 2
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False]


def test_offloading_of_the_same_activations_is_refused(tmp_path, monkeypatch):
    config = trl.SFTConfig(**arguments(tmp_path, bf16=False), activation_offloading=True)
    with pytest.raises(IntegrationError, match="Set activation_offloading=False"):
        run(trl.SFTTrainer, config, {"text": texts(30, 0)}, LowtideCallback("60%"))
    monkeypatch.setitem(versions.SUPPORTED, "trl", ("1.0", "1.1"))
    config.activation_offloading = False
    with pytest.raises(IntegrationError, match="trl .* was never tried"):
        run(trl.SFTTrainer, config, {"text": texts(30, 0)}, LowtideCallback("60%"))
