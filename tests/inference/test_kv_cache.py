"""Predicted cache bytes equal those of caches that transformers filled."""

import pytest
import torch
import transformers
from support.cached_tokens import CONFIGS, cache_bytes, filled_cache

from lowtide.inference import kv_cache
from lowtide.inference.kv_cache import UnknownCacheError, layer_caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_equal_those_of_a_real_cache(name, dtype):
    config = CONFIGS[name]()
    words = str(dtype).removeprefix("torch.")

    for batch_size, length in ((1, 4), (3, 11)):
        layers = layer_caches(config, source_length=length)
        predicted = kv_cache.cache_bytes(layers, batch_size, length, words, words)

        assert predicted == cache_bytes(filled_cache(config, batch_size, length, dtype)) > 0


def test_a_quantised_cache_keeps_its_newest_tokens_plain():
    layers = layer_caches(CONFIGS["llama"]())

    assert kv_cache.cache_bytes(layers, 1, 128, "int4") == kv_cache.cache_bytes(layers, 1, 128)
    plain, quantised = (kv_cache.cache_bytes(layers, 1, 128 + 1024, d) for d in ("bfloat16", "int4"))
    tail = kv_cache.cache_bytes(layers, 1, 128)
    assert (quantised - tail) / (plain - tail) == (0.5 + 4 / 64) / 2


def test_what_has_no_cache_or_an_unknown_one_is_refused_by_name():
    with pytest.raises(UnknownCacheError, match="bert generates nothing"):
        layer_caches(transformers.BertConfig())
    with pytest.raises(UnknownCacheError, match="source_length"):
        layer_caches(CONFIGS["t5"]())
