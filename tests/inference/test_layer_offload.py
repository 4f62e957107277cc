"""A cache within a budget generates the same tokens, and takes what it said."""

import pytest
import torch
import transformers
from support.cached_tokens import CONFIGS, KV

import lowtide
from lowtide.graph.costs import Link
from lowtide.inference import LayerOffloadCache, layer_offload


def made(config, cache=None, beams=1):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(1, config.vocab_size, (2, 6))
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
                          max_new_tokens=12, num_beams=beams, use_cache=True)  # fmt: skip


def deep():
    return transformers.LlamaConfig(**{**KV, "num_hidden_layers": 8})


def layer_bytes(sequences, length):
    return 2 * sequences * 2 * length * 8 * 4


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_are_the_same_greedy_and_with_beams(tmp_path, name, beams):
    config = deep() if name == "llama" else CONFIGS[name]()
    cache = LayerOffloadCache(config, budget=4 * layer_bytes(2 * beams, 17), scratch_dir=tmp_path)

    assert torch.equal(made(config, cache, beams), made(config, beams=beams))
    assert cache.peak_bytes <= cache.budget_bytes
    assert cache.moved_bytes > 0 or name == "gemma2"
    assert cache.get_seq_length() == 17


def test_measured_bytes_are_the_predicted_ones(tmp_path):
    size = layer_bytes(2, 17)
    cache = LayerOffloadCache(deep(), budget=5 * size, scratch_dir=tmp_path)
    made(deep(), cache)

    assert cache.predicted_bytes(size) == 5 * size  # three stay, one is in use, one is on its way
    assert cache.peak_bytes == 5 * size


def test_what_fits_is_never_moved(tmp_path):
    cache = LayerOffloadCache(deep(), budget=8 * layer_bytes(2, 17), scratch_dir=tmp_path)
    made(deep(), cache)

    assert cache.moved_bytes == 0 and cache.peak_bytes == 8 * layer_bytes(2, 17)


def test_a_budget_below_two_layers_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(lowtide.TierError, match="does not hold two layers"):
        made(deep(), LayerOffloadCache(deep(), budget=1000, scratch_dir=tmp_path))
    with pytest.raises(ValueError, match="not an amount of memory"):
        LayerOffloadCache(deep(), budget="40%")


def test_nothing_is_left_behind(tmp_path):
    made(deep(), LayerOffloadCache(deep(), budget=4 * layer_bytes(2, 17), scratch_dir=tmp_path))

    assert list(tmp_path.iterdir()) == []


def test_a_layer_goes_away_once_and_then_each_token_alone(tmp_path):
    cache = LayerOffloadCache(deep(), budget=5 * layer_bytes(2, 17), scratch_dir=tmp_path)
    made(deep(), cache)

    # Five of eight layers, of 17 tokens. Room is made for twice the first six and, once, for twice thirteen: those are
    # written again. Layers that had to leave later were written at the length they had.
    assert cache.moved_bytes <= 5 * (layer_bytes(2, 17) + layer_bytes(2, 13))


@pytest.mark.parametrize(
    ("device", "copy_ms", "expected"),
    [
        ("cpu", 10.0, 100 + 5 * 10),  # a copy and the layers share memory
        ("meta", 10.0, 100),  # a device copies beside its kernels: 12.5 ms a layer
        ("meta", 50.0, 100 + 5 * 50 - 100),  # eight layers run between five copies
    ],
)
def test_predicted_time_is_what_copies_take_longer_than_the_layers_between(tmp_path, device, copy_ms, expected):
    cache = LayerOffloadCache(deep(), budget=5000, scratch_dir=tmp_path)
    link = Link(1e12, 1e12, latency_ms=copy_ms)

    assert cache.predicted_ms(1000, 100.0, device=device, link=link) == pytest.approx(expected)
    assert cache.predicted_ms(625, 100.0, device=device, link=link) == 100  # eight of them fit


def test_the_link_is_measured_where_none_is_given(tmp_path, monkeypatch):
    asked = []

    def measured(*where):
        asked.append(where)
        return Link(1e12, 1e12, latency_ms=50.0)

    monkeypatch.setattr(layer_offload, "measured_link", measured)
    cache = LayerOffloadCache(deep(), budget=5000, scratch_dir=tmp_path)
    assert cache.predicted_ms(1000, 100.0) == pytest.approx(350) and asked == [("disk", "cpu", tmp_path)]
