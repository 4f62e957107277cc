"""Checkpointing that is on already: replaced by the plan where a module has a switch, told with its cost elsewhere."""

import copy
from functools import partial

import pytest
import torch
from support import checkpointing_word
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.graph.costs import Costs
from lowtide.measurement.allocator import peak_bytes
from lowtide.recording import step_recording
from lowtide.training.existing_checkpointing import ExistingCheckpointing

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, vocab_size=64)
    ).train()
    model.gradient_checkpointing_enable()
    return model


@pytest.fixture
def batch():
    ids = torch.randint(0, 64, (4, 32))
    return {"input_ids": ids, "labels": ids}


def train(model, batch):
    torch.manual_seed(0)
    loss = model(**batch).loss
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return loss.item(), gradients


def same(a, b):
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


def test_transformers_checkpointing_is_off_while_steps_are_watched_and_back_afterwards(llama, batch):
    plain = copy.deepcopy(llama)
    with lowtide.fit(llama, budget="60%") as fit:
        assert same(train(plain, batch), train(llama, batch))  # with it: nobody knows what a step may take
        assert checkpointing_word.is_on(llama)
        assert "the model's own checkpointing" in fit.status().why_not
        llama.gradient_checkpointing_enable()  # as a Trainer may later still: each step looks
        assert same(train(plain, batch), train(llama, batch))
        assert not checkpointing_word.is_on(llama)
        fit.wait()
        assert same(train(plain, batch), train(llama, batch))
        assert fit.status().in_force
        assert sum("gradient checkpointing was on" in r for r in fit.status().reasons) == 1
        assert fit.plan.counts["recompute"] > 0
    assert checkpointing_word.is_on(llama)
    assert same(train(plain, batch), train(llama, batch))


def test_switched_on_in_mid_training_it_is_off_before_the_next_planned_step(llama, batch):
    plain = copy.deepcopy(llama)
    with lowtide.fit(llama, budget="60%") as fit:
        for _ in range(2):
            assert same(train(plain, batch), train(llama, batch))
        fit.wait()
        llama.gradient_checkpointing_enable()  # TRL does so after it has generated
        assert same(train(plain, batch), train(llama, batch))
        assert fit.status().in_force
        assert not checkpointing_word.is_on(llama)


def test_it_is_off_while_a_batch_is_planned_for(llama, batch):
    with lowtide.fit(llama, batch, budget="60%") as fit:
        assert not checkpointing_word.is_on(llama)
        assert any("gradient checkpointing was on" in w for w in fit.warnings)
        assert fit.plan.counts["recompute"] > 0
    assert checkpointing_word.is_on(llama)


def test_a_fit_that_is_refused_switches_it_on_again(llama, batch):
    with pytest.raises(lowtide.BudgetInfeasibleError):
        lowtide.fit(llama, batch, budget=1)
    assert checkpointing_word.is_on(llama)


def test_kept_it_stays_on_and_is_told(llama, batch):
    plain = copy.deepcopy(llama)
    with lowtide.fit(llama, budget="90%", checkpointing="keep") as fit:
        assert same(train(plain, batch), train(llama, batch))
        assert checkpointing_word.is_on(llama)
        assert "stays on" in " ".join(fit.status().reasons)
    with pytest.raises(ValueError, match="'replace' or 'keep'"):
        lowtide.fit(llama, checkpointing="off")


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpointing_by_the_models_own_code_is_told_with_what_it_costs(reentrant, monkeypatch):
    graphs = []

    def a_millisecond_each(graph, _):
        graphs.append(graph)
        return Costs(op_ms=(1.0,) * len(graph.ops))

    monkeypatch.setattr(step_recording, "costs_of", a_millisecond_each)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model, x = Checkpointed(), torch.randn(128, 64)
    plain = copy.deepcopy(model)
    with lowtide.fit(model, budget="95%") as fit:
        for _ in range(2):  # on an accelerator's first step in a process autograd may run nodes in another order
            model(x).square().mean().backward()
            plain(x).square().mean().backward()
            fit.wait()
        told = next(r for r in fit.status().reasons if "is checkpointed without a switch" in r)
    assert told.startswith("layers.")
    again = 3 * len(["t", "addmm", "tanh"])  # of each layer
    assert f"again took {again / len(graphs[0].ops):.0%} " in told
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


# -- switches -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x, scale=1.0):
        return x + scale * self.down(nn.functional.gelu(self.up(x)))


class WithFlag(Block):
    """As timm's models, MONAI's and many others: a flag that forward reads."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, True)


class TimmLike(WithFlag):
    def forward(self, x):
        run = super().forward
        return checkpoint(run, x, use_reentrant=False) if self.grad_checkpointing else run(x)


class MonaiLike(WithFlag):
    def forward(self, x):
        run = super().forward
        return checkpoint(run, x, use_reentrant=False) if self.use_checkpoint else run(x)


class ActivationCheckpointWrapper(nn.Module):
    """As MONAI's, which has no switch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=False)


class WithScale(nn.Module):
    """Calls a reentrant wrapper with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.block = checkpoint_wrapper(Block(), checkpoint_impl=CheckpointImpl.REENTRANT)

    def forward(self, x):
        return self.block(x, scale=2.0)


WAYS = {
    "checkpoint_wrapper": lambda: checkpoint_wrapper(Block(), preserve_rng_state=False),
    "checkpoint_wrapper, reentrant": WithScale,
    "ActivationCheckpointWrapper": lambda: ActivationCheckpointWrapper(Block()),
    "checkpoint (torch.distributed._composable)": lambda: composable_checkpoint(Block()),
    "gradient checkpointing (grad_checkpointing)": partial(TimmLike, "grad_checkpointing"),
    "gradient checkpointing (use_checkpoint)": partial(MonaiLike, "use_checkpoint"),
}


def steps(model, x, count, fit=None):
    """Losses of an ordinary loop, its weights at the end, and each step's peak beyond what was there."""
    optimizer, losses, peaks = torch.optim.SGD(model.parameters(), lr=0.1), [], []

    def step():
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())

    for number in range(count):
        peaks.append(peak_bytes(step))
        optimizer.step()
        optimizer.zero_grad()
        if fit is not None and number:
            fit.wait()
    return (losses, [p.detach().clone() for p in model.parameters()]), peaks


@pytest.mark.parametrize("way", WAYS)
def test_each_librarys_switch_is_off_while_the_model_is_fitted(way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(WAYS[way]() for _ in range(4)))
    assert ExistingCheckpointing(model).told == way.partition(",")[0]
    x = torch.randn(256, 64, requires_grad=True)  # else reentrant checkpoints give no gradient
    users, (fitted, peaks) = copy.deepcopy(model), (None, None)
    expected, users_peaks = steps(users, x, 5)

    with lowtide.fit(model, budget="60%") as fit:
        fitted, peaks = steps(model, x, 5, fit)
        status, plan = fit.status(), fit.plan
        assert not ExistingCheckpointing(model).told

    assert same(fitted, expected)
    assert peaks[0] <= 1.001 * users_peaks[0]
    assert peaks[1] <= 1.1 * users_peaks[0]
    assert status.planned_steps == 3 and plan.counts["recompute"] > 0
    assert ExistingCheckpointing(model).told == way.partition(",")[0]
    assert not any("without a switch" in reason for reason in status.reasons)


def test_without_the_switches_the_users_own_step_is_never_left(monkeypatch):
    monkeypatch.setattr("lowtide.training.existing_checkpointing._WAYS", ())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(checkpoint_wrapper(Block()) for _ in range(4)))
    with lowtide.fit(model, budget="60%") as fit:
        steps(model, torch.randn(256, 64), 3, fit)
        assert any("without a switch" in reason for reason in fit.status().reasons)


def test_a_flag_of_that_name_with_another_meaning_is_left_alone():
    class Loads(Block):
        """Its flag says where weights come from."""

        def __init__(self) -> None:
            super().__init__()
            self.use_checkpoint = True

        def load(self):
            return "file" if self.use_checkpoint else "hub"

    model = nn.Sequential(Loads(), Loads())
    existing = ExistingCheckpointing(model)
    existing.switch_off()
    assert model[0].use_checkpoint and existing.told == ""


def test_a_percentage_waits_for_the_models_own_step_and_a_budget_in_bytes_does_not(llama, batch):
    with lowtide.fit(llama, budget="64MiB") as fit:
        assert not checkpointing_word.is_on(llama)
        train(llama, batch)
        assert "own checkpointing" not in fit.status().why_not


def test_a_step_that_fails_is_not_the_one_that_counts(llama, batch):
    with lowtide.fit(llama, budget="60%") as fit:
        loss = llama(**batch).loss
        with pytest.raises(RuntimeError, match="on purpose"):
            loss.register_hook(raise_on_purpose)
            loss.backward()
        llama.zero_grad()
        train(llama, batch)
        assert checkpointing_word.is_on(llama) and "own checkpointing" in fit.status().why_not
        train(llama, batch)
        assert not checkpointing_word.is_on(llama) and fit.status().budget_bytes is not None


def raise_on_purpose(_):
    raise RuntimeError("on purpose")
