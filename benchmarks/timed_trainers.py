"""TRL's trainers on a model whose ops take a while, for ``integrations.py``: what lowtide costs beside plain training
and beside TRL's own checkpointing of every layer.

Each case trains from the same seed

- plain and within the budget, with the allocator's peak of each step; the budget is 40 % of the largest plain step's
  activation memory, plus what is resident;
- plain, within the budget, with TRL's checkpointing, and plain again, timed: elapsed, and of the training thread alone.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
import trl.trainer.utils
from step_probe import PHASES, Probe, StepRecord, Stopwatch, resident_bytes

from lowtide.integrations.transformers import LowtideCallback
from lowtide.step.bits import same_bits
from lowtide.training.status import Status

FRACTION = 0.40
LAYERS, HIDDEN, WORDS = 4, 256, 2048
SHORTEST, LONGEST = 48, 256  # tokens of a text
PROMPT, COMPLETION = 64, 48
SEED = 0
FULL_STEPS = 10  # with TRL's checkpointing, of which the peak is measured


@dataclass
class Training:
    """What one run left."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    probe: Probe | None = None
    preparing: Stopwatch = field(default_factory=Stopwatch)  # batches: in GRPO, generation and rewards
    prepared_cpu_s: list[float] = field(default_factory=list)  # of each step
    status: Status | None = None
    overheads: list[float] = field(default_factory=list)  # predicted, of the plans

    def same_as(self, other: Training) -> bool:
        tensors = zip(self.weights.values(), other.weights.values(), strict=True)
        return self.losses == other.losses and all(same_bits(a, b) for a, b in tensors)


def model() -> Any:
    import transformers

    transformers.set_seed(SEED)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=688, num_hidden_layers=LAYERS, num_attention_heads=8, vocab_size=WORDS,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(WORDS - 3))]
    found = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(count: int, shortest: int, longest: int) -> list[str]:
    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [
        " ".join(f"w{n}" for n in torch.randint(0, WORDS - 3, (length,), generator=generator).tolist())
        for length in lengths
    ]


def different_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def sft(folder: str, steps: int, **settings: Any) -> tuple[Any, dict]:
    config = trl.SFTConfig(**_common(folder, steps, 4, **settings))
    return trl.SFTTrainer, {"args": config, "train_dataset": _data("text", texts(4 * steps, SHORTEST, LONGEST - 1))}


def grpo(folder: str, steps: int, **settings: Any) -> tuple[Any, dict]:
    config = trl.GRPOConfig(
        **_common(folder, steps, 8, **settings), num_generations=8, max_completion_length=COMPLETION
    )
    given = {"reward_funcs": different_words, "train_dataset": _data("prompt", texts(steps, PROMPT // 2, PROMPT))}
    return trl.GRPOTrainer, {"args": config, **given}


def _common(folder: str, steps: int, rows: int, **settings: Any) -> dict[str, Any]:
    return dict(
        output_dir=folder, use_cpu=True, bf16=False, max_steps=steps, per_device_train_batch_size=rows, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=1e-4, seed=SEED, **settings,
    )  # fmt: skip


def _data(name: str, rows: list[str]) -> Any:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    return Dataset.from_dict({name: rows})


CASES: dict[str, tuple[Callable[..., tuple[Any, dict]], int]] = {
    "padded SFT": (sft, 400),
    "GRPO with generation": (grpo, 160),
}


def train(
    make: Callable, steps: int, *, budget: int | None = None, peaks: bool = False, checkpointed: bool = False
) -> Training:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    # However few words there are, TRL's fused loss allocates a tile of 32768 at a time: half of the whole step here.
    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = WORDS
    found = Training()
    callback = None if budget is None else LowtideCallback(budget)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        kind, given = make(folder, steps, gradient_checkpointing=checkpointed)

        class Probed(kind):  # type: ignore[misc,valid-type]
            def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
                if found.probe is None:
                    fit = None if callback is None else callback.fit
                    found.probe = Probe(model, fit, peaks=peaks)
                    stack.enter_context(found.probe.installed())
                before = found.preparing.cpu_s
                with found.probe.step((), 0):  # the optimizer's state it counts itself
                    loss = super().training_step(model, inputs, *args, **kwargs)
                found.prepared_cpu_s.append(found.preparing.cpu_s - before)
                found.losses.append(loss.item())
                return loss

            def _prepare_inputs(self, inputs: Any) -> Any:
                return found.preparing.around(super()._prepare_inputs)(inputs)

        trainer = Probed(
            model(), processing_class=tokenizer(), callbacks=[] if callback is None else [callback], **given
        )
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        trainer.train()
        found.wall_s, found.cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
    found.weights = {name: w.clone() for name, w in trainer.model.state_dict().items()}
    if callback is not None:
        found.status = callback.fit.status()
        found.overheads = [plan.predicted_overhead for plan in callback.fit.plans]
    return found


def line(case: str, *, quick: bool = False) -> dict[str, Any]:
    """Measure the case; the caller adds where the numbers come from."""
    make, steps = CASES[case]
    steps = 4 if quick else steps
    reference = train(make, steps, peaks=True)
    records = reference.probe.records
    activation_bytes = _largest_activations(records)
    gradients = resident_bytes(trained := model(), gradients_to_come=True) - resident_bytes(trained)
    resident = max(r.resident_bytes for r in records) + gradients
    budget = resident + int(FRACTION * activation_bytes)
    measured = train(make, steps, budget=budget, peaks=True)
    full = train(make, min(steps, FULL_STEPS), peaks=True, checkpointed=True).probe.records
    before = train(make, steps)
    timed = train(make, steps, budget=budget)
    checkpointed = train(make, steps, checkpointed=True)
    after = train(make, steps)
    plain_wall_s, plain_cpu_s = (before.wall_s + after.wall_s) / 2, (before.cpu_s + after.cpu_s) / 2
    shares = [(r.phase == "planned", r.peak_bytes / budget) for r in measured.probe.records]
    status = timed.status
    return {
        "case": case, "seed": SEED, "layers": LAYERS, "hidden": HIDDEN, "vocabulary": WORDS,
        "bitwise_losses": measured.losses == timed.losses == reference.losses,
        "bitwise_weights": measured.same_as(reference) and timed.same_as(reference),
        "budget_bytes": budget, "resident_bytes": resident, "plain_activation_bytes": activation_bytes,
        "fraction": FRACTION,
        "full_activation_share": _largest_activations(full) / _largest_activations(records[: len(full)]),
        "largest_peak_share": max(share for _, share in shares),
        "largest_planned_peak_share": max((share for planned, share in shares if planned), default=None),
        "steps": status.steps, "planned_steps": status.planned_steps, "plans": status.plans, "waited": False,
        "plain_s": plain_wall_s, "with_s": timed.wall_s, "checkpointed_s": checkpointed.wall_s,
        "plain_cpu_s": plain_cpu_s, "with_cpu_s": timed.cpu_s, "checkpointed_cpu_s": checkpointed.cpu_s,
        "plain_cpu_apart": after.cpu_s / before.cpu_s,
        "wall_ratio": timed.wall_s / plain_wall_s, "cpu_ratio": timed.cpu_s / plain_cpu_s,
        "checkpointed_wall_ratio": checkpointed.wall_s / plain_wall_s,
        "checkpointed_cpu_ratio": checkpointed.cpu_s / plain_cpu_s,
        "predicted_overheads": timed.overheads, **_shares(before, timed, after), "reasons": list(status.reasons),
    }  # fmt: skip


def _largest_activations(records: list[StepRecord]) -> int:
    return max(r.peak_bytes - r.resident_bytes for r in records)


def _shares(before: Training, timed: Training, after: Training) -> dict[str, Any]:
    """Where the extra CPU time of the training thread goes, as shares of plain training's.

    A plan predicts for the step without what prepares its batch.
    """
    records = list(zip(before.probe.records, timed.probe.records, after.probe.records, strict=True))
    preparing = list(zip(before.prepared_cpu_s, timed.prepared_cpu_s, after.prepared_cpu_s, strict=True))
    plain_cpu_s = (before.cpu_s + after.cpu_s) / 2
    extra: Counter[str] = Counter()
    predicted_s, ratios = 0.0, []
    for (b, t, a), (b_prep, t_prep, a_prep) in zip(records, preparing, strict=True):
        plain, prep = (b.cpu_s + a.cpu_s) / 2, (b_prep + a_prep) / 2
        extra["preparing"] += t_prep - prep
        extra[t.phase] += t.cpu_s - t_prep - (plain - prep)
        predicted_s += (plain - prep) * t.plan_overhead
        if t.phase == "planned":
            ratios.append((t.cpu_s - t_prep) / ((plain - prep) * (1 + t.plan_overhead)))
    in_steps = sum(t.cpu_s for _, t, _ in records) - sum(b.cpu_s + a.cpu_s for b, _, a in records) / 2
    extra["between steps"] = timed.cpu_s - plain_cpu_s - in_steps
    return {
        "steps_by_phase": dict(Counter(t.phase for _, t, _ in records)),
        "predicted_extra_share": predicted_s / plain_cpu_s,
        "extra_shares": {name: seconds / plain_cpu_s for name, seconds in extra.items()},
        "preparing_share": sum(before.prepared_cpu_s) / before.cpu_s,
        "planning_cpu_share": timed.probe.planning.cpu_s / timed.cpu_s,
        "letters_cpu_share": timed.probe.letters.cpu_s / timed.cpu_s,
        "planned_cpu_ratio_to_plans": statistics.median(ratios) if ratios else None,
        "step_cpu_ratio_by_phase": {
            phase: statistics.median(2 * t.cpu_s / (b.cpu_s + a.cpu_s) for b, t, a in records if t.phase == phase)
            for phase in PHASES if any(t.phase == phase for _, t, _ in records)
        },
    }  # fmt: skip
