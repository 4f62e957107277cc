"""Adapters on layers in 4 bits, as QLoRA trains them (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), or 8."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from step_probe import resident_bytes
from support.trainers import llama
from torch import nn

import lowtide
from lowtide.measurement.allocator import measuring

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
STEPS, PLANNED = 4, 2  # the first two steps watch; then the plan is waited for


FOUR_BITS = partial(bitsandbytes.nn.LinearNF4, bias=False, compute_dtype=torch.bfloat16)
EIGHT_BITS = partial(bitsandbytes.nn.Linear8bitLt, bias=False, has_fp16_weights=False)


def adapted(layer: Callable[..., nn.Module]) -> nn.Module:
    """A decoder with adapters on the linear layers of each decoder layer, which are ``layer``; its head is plain."""
    model = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    for parent in [m for m in model.model.modules() if not isinstance(m, nn.Linear)]:
        for name, plain in [(n, m) for n, m in parent.named_children() if isinstance(m, nn.Linear)]:
            small = layer(plain.in_features, plain.out_features)
            small.load_state_dict(plain.state_dict())
            setattr(parent, name, small)
    model.to("cpu")  # where the weights are made small
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)).train()


def train(model: nn.Module, budget: int | None = None) -> tuple[list[float], list[torch.Tensor], list[int], list[int]]:
    """Losses, trained weights, and of each step its peak and what was there before it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    fit = None if budget is None else lowtide.fit(model, budget=budget, optimizer=optimizer)
    losses, peaks, before = [], [], []
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        tokens = torch.randint(3, 90, (4, 64), generator=generator)
        state = [t for values in optimizer.state.values() for t in values.values()]
        there = resident_bytes(model, (tokens, state))
        with measuring("cpu") as counter:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        before.append(there)
        peaks.append(there + counter.peak)
        if fit is not None and step + 1 == STEPS - PLANNED:
            fit.wait(120)
    if fit is not None:
        assert fit.status().planned_steps == PLANNED
        assert fit.plan.counts["recompute"] > 0
        fit.remove()
    return losses, [p.detach().clone() for p in trained], peaks, before


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [(FOUR_BITS, torch.uint8), pytest.param(EIGHT_BITS, torch.int8, marks=pytest.mark.slow)],
    ids=["4", "8"],
)
def test_adapters_on_layers_in_few_bits_train_as_without_a_budget(layer, dtype):
    model = adapted(layer)
    weights = [m.weight for m in model.modules() if isinstance(m, layer.func)]
    assert len(weights) == 21 and all(w.dtype == dtype and not w.requires_grad for w in weights)
    begin = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    losses, trained, peaks, before = train(model)
    budget = max(before) + (max(peaks) - max(before)) // 2
    planned_losses, planned_trained, planned_peaks, _ = train(adapted(layer), budget)

    assert planned_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(planned_trained, trained, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(begin, trained, strict=True))
    assert max(planned_peaks[-PLANNED:]) <= budget < min(peaks)
