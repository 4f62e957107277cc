"""Small trainings in other libraries, for ``integrations.py``: most are those of ``tests/``, run as they are there.

Each case is called as ``case(None)`` for plain training and as ``case(budget)`` within a budget, and returns a ``Ran``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from step_probe import resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import measuring
from lowtide.step.operators import tensors_in
from lowtide.training.status import Status

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "integrations")]

from support.ranks import digest  # noqa: E402

FRACTION = 0.60


@dataclass(frozen=True)
class Ran:
    """What a training left.

    Attributes:
        weights: A digest of their bits.
        peaks: Of each measured step, with what was resident.
        planned_peaks: Of these, those of steps under a plan.
        budget: In bytes, for the next run; None where it is to be ``FRACTION`` as lowtide itself counts it.
    """

    losses: list[float]
    weights: str
    peaks: list[int]
    planned_peaks: list[int]
    status: Status | None
    budget: int | None = None


@dataclass(frozen=True)
class Case:
    """One row. ``package`` is whose version counts; ``ranks`` 0: no process group."""

    name: str
    library: str
    package: str
    run: Callable[[Any], Ran]
    ranks: int = 0


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


# -- transformers, PEFT, TRL ------------------------------------------------------------------------------------


def _of_trainer(run: Any, callback: Any) -> Ran:
    fit = None if callback is None else callback.fit
    planned = [peak for peak, was_planned in zip(run.peaks, run.planned, strict=True) if was_planned]
    weights = digest(w.float() for w in run.weights.values())
    return Ran(run.losses, weights, run.peaks, planned, fit and fit.status(), run.budget(FRACTION))


def _callback(budget: Any) -> Any:
    from lowtide.integrations.transformers import LowtideCallback

    return None if budget is None else LowtideCallback(budget)


def transformers_trainer(budget: Any) -> Ran:
    from support import trainers

    callback = _callback(budget)
    with tempfile.TemporaryDirectory() as folder:
        run = trainers.train(
            trainers.llama(), folder, callback, data=trainers.sentences(48, shortest=16, longest=40), max_steps=10,
            eval_dataset=trainers.sentences(6, 10, 40), eval_strategy="steps", eval_steps=4,
            gradient_accumulation_steps=2, bf16=True,
        )  # fmt: skip
    return _of_trainer(run, callback)


def peft_lora(budget: Any) -> Ran:
    import test_peft
    from support import trainers

    callback = _callback(budget)
    with tempfile.TemporaryDirectory() as folder:
        run = trainers.train(test_peft.adapted(), folder, callback, optim="adamw_torch", max_steps=8)
    return _of_trainer(run, callback)


def trl_case(name: str) -> Callable[[Any], Ran]:
    def run(budget: Any) -> Ran:
        import test_trl
        import trl.trainer.utils
        from support.trainers import arguments

        trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = 48  # of words, instead of 32768: the model has 96
        kind, config_of, data, settings, own = test_trl.CASES[name]
        callback = _callback(budget)
        with tempfile.TemporaryDirectory() as folder:
            given = {"bf16": False, "gradient_checkpointing": budget is not None, "max_steps": 8, **settings}
            config = config_of(**arguments(folder, **given))
            found = test_trl.run(kind, config, data, callback, **{key: make() for key, make in own.items()})
        return _of_trainer(found, callback)

    return run


# -- Accelerate, Lightning --------------------------------------------------------------------------------------


def _last(peaks: list[int], status: Status | None) -> list[int]:
    """Those of planned steps, where batches are all alike: the last ones."""
    count = 0 if status is None else status.planned_steps * len(peaks) // status.steps
    return peaks[len(peaks) - count :]


def _between(peaks: list[int], model: nn.Module) -> int:
    """Of a model with AdamW: weights, gradients and two states are there."""
    resident = 4 * resident_bytes(model)
    return int(resident + FRACTION * (max(peaks) - resident))


def accelerate_loop(budget: Any) -> Ran:
    import test_accelerate
    from support.watched_training import Layered

    torch.manual_seed(0)
    model = Layered(6)
    losses, peaks, fit, _ = test_accelerate.loop(model, budget, precision="bf16", accumulates=2)
    status = fit and fit.status()
    if fit:
        fit.remove()
    return Ran(losses, digest(model.parameters()), peaks, _last(peaks, status), status, _between(peaks, model))


def lightning_case(kind: str, **options: Any) -> Callable[[Any], Ran]:
    def run(budget: Any) -> Ran:
        import test_lightning

        from lowtide.integrations.lightning import LowtideCallback

        torch.manual_seed(0)
        model = getattr(test_lightning, kind)()
        ours = None if budget is None else LowtideCallback(budget)
        each = test_lightning.EachStep(ours)
        test_lightning.trained(model, *([] if ours is None else [ours]), each, **options)
        status = None if ours is None else ours.fit.status()
        weights = digest(model.state_dict().values())
        return Ran(model.losses, weights, each.peaks, _last(each.peaks, status), status, _between(each.peaks, model))

    return run


# -- DeepSpeed, Megatron: their tests' own trainings --------------------------------------------------------------


def _of_told(told: dict) -> Ran:
    status = told.get("status")
    return Ran(told["losses"], told["weights"], told["peaks"], _last(told["peaks"], status), status)


def deepspeed_case(stage: int) -> Callable[[Any], Ran]:
    def run(budget: Any) -> Ran:
        from support import deepspeed_training

        how = {} if budget is None else {"fitted": "engine", "budget": budget}
        if stage == 3:
            how |= {"zero": deepspeed_training.FREED | deepspeed_training.AHEAD, "leaves": False}
        return _of_told(deepspeed_training.train(_rank(), stage, bf16=stage == 2, **how))

    return run


def megatron_gpt(budget: Any) -> Ran:
    from support import megatron_training
    from support.megatron_on_cpu import use_megatron

    use_megatron()
    return _of_told(megatron_training.train(budget=budget, **megatron_training.WAYS["attention dropout"]))


# -- plain loops, and training steps written after other libraries' -----------------------------------------------


def _looped(
    model: nn.Module, batches: list[Any], budget: Any, forward: Callable[[Any], torch.Tensor],
    backward: Callable[[torch.Tensor], None], update: Callable[[], None], updates_each: int = 1,
    fitted: nn.Module | None = None,
) -> Ran:  # fmt: skip
    """An ordinary loop over ``batches``; the model is fitted before the first."""
    fit = None if budget is None else lowtide.fit(fitted or model, budget=budget)
    losses, peaks, planned_peaks = [], [], []
    for n, batch in enumerate(batches):
        there = resident_bytes(model, list(tensors_in(batch)))
        planned = fit.status().planned_steps if fit else 0
        with measuring("cpu") as counter:
            loss = forward(batch)
            backward(loss)
        losses.append(loss.item())
        peaks.append(there + counter.peak)
        if fit and fit.status().planned_steps > planned:
            planned_peaks.append(peaks[-1])
        if n % updates_each == updates_each - 1:
            update()
        if fit and n in (2, 4):  # a sharded model is not recorded in its first step
            fit.wait(120)
    status = fit and fit.status()
    if fit:
        fit.remove()
    state = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in model.state_dict().values()]
    resident = resident_bytes(model, batches[0], gradients_to_come=True)
    taken = max(peaks) - min(resident_bytes(model, batch) for batch in batches)
    return Ran(losses, digest(w.float() for w in state), peaks, planned_peaks, status, int(resident + FRACTION * taken))


def plain_loop(budget: Any) -> Ran:
    from support.watched_training import Layered, batch_of

    torch.manual_seed(0)
    model = Layered(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def backward(loss: torch.Tensor) -> None:
        loss.backward()

    return _looped(model, [batch_of(256)] * 10, budget, lambda x: model(x).square().mean(), backward, update)


def fsdp2(budget: Any) -> Ran:
    from support.sharded_training import Net, batches, each_layer

    torch.manual_seed(0)
    model = Net(depth=4)
    each_layer(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(_rank())

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def backward(loss: torch.Tensor) -> None:
        loss.backward()

    ran = _looped(model, list(batches(_rank(), 10)), budget, model, backward, update)
    return Ran(ran.losses, ran.weights, ran.peaks, ran.planned_peaks, ran.status)


def booster_step(budget: Any) -> Ran:
    """ColossalAI's ``Booster`` without a plugin: an optimizer that is wrapped, whose ``backward`` is the step's.

    Written after its public interface (``boost``, ``booster.backward(loss, optimizer)``, ``optimizer.step()``). The
    model's checkpointing is on before, as its examples' ``--grad_checkpoint`` does it, and off while it is fitted.
    """
    from support import trainers

    class OptimizerWrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optim = optimizer

        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()

        def step(self) -> None:
            self.optim.step()

        def zero_grad(self) -> None:
            self.optim.zero_grad()

    model = trainers.llama().train()
    if budget is not None:
        model.gradient_checkpointing_enable()
    optimizer = OptimizerWrapper(torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches = [trainers.padded(trainers.sentences(8)) for _ in range(10)]
    torch.manual_seed(3)

    def criterion(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def forward(batch: dict) -> torch.Tensor:
        outputs = model(batch["input_ids"], attention_mask=batch["attention_mask"])
        return criterion(outputs.logits, batch["labels"])

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _looped(model, batches, budget, forward, optimizer.backward, update)


def roll_step(budget: Any) -> Ran:
    """ROLL's DeepSpeed policy training: micro-batches of a rollout, a loss of the logits outside the model.

    Written after its public strategy: the engine is called with ids, mask and positions, ``loss_func(data, logits)``
    is a clipped policy loss, then ``engine.backward`` and ``engine.step`` for each micro-batch. ZeRO-2, two of them
    accumulated. Its workers, rollouts and the offload of optimizer states between steps are not run.
    """
    from support import deepspeed_training, trainers

    model = trainers.llama()
    engine = deepspeed_training.engine_of(_rank(), 2, model)
    generator = torch.Generator().manual_seed(1)
    rows = [trainers.padded(trainers.sentences(8)) for _ in range(12)]
    for batch in rows:
        shape = batch["input_ids"][:, 1:].shape
        batch["old"] = -4.5 + 0.1 * torch.randn(shape, generator=generator)
        batch["advantages"] = torch.randn(shape, generator=generator)
    torch.manual_seed(3)

    def loss_func(data: dict, logits: torch.Tensor) -> torch.Tensor:
        taken = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
        ratio = (taken - data["old"]).exp()
        gain = torch.minimum(ratio * data["advantages"], ratio.clamp(0.8, 1.2) * data["advantages"])
        mask = data["attention_mask"][:, 1:]
        return -(gain * mask).sum() / mask.sum()

    def forward(data: dict) -> torch.Tensor:
        positions = data["attention_mask"].cumsum(1) - 1
        output = engine(
            input_ids=data["input_ids"], attention_mask=data["attention_mask"], position_ids=positions, use_cache=False
        )
        return loss_func(data, output.logits)

    ran = _looped(engine.module, rows, budget, forward, engine.backward, engine.step, fitted=engine)
    engine.destroy()
    return Ran(ran.losses, ran.weights, ran.peaks, ran.planned_peaks, ran.status)


CASES = (
    Case("padded, accumulated, bf16, evaluated", "transformers Trainer", "transformers", transformers_trainer),
    Case("LoRA in the Trainer", "PEFT", "peft", peft_lora),
    Case("SFT", "TRL", "trl", trl_case("sft")),
    Case("DPO", "TRL", "trl", trl_case("dpo")),
    Case("GRPO", "TRL", "trl", trl_case("grpo")),
    Case("bf16, accumulated", "Accelerate", "accelerate", accelerate_loop),
    Case("automatic optimization, accumulated", "Lightning", "lightning", lightning_case(
        "Autoencoder", accumulate_grad_batches=2
    )),
    Case("manual optimization, two optimizers", "Lightning", "lightning", lightning_case("Adversarial")),
    Case("ZeRO-0, accumulated", "DeepSpeed", "deepspeed", deepspeed_case(0), ranks=1),
    Case("ZeRO-1, accumulated", "DeepSpeed", "deepspeed", deepspeed_case(1), ranks=1),
    Case("ZeRO-2, accumulated, bf16", "DeepSpeed", "deepspeed", deepspeed_case(2), ranks=1),
    Case("ZeRO-3, accumulated, two ranks", "DeepSpeed", "deepspeed", deepspeed_case(3), ranks=2),
    Case("fully_shard on each layer, two ranks", "FSDP2", "torch", fsdp2, ranks=2),
    Case("GPT with dropout, on the CPU", "Megatron-Core", "megatron-core", megatron_gpt, ranks=1),
    Case("a loop of one's own", "plain PyTorch", "torch", plain_loop),
    Case("a booster's step", "ColossalAI", "", booster_step),
    Case("a policy's train_step on ZeRO-2", "ROLL", "", roll_step, ranks=1),
)  # fmt: skip
