"""The Trainer with a ``LowtideCallback``: bitwise the run without it, within the budget, and nothing left behind."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils.memory import should_reduce_batch_size
from support import checkpointing_word
from support.ranks import on_every_rank
from support.trainers import (
    Run,
    WaitForPlan,
    arguments,
    is_as_before,
    llama,
    padded,
    sentences,
    train,
    train_in_rank,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

import lowtide
from lowtide.errors import IntegrationError
from lowtide.integrations import transformers as integration
from lowtide.integrations import versions
from lowtide.integrations.transformers import LowtideCallback

pytestmark = pytest.mark.usefixtures("one_thread")


def small() -> Any:
    return llama(hidden_size=32, intermediate_size=96, num_hidden_layers=2)


def assert_within(run: Run, budget: int) -> None:
    """Steps that are watched, and the first under a plan, may take a little more: they are a few tensors large."""
    callback = next(c for c in run.trainer.callback_handler.callbacks if isinstance(c, LowtideCallback))
    status = callback.fit.status()
    assert status.planned_steps > 0 and status.steps == len(run.peaks)
    watched = status.steps - status.planned_steps
    assert max(run.peaks[watched + 1 :]) <= budget
    assert max(run.peaks) <= budget + 0.1 * (budget - max(run.resident))


def outside_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """With a softmax that is several times the logits: a plan of the model alone would not keep the budget."""
    logits = outputs.logits[:, :-1].float()
    spread = torch.cat([logits, logits.tanh(), logits.sigmoid(), -logits], -1)
    loss = F.cross_entropy(spread.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.parametrize(
    "settings",
    [
        dict(gradient_accumulation_steps=2, bf16=True, neftune_noise_alpha=5.0),
        pytest.param(dict(label_smoothing_factor=0.1, optim="adamw_torch"), marks=pytest.mark.slow),
        dict(compute_loss_func=outside_loss),
    ],
    ids=["accumulation-bf16-neftune", "label-smoothing-adamw", "loss-function"],
)
def test_a_run_is_the_plain_one_within_less(settings, tmp_path):
    plain = train(small(), tmp_path, **settings)
    budget = plain.budget(0.6)
    callback = LowtideCallback(budget)
    assert callback.fit is None

    ours = train(small(), tmp_path, callback, **settings)

    assert ours.same_as(plain)
    assert_within(ours, budget)
    assert budget < max(plain.peaks)
    assert is_as_before(ours.trainer.model)


def test_padded_batches_and_evaluations(tmp_path):
    settings = dict(
        data=sentences(24, shortest=16, longest=40), eval_dataset=sentences(6, 10, 40), eval_strategy="steps",
        eval_steps=2, max_steps=6, eval_on_start=True,
    )  # fmt: skip
    plain = train(small(), tmp_path, **settings)
    callback = LowtideCallback(plain.budget(0.6))

    ours = train(small(), tmp_path, callback, wait_every_step=True, **settings)

    assert ours.same_as(plain)
    assert len(ours.losses) == 6 + 4
    assert max(ours.peaks) <= plain.budget(0.66)
    assert callback.fit.status().planned_steps >= 1


@pytest.mark.slow
def test_a_resumed_run_and_a_checkpoint_that_knows_nothing_of_lowtide(tmp_path):
    """Neither its files, nor the state, nor the pickled arguments."""

    def halves(name: str, *callbacks: Any) -> Run:
        for callback, steps in zip(callbacks, (2, 4), strict=True):
            run = train(
                small(), tmp_path / name, callback, save_strategy="steps", save_steps=2, max_steps=steps,
                resume=steps == 4, neftune_noise_alpha=5.0,
            )  # fmt: skip
        return run

    plain = halves("plain", None, None)
    second = LowtideCallback("60%")

    ours = halves("other", LowtideCallback("60%"), second)

    assert ours.same_as(plain)
    assert second.fit.status().planned_steps == 1
    files = [path for path in (tmp_path / "other").rglob("*") if path.is_file()]
    assert any(path.name == "training_args.bin" for path in files)
    assert not [path for path in files if b"lowtide" in path.read_bytes()]


class Fails(TrainerCallback):
    def __init__(self, event: str, error: type[BaseException]) -> None:
        setattr(self, event, self.fail)
        self.error = error

    def fail(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step:
            raise self.error("stop here")


def raising(error: type[BaseException]) -> Any:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        raise error("stop here")

    return loss


@pytest.mark.parametrize(
    "where, error",
    [
        ("on_step_end", ValueError),
        ("on_optimizer_step", KeyboardInterrupt),
        ("on_train_end", ValueError),
        ("", OSError),
    ],
)
def test_nothing_is_left_behind_by_an_exception(where, error, tmp_path):
    callback, model = LowtideCallback("60%"), small()
    settings: dict[str, Any] = {} if where else {"compute_loss_func": raising(error)}
    trainer = Trainer(
        model, TrainingArguments(**arguments(tmp_path, **checkpointing_word.asking())), train_dataset=sentences(),
        data_collator=padded, callbacks=[Fails(where, error)] if where else [], **settings,
    )  # fmt: skip
    trainer.add_callback(callback)  # after the Trainer was made, as many do

    with pytest.raises(error, match="stop here") as kept:  # its frames stay alive, as in a notebook
        trainer.train()

    assert is_as_before(model)
    assert checkpointing_word.is_on(model)
    assert "was removed" in callback.fit.status().why_not
    assert kept.tb


@pytest.mark.slow
def test_a_batch_size_that_does_not_fit_is_tried_again_and_so_is_a_second_run(tmp_path):
    """``on_train_begin`` comes again, without an end before."""

    class Full:
        """Memory runs out in the second step, once."""

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return outside_loss(outputs, labels, num_items_in_batch)

    def runs(callback: Any) -> Run:
        run = train(
            small(), tmp_path, callback, auto_find_batch_size=True, per_device_train_batch_size=8,
            compute_loss_func=Full(), max_steps=3, data=sentences(21),
        )  # fmt: skip
        assert run.trainer._train_batch_size == 7
        run.trainer.train()
        return run

    plain = runs(None)
    callback = LowtideCallback("60%")

    ours = runs(callback)

    assert ours.same_as(plain)
    assert len(ours.losses) == 1 + 3 + 3
    assert callback.fit.status().planned_steps == 2
    assert is_as_before(ours.trainer.model)


def test_no_error_of_lowtide_looks_like_too_large_a_batch():
    error = lowtide.BudgetInfeasibleError("no plan fits: out of memory.")
    assert not should_reduce_batch_size(error)
    assert should_reduce_batch_size(RuntimeError("CUDA out of memory. Tried"))


class LooksAtCheckpointing(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.found.append(checkpointing_word.is_on(model))


def test_the_trainers_checkpointing_is_off_meanwhile_and_ddp_is_asked_for_as_before(tmp_path):
    looks, model = LooksAtCheckpointing(), small()
    trainer = Trainer(
        model, TrainingArguments(**arguments(tmp_path, **checkpointing_word.asking(), max_steps=4)),
        train_dataset=sentences(), data_collator=padded, callbacks=[looks, LowtideCallback("90%")],
    )  # fmt: skip
    trainer.train()
    assert looks.found == [True, True, False, False]  # when a step begins; the first runs with it
    assert checkpointing_word.is_on(model)
    assert trainer.accelerator.ddp_handler.find_unused_parameters is False


@pytest.mark.slow
def test_layers_are_compiled_and_planned_inside(tmp_path):
    """Two micro-batches, an evaluation between steps, and an optimizer whose state comes with its first step."""
    settings = dict(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2, eval_dataset=sentences(4))
    reference = small()
    for layer in reference.model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    plain = train(reference, tmp_path, optim="adamw_torch", **settings)
    model, callback = small(), LowtideCallback("80%", compile=True)
    ours = train(model, tmp_path, callback, optim="adamw_torch", **settings)
    status, plans = callback.fit.status(), callback.fit.plans

    assert ours.same_as(plain)
    assert status.planned_steps == len(ours.peaks) - 2 and status.over_budget_steps == 0
    assert len(plans) == 2 and all(set(plan.layers.values()) != {"plain"} for plan in plans)
    assert max(ours.peaks[2:]) < max(plain.peaks) and is_as_before(model)


def test_a_trainer_that_compiles_the_model_itself_is_told_to_leave_one_out(tmp_path):
    callback = LowtideCallback("80%", compile=True)
    with pytest.raises(IntegrationError, match="Leave torch_compile out"):
        Trainer(small(), TrainingArguments(**arguments(tmp_path), torch_compile=True), callbacks=[callback])
    with pytest.raises(IntegrationError, match="is not offered for compiled layers"):
        LowtideCallback(compile=True)


@pytest.mark.slow
def test_a_trainer_that_compiles_the_model_alone_is_told_that_nothing_is_planned_and_what_plans(tmp_path, caplog):
    settings = dict(torch_compile=True, torch_compile_backend="eager", compute_loss_func=outside_loss)
    plain = train(small(), tmp_path, **settings)
    logging.getLogger("transformers").addHandler(caplog.handler)
    callback = LowtideCallback("95%")

    ours = train(small(), tmp_path, callback, **settings)

    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert ours.same_as(plain)
    assert "NOT planned within its budget (95%): torch_compile=True compiles the model as a whole" in caplog.text
    assert "pass LowtideCallback(budget, compile=True)" in caplog.text and "keeps each" not in caplog.text
    assert callback.fit.status().planned_steps == 0
    assert is_as_before(ours.trainer.model_wrapped)


# -- what is logged ---------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog, monkeypatch):
    """Of the Trainer's own logger. It propagates where the environment sets CI, and nowhere else."""
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "disabled", False)
    caplog.set_level("WARNING", logger="transformers")
    logger.addHandler(caplog.handler)
    yield lambda: [r.getMessage() for r in caplog.records if r.name == "transformers.trainer" and "lowtide" in r.msg]
    logger.removeHandler(caplog.handler)


def test_the_trainers_logger_says_what_is_in_force(lines, tmp_path):
    train(small(), tmp_path, LowtideCallback("60%"))
    first, *plans, last = lines()
    assert first == (
        "lowtide: keeps each training step within its budget (60%): the first steps are watched, then the tensors that "
        "cost least are recomputed. Losses and gradients stay bitwise the same."
    )
    assert plans and all(line.startswith("lowtide: a plan is in force: budget ") for line in plans)
    assert last.startswith("lowtide: 3 of 4 steps ran under a plan: budget ")
    assert "observed peak" in last and "overhead" in last and last.endswith("plans: 1.")


def test_other_ranks_log_nothing(lines, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.Trainer.is_world_process_zero", lambda self: False)
    callback = LowtideCallback("60%")
    trainer_with(tmp_path, callback, max_steps=2).train()
    assert callback.fit.status().steps == 2
    assert not lines()


class Logged(TrainerCallback):
    """What a reporter such as TensorBoard's or MLflow's is given: before lowtide's callback, as theirs are."""

    def __init__(self) -> None:
        self.lines = []

    def on_log(self, args, state, control, logs=None, **_):
        self.lines.append(dict(logs))


def test_numbers_stand_beside_the_losses(tmp_path):
    args = TrainingArguments(**arguments(tmp_path, logging_strategy="steps", logging_steps=2))
    trainer = Trainer(small(), args, train_dataset=sentences(), data_collator=padded)
    reporter = Logged()
    trainer.callback_handler.callbacks.insert(0, reporter)
    callback = integration.fit(trainer, budget="60%", max_plans=4)
    trainer.add_callback(WaitForPlan(callback))

    result = trainer.train()

    *of_steps, last = reporter.lines
    assert [("loss" in line, line["lowtide_planned_steps"]) for line in of_steps] == [(True, 1), (True, 3)]
    status = callback.fit.status()
    for name in ("budget_bytes", "last_peak_bytes", "observed_peak_bytes", "excess_bytes", "over_budget_steps"):
        assert last[f"lowtide_{name}"] == getattr(status, name)
    assert last["lowtide_plans"] == 1 and last["lowtide_overhead"] == callback.fit.plan.predicted_overhead
    assert not any("lowtide" in name for name in result.metrics)  # which the Trainer saves and compares


def test_evaluations_and_other_lines_are_the_trainers_alone(tmp_path):
    trainer = trainer_with(tmp_path, callback := LowtideCallback("60%"), max_steps=2)
    callback.fit = lowtide.fit(trainer.model)
    trainer.log({"eval_loss": 1.0})
    callback.fit.remove()
    assert not any("lowtide" in name for name in trainer.state.log_history[-1])


# -- refused before training starts -------------------------------------------------------------------------------


def trainer_with(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    args = TrainingArguments(**arguments(folder))
    for name, value in settings.items():
        object.__setattr__(args, name, value)
    return Trainer(small(), args, train_dataset=sentences(), data_collator=padded, callbacks=list(callbacks))


def test_two_plans_for_one_trainer_are_refused(tmp_path):
    trainer = trainer_with(tmp_path, LowtideCallback("60%"), LowtideCallback("70%"))
    with pytest.raises(IntegrationError, match="it takes one"):
        trainer.train()
    with pytest.raises(IntegrationError, match=r"trainer.remove_callback\(LowtideCallback\)"):
        integration.fit(trainer, "60%")
    assert is_as_before(trainer.model)


def test_a_model_that_is_fitted_already_is_refused(tmp_path):
    trainer = trainer_with(tmp_path, LowtideCallback("60%"))
    with lowtide.fit(trainer.model, budget="60%") as fit:
        with pytest.raises(IntegrationError, match=r"Call remove\(\) of that fit first"):
            trainer.train()
        assert not fit.status().steps
        assert not is_as_before(trainer.model)  # its own fit goes on


@pytest.mark.parametrize(
    "setting, way_out",
    [
        (dict(_n_gpu=2), "Start one process for each GPU"),
        (dict(fsdp=True, fsdp_config={"version": 1}), 'Set fsdp_config={"version": 2}'),
        (dict(hf_deepspeed_config=SimpleNamespace(get_value=lambda key: "cpu" in key)), "Remove it from the DeepSpeed"),
    ],
    ids=["data-parallel", "fsdp1", "cpu-checkpointing"],
)
def test_settings_under_which_no_plan_would_be_carried_out(setting, way_out, tmp_path, monkeypatch):
    trainer = trainer_with(tmp_path)
    for name, value in setting.items():
        monkeypatch.setattr(trainer.args, name, value, raising=False)
    with pytest.raises(IntegrationError, match=way_out):
        integration.fit(trainer, "60%")
    trainer.add_callback(LowtideCallback("60%"))
    with pytest.raises(IntegrationError, match=way_out):
        trainer.train()
    assert trainer.callback_handler.callbacks[-1].fit is None


def test_arguments_are_checked_when_they_are_given(monkeypatch):
    with pytest.raises(IntegrationError, match="optimizer= is the Trainer's"):
        LowtideCallback("60%", optimizer="adamw")
    with pytest.raises(ValueError, match="budget"):
        LowtideCallback("a lot")
    monkeypatch.setitem(versions.SUPPORTED, "transformers", ("5.0", "5.1"))
    with pytest.raises(IntegrationError, match="was never tried"):
        LowtideCallback("60%")


@pytest.mark.parametrize("options", [{}, {"optimizer": None}], ids=["foreseen", "once it is there"])
def test_the_state_of_the_trainers_optimizer_counts(tmp_path, options):
    callback = LowtideCallback("60%", **options)

    run = train(small(), tmp_path, callback, optim="adamw_torch")

    state = callback.fit.graph.resident["optimizer"]
    trained = sum(p.nbytes for p in run.trainer.model.parameters())
    assert state == 2 * trained


@pytest.mark.slow
def test_two_ranks_with_a_plan_each(tmp_path):
    plain = on_every_rank(train_in_rank, str(tmp_path), False)
    ours = on_every_rank(train_in_rank, str(tmp_path), True)
    for before, after in zip(plain, ours, strict=True):
        assert after["wrapper"] == before["wrapper"] == "DistributedDataParallel"
        assert after["find_unused"] is before["find_unused"] is False  # as it is with checkpointing
        assert (after["losses"], after["weights"]) == (before["losses"], before["weights"])
        assert after["planned"] == 6 and after["as_before"]
    assert ours[0]["weights"] == ours[1]["weights"]
    assert ours[0]["losses"] != ours[1]["losses"]
