"""Layers of a KV cache in pinned host memory: the same tokens within the budget, whatever runs first."""

import itertools

import pytest
import torch
from support.cached_tokens import KV
from support.quick import thorough_but

from accelerator.schedules import EARLY, LATE, RANDOM
from lowtide.device import pinning
from lowtide.inference import LayerOffloadCache, cache_places

transformers = pytest.importorskip("transformers")

CONFIG = transformers.LlamaConfig(**{**KV, "num_hidden_layers": 8})
LAYER_BYTES = 2 * 2 * 2 * 17 * 8 * 4
ORDERS = {"late-early": (LATE, EARLY), "early-late": (EARLY, LATE)}
ORDERS |= {f"random {seed}": (RANDOM, RANDOM, seed) for seed in range(4)}


def made(cache=None):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG).eval().to("standin")
    ids = torch.randint(1, CONFIG.vocab_size, (2, 6)).to("standin")
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
                          max_new_tokens=12, use_cache=True).cpu()  # fmt: skip


@pytest.mark.parametrize("order", thorough_but([*ORDERS][:2], ORDERS))
def test_tokens_are_the_same_and_bytes_those_predicted(device, order):
    plain = made()
    with device.schedule(*ORDERS[order]):
        cache = LayerOffloadCache(CONFIG, budget=5 * LAYER_BYTES)
        found = made(cache)

    assert torch.equal(found, plain)
    assert cache.moved_bytes and 4 * LAYER_BYTES <= cache.peak_bytes <= cache.predicted_bytes(LAYER_BYTES)


class Unrecorded(torch.Event):
    """An event that nobody waits for."""

    def record(self, stream=None):
        pass


@pytest.mark.parametrize(("which", "order"), [(0, (LATE, EARLY)), (1, (EARLY, LATE))])
def test_each_wait_is_needed(device, monkeypatch, which, order):
    """Of the stream that brings a layer back for the one that wrote it, and of that for the layer."""
    plain, made_events, new_event = made(), itertools.count(), cache_places.new_event

    def some_event(where):
        return Unrecorded(where) if next(made_events) % 2 == which else new_event(where)

    monkeypatch.setattr(cache_places, "new_event", some_event)
    with device.schedule(*order):
        found = made(LayerOffloadCache(CONFIG, budget=5 * LAYER_BYTES))
    assert not torch.equal(found, plain)


def test_without_pinned_memory_it_works_too(device, monkeypatch):
    def refused(size):
        raise pinning.PinningError("no pinned memory")

    monkeypatch.setattr(cache_places, "pinned_buffer", refused)
    assert torch.equal(made(LayerOffloadCache(CONFIG, budget=5 * LAYER_BYTES)), made())
