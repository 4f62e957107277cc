"""``lowtide kv``, and the dimensions of the models that it knows."""

import json

import pytest

from lowtide import cli
from lowtide.inference.cache_plan import config_of, count_parameters
from lowtide.inference.kv_cache import cache_bytes, layer_caches
from lowtide.models.shipped import model_facts, model_names


def kv(capsys, *args):
    code = cli.main(["kv", "--json", *args])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", "qwen3-30b-a3b", "gemma-2-9b", "phi-4", "falcon-7b", "t5-base", "bert-base-uncased", "mamba-130m"],
)
def test_parameter_counts_are_the_published_ones(name):
    facts = model_facts(name)

    assert count_parameters(config_of(facts)) == facts["parameters"]


@pytest.mark.parametrize("name", model_names())
def test_every_shipped_model_has_a_source_and_a_config(name):
    facts = model_facts(name)

    assert facts["name"] == name and facts["source"].startswith("https://") and facts["parameters"] > 10**7
    assert config_of(facts).model_type == facts["config"]["model_type"]


def test_the_cache_of_llama_is_the_formula():
    config = config_of(model_facts("llama-3.1-8b"))

    assert cache_bytes(layer_caches(config), 32, 2048) == 2 * 32 * 8 * 128 * 2 * 32 * 2048


def test_the_encoders_output_is_cached_as_long_as_its_input(capsys):
    asked = ("--model", "t5-base", "--device", "h100", "--seq-len", "128", "--source-len")
    short, long = (kv(capsys, *asked, length)[1]["cache_bytes"] for length in ("512", "1024"))

    assert long - short == 2 * 12 * 768 * 2 * 512  # keys and values of 12 layers, in bfloat16


def test_latent_attention_holds_the_latent():
    config = config_of(model_facts("deepseek-v3"))

    assert cache_bytes(layer_caches(config), 1, 1000) == 61 * (512 + 64) * 2 * 1000


def test_what_fits_fits_and_one_more_does_not(capsys):
    size = ("--model", "llama-3.1-8b", "--device", "a100-80gb", "--seq-len", "2048")
    code, first = kv(capsys, *size, "--batch-size", "32")
    most = first["max_batch_size"]

    assert code == 0 and first["fits"] and first["cache_bytes"] == 8 * 2**30
    assert 0.2 < first["settings"]["vllm"]["gpu_memory_utilization"] < 0.5
    assert first["settings"]["vllm"]["max_model_len"] == 2048
    assert first["settings"]["text-generation-webui"]["n_ctx"] == 131072
    # More sequences need more room for logits too, so the boundary may lie a little below.
    assert kv(capsys, *size, "--batch-size", str(int(0.97 * most)))[0] == 0
    assert kv(capsys, *size, "--batch-size", str(most + 1))[0] == 1


def test_a_quantised_cache_fits_more(capsys):
    size = ("--model", "llama-2-13b", "--device", "rtx4090", "--seq-len", "4096", "--dtype", "float16")
    code, plain = kv(capsys, *size)
    assert code == 1 and not plain["fits"] and plain["settings"] == {}

    plain = kv(capsys, "--model", "llama-2-7b", *size[2:])[1]
    quantised = kv(capsys, "--model", "llama-2-7b", *size[2:], "--cache-dtype", "int4")[1]
    assert quantised["max_batch_size"] > 3 * plain["max_batch_size"] > 0


def test_a_config_file_and_its_directory_count_their_own_parameters(capsys, tmp_path):
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 64, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = [kv(capsys, "--model", str(p), "--device", "t4") for p in (tmp_path, tmp_path / "config.json")]

    assert all(code == 0 for code, _ in found)
    assert found[0][1]["parameters"] == 2 * 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--model", "llama-3.1-9b", "--device", "h100"), "Did you mean 'llama-3.1-8b'?"),
        (("--model", "gpt2", "--device", "h10"), "Nearest: h100"),
        (("--model", "gpt2", "--device", "h100", "--batch-size", "0"), "not positive"),
        (("--model", "bert-base-uncased", "--device", "h100"), "no KV cache"),
        (("--model", "t5-base", "--device", "h100"), "source_length="),
    ],
)
def test_bad_usage_is_json_and_exit_two(capsys, args, words):
    code, body = kv(capsys, *args)

    assert code == 2 and body["status"] == "bad_usage" and words in body["message"]
