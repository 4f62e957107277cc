"""Loops as nanoGPT and torchtitan have them: the bits of the same loop without lowtide, each step within the budget."""

import pytest
import torch
from support.compiled_loops import GPT, WITHIN, nanogpt, torchtitan_of_rank
from support.ranks import on_every_rank
from torch import nn

import lowtide
from lowtide.compiled import op_rates
from lowtide.step.bits import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "whole"])
def test_nanogpt_trains_the_same_within_a_budget_below_its_peak(whole):
    """By layer under autocast; a whole graph keeps more digits there in most sets than PyTorch's own."""
    torch.manual_seed(0)
    plain = GPT()
    model = GPT()
    model.load_state_dict(plain.state_dict())
    for part in [plain] if whole else plain.transformer.h:
        part.compile(fullgraph=True, dynamic=False)
    losses, weights, peaks = nanogpt(plain, autocast=not whole)
    budget = int(WITHIN * max(peaks))
    torch._dynamo.reset()
    op_rates._bytes_per_ms.cache_clear()  # it is measured with more memory than the model has, and in no step
    compiled = lowtide.compile(model, budget=budget, layers=["*"] if whole else None)

    found = nanogpt(model, compiled, autocast=not whole)

    assert losses == found[0] and all(map(same_bits, weights, found[1]))
    assert max(found[2]) <= budget < max(peaks)
    assert compiled.status().in_force and compiled.reason == ""
    assert any(set(plan.layers.values()) != {"plain"} for plan in compiled.plans)


class PaddedEncoder(nn.Module):
    """PyTorch's own encoder on padded rows."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(500, 128, padding_idx=0)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 4)

    def forward(self, x):
        padded = x == 0
        hidden = self.encoder(self.embedding(x), src_key_padding_mask=padded)
        return self.head(hidden.masked_fill(padded[..., None], 0).sum(1))


def padded_batches(lengths):
    """The first of each length has no padding."""
    generator = torch.Generator().manual_seed(0)
    for number, length in enumerate(lengths):
        rows = torch.randint(1, 500, (8, length), generator=generator)
        for row in range(8) if number >= len(set(lengths)) else ():
            rows[row, length - row * length // 16 :] = 0
        yield rows, torch.randint(0, 4, (8,), generator=generator)


def train_padded(model, after_step=lambda: None):
    """Autocast, accumulation over two batches, evaluation in between: losses, then weights."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    batches = list(padded_batches([64, 96, 128] * 5))
    for number, (rows, labels) in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(rows), labels) / 2
        loss.backward()
        losses.append(loss.item())
        after_step()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        if number % 4 == 3:
            model.eval()
            with torch.no_grad():
                losses.append(model(batches[-1][0]).sum().item())
            model.train()
    return losses, list(model.parameters())


def in_own_frame(layer):
    """``layer.compile()`` compiles nothing of what is PyTorch's own."""
    call = layer._call_impl
    return torch.compile(lambda *args, **kwargs: call(*args, **kwargs), dynamic=False)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["26MiB", "28MiB"])
def test_a_padded_encoder_trains_the_same_under_autocast_whatever_its_first_steps_say_of_later_ones(budget):
    """Its biases begin at zero, and nothing is masked in the first batch of a length."""
    with torch._dynamo.config.patch(recompile_limit=256):
        torch.manual_seed(0)
        plain, model = PaddedEncoder(), PaddedEncoder()
        model.load_state_dict(plain.state_dict())
        for layer in plain.encoder.layers:
            layer._compiled_call_impl = in_own_frame(layer)
        expected = train_padded(plain)
        compiled = lowtide.compile(model, budget=budget)
        found = train_padded(compiled, compiled.wait)

    assert expected[0] == found[0] and all(map(same_bits, expected[1], found[1]))
    assert compiled.status().planned_steps > 4 and compiled.reason == ""
    assert any(set(plan.layers.values()) != {"plain"} for plan in compiled.plans)


@pytest.mark.slow
def test_torchtitan_compiles_by_layer_then_shards_and_trains_the_same_within_a_budget_below_its_peak():
    for told in on_every_rank(torchtitan_of_rank):
        assert told["equal"] and told["reason"] == "" and told["status"]["in_force"], told
        peaks = told["peaks"][2:]  # those of the first step are before there is a state of AdamW
        assert max(min(peaks[::2]), min(peaks[1::2])) <= told["budget"], told
        assert any(set(plan.values()) != {"plain"} for plan in told["plans"]), told
