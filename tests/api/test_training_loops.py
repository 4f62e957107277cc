"""What training scripts do, each a place where re-running Python in backward goes wrong: the same bits as plainly.

The second half follows what PyTorch's documentation says of ``torch.utils.checkpoint``: what it supports holds here,
and what it warns of does not happen.
"""

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.training_steps import differing, drop_everything, harshest, outcome, plain, planned, replays
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.plan import RECOMPUTE


class Mlp(nn.Module):
    """Linear and tanh, ``depth`` times."""

    def __init__(self, depth: int = 6, width: int = 16) -> None:
        super().__init__()
        generator = torch.Generator(torch.get_default_device()).manual_seed(depth)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) / 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


X = torch.randn(64, 16, generator=torch.Generator(torch.get_default_device()).manual_seed(0))


def trained(model: nn.Module, loop: Callable[[nn.Module], Any], *, fitted: bool, **options: Any) -> Any:
    """What ``loop`` returns, and the parameters and buffers after it, of a copy trained with or without a plan."""
    model = copy.deepcopy(model)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    fit = lowtide.fit(model, X, budget="70%", **options) if fitted else None
    assert fit is None or fit.plan.counts[RECOMPUTE]
    found = loop(model)
    if fit is not None:
        assert fit.status().steps and fit.status().planned_steps
    return found, [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def trains_the_same(model: nn.Module, loop: Callable[[nn.Module], Any], **options: Any) -> bool:
    (found, state), (expected, expected_state) = (
        trained(model, loop, fitted=fitted, **options) for fitted in (True, False)
    )
    return found == expected and all(map(torch.equal, state, expected_state))


def descend(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- randomness, counters, hooks --------------------------------------------------------------------------------------


class DropsLayers(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() < 0.7:
                x = layer(x).tanh()
            x = x + float(np.random.rand())
        return x


def test_randomness_of_python_and_numpy_in_forward_is_drawn_once():
    assert trains_the_same(DropsLayers(6), lambda m: (descend(m, lambda m: m(X).square().mean(), 6), random.random()))


class Counting(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("load", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.load += (x > 0).float().mean(0).detach()
        return super().forward(x)


def test_counters_and_load_statistics_move_once_a_step():
    model = Counting()
    fit = lowtide.fit(model, X, budget="70%")
    before = model.calls
    expected = model.load + (X > 0).float().mean(0)

    model(X).square().mean().backward()

    assert fit.plan.counts[RECOMPUTE]
    assert model.calls == before + 1
    assert torch.equal(model.load, expected)


def test_hooks_that_come_or_go_between_forward_and_backward_change_nothing():
    model = Mlp()
    plan = harshest(model, X)
    expected = plain(model, X)
    fired = []
    going = model.layers[0].register_forward_hook(lambda *_: fired.append("going"))

    torch.manual_seed(7)
    with lowtide.apply(model, plan):
        loss = model(X).square().mean()
    going.remove()
    coming = model.layers[1].register_forward_hook(lambda module, args, out: fired.append("coming") or out * 2)
    loss.backward()
    coming.remove()

    assert fired == ["going"]
    assert differing(expected, outcome(model, loss)) == []


# -- what is frozen, shared or cached ---------------------------------------------------------------------------------


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Mlp(6), Mlp(6)
        self.trunk.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


def test_a_frozen_trunk_is_not_run_again():
    model = Headed()
    with lowtide.fit(model, X, budget="70%"), replays() as seen:
        model(X).square().mean().backward()

    assert seen
    assert not [recipe.op.where for recipe in seen if recipe.op.where.startswith("trunk")]


class SharesKeys(nn.Module):
    """Later layers attend to the keys and values of an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = self.k(x)[None, None], self.v(x)[None, None]
        for q in self.q:
            x = x + F.scaled_dot_product_attention(q(x)[None, None], k, v, dropout_p=0.1)[0, 0]
        return x


def test_keys_and_values_shared_between_layers_get_all_their_gradients():
    model = SharesKeys()

    assert differing(plain(model, X), planned(model, X, harshest(model, X))) == []


def test_a_cache_left_on_in_training_is_written_once():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, use_cache=True, attn_implementation="sdpa",
    )  # fmt: skip
    ids = torch.arange(12).reshape(1, 12)
    batch = {"input_ids": ids, "labels": ids}
    model = transformers.LlamaForCausalLM(config).train()
    plan = harshest(model, batch)
    expected = plain(model, batch)

    torch.manual_seed(7)
    with lowtide.apply(model, plan):
        out = model(**batch)
    out.loss.backward()

    assert out.past_key_values.get_seq_length() == 12
    assert differing(expected, outcome(model, out.loss)) == []


# -- several models, several backwards --------------------------------------------------------------------------------


def adversaries(fitted: bool) -> list[float]:
    """A generator and a discriminator in turns, each with steps of its optimizer between the other's backwards."""
    torch.manual_seed(1)
    maker, judge = Mlp(8), Mlp(6)
    if fitted:
        fits = [lowtide.fit(m, X, budget="70%") for m in (maker, judge)]
    makers, judges = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, judge))
    losses = []
    for step in range(3):
        made = maker(X + step)
        judged = judge(made.detach()).mean() - judge(X).mean()
        judges.zero_grad()
        judged.backward()
        judges.step()
        fooled = -judge(made).mean()
        makers.zero_grad()
        fooled.backward()
        makers.step()
        losses += [judged.item(), fooled.item()]
    if fitted:
        of_maker, of_judge = fits
        assert sum(p.tape.counts.dropped for p in of_maker._lifecycle.plans_by_shape.plans)
        assert "2 calls of the model, and its plan is for 1" in " ".join(of_judge.warnings)
    return losses


def test_two_models_that_train_against_each_other_step_as_plainly():
    assert adversaries(fitted=True) == adversaries(fitted=False)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = Mlp(6), Mlp(2), Mlp(2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.actor(h), self.critic(h)


def two_losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        actor, critic = model(X)
        actor.logsumexp(-1).mean().backward(retain_graph=True)
        critic.square().mean().backward()
        optimizer.step()
        seen.append(actor.sum().item())
    return seen


def test_an_actor_and_a_critic_run_backward_twice_over_one_trunk():
    step = lambda model, x: sum(out.square().mean() for out in model(x))  # noqa: E731

    assert trains_the_same(ActorCritic(), two_losses, step=step)


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = self.linear(x).sin()
        return self(x, depth - 1) if depth else x


def test_a_model_that_calls_itself_is_exact():
    model = Recursive()

    assert differing(plain(model, X), planned(model, X, harshest(model, X))) == []


def test_a_fitted_model_inside_another_model_trains_exactly():
    inner = Mlp()
    outer = nn.Sequential(nn.Linear(16, 16), inner, nn.Linear(16, 16))
    expected = plain(outer, X)
    fit = lowtide.fit(inner, X, budget="70%")

    for _ in range(2):  # the input has a gradient here: another step than the one that was rehearsed
        torch.manual_seed(7)
        outer.zero_grad()
        loss = outer(X).square().mean()
        loss.backward()
        fit.wait()
        assert differing(expected, outcome(outer, loss)) == []

    assert fit.status().in_force and fit._lifecycle.plans_by_shape.plans[-1].tape.counts.dropped


def test_a_batch_that_another_graph_made_is_planned_for_without_running_backward_through_that_graph(monkeypatch):
    from lowtide.tracing import tracer
    from lowtide.training import rehearsal

    before = nn.Linear(16, 16)
    lowtide.fit(Mlp(), before(X).sin(), budget="70%")
    assert before.weight.grad is None
    for module in (rehearsal, tracer):
        monkeypatch.setattr(module, "without_history", lambda batch: batch)

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        lowtide.fit(Mlp(), before(X).sin(), budget="70%")


def test_a_fitted_model_pickles_as_the_plain_one():
    model = Mlp()
    fit = lowtide.fit(model, X, budget="70%")

    again = pickle.loads(pickle.dumps(model))

    assert differing(plain(model, X), plain(again, X)) == []
    assert all(m._compiled_call_impl is None for m in again.modules())
    assert fit.plan.counts[RECOMPUTE]


# -- what checkpointing's documentation supports or warns of ----------------------------------------------------------


@dataclasses.dataclass
class Answer:
    loss: torch.Tensor
    parts: dict[str, list[torch.Tensor]]


class Structured(Mlp):
    """Keyword arguments in, nested structures and objects out, detached and no-grad parts inside."""

    def forward(self, x: torch.Tensor, *, scale: dict[str, float]) -> Answer:
        h = super().forward(x * scale["by"])
        with torch.no_grad():
            weights = h.softmax(-1)
        kept = h.detach().sin()
        return Answer((h * weights * kept).square().mean(), {"all": [h, kept]})


def test_structures_keywords_detached_and_ungraded_parts_are_right():
    model, batch = Structured(), {"x": X, "scale": {"by": 0.5}}

    assert differing(plain(model, batch), planned(model, batch, harshest(model, batch))) == []


def test_an_input_that_requires_no_gradient_still_gives_the_parameters_theirs():
    model = Mlp()
    assert not X.requires_grad

    found = planned(model, X, harshest(model, X))

    assert all(found[f"gradient of {name}"] is not None for name, _ in model.named_parameters())


def test_gradients_by_autograd_grad_for_some_inputs_replay_only_what_they_need():
    model, x = Mlp(6), X.clone().requires_grad_()
    plan = drop_everything(lowtide.trace(model, x))
    last = list(model.layers[-1].parameters())
    expected = torch.autograd.grad(model(x).square().mean(), last)

    with lowtide.apply(model, plan):
        loss = model(x).square().mean()
    with replays() as seen:
        found = torch.autograd.grad(loss, last, retain_graph=True)
    with replays() as all_seen:
        everything = torch.autograd.grad(loss, [x, *model.parameters()])

    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, everything, torch.autograd.grad(model(x).square().mean(), [x, *model.parameters()])))
    assert 0 < len(seen) <= len(all_seen)


def test_only_a_part_of_the_outputs_need_run_backward():
    model = ActorCritic()
    step = lambda model, x: model(x)[1].square().mean()  # noqa: E731
    plan = harshest(model, X, step)

    found = planned(model, X, plan, step)

    assert found["gradient of actor.layers.0.weight"] is None
    assert differing(plain(model, X, step), found) == []


def test_globals_that_change_between_forward_and_backward_are_not_read_again():
    scale = [2.0]

    class Global(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * scale[0]).sin()

    model = Global()
    expected = plain(model, X)
    plan = harshest(model, X)
    torch.manual_seed(7)
    with lowtide.apply(model, plan):
        loss = model(X).square().mean()
    scale[0] = 5.0
    loss.backward()

    assert differing(expected, outcome(model, loss)) == []


def test_the_generator_is_where_the_plain_step_leaves_it():
    model = nn.Sequential(Mlp(), nn.Dropout(0.5), Mlp())
    plan = harshest(model, X)
    left = []
    for under in (False, True):
        torch.manual_seed(5)
        if under:
            with lowtide.apply(model, plan):
                loss = model(X).square().mean()
        else:
            loss = model(X).square().mean()
        loss.backward()
        left.append(torch.rand(1).item())

    assert left[0] == left[1]


def test_hooks_on_saved_tensors_inside_the_model_have_their_say():
    seen = []

    class Hooked(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x).sin()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
                x = self.layers[1](x).tanh()
            with torch.autograd.graph.save_on_cpu():
                return self.layers[2](x.sin())

    model = Hooked()
    expected = plain(model, X)
    plan = harshest(model, X)
    seen.clear()

    assert differing(expected, planned(model, X, plan)) == []
    assert seen


def test_nested_tensors_are_right_or_refused_by_name():
    class Ragged(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ragged = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)
            rows = super().forward(x)
            return rows.sum() + ragged.values().sum() * self.layers[0].weight.sum()

    model = Ragged()
    try:
        found = planned(model, X, harshest(model, X))
    except lowtide.LowtideError as error:
        assert "NestedTensor" in str(error)
        return
    assert differing(plain(model, X), found) == []
