"""``lowtide advise`` on a small model."""

import json
from dataclasses import replace

import pytest

from lowtide import cli
from lowtide.estimation.device_table import device_named
from lowtide.foresight import advice as advice_module
from lowtide.foresight import subjects
from lowtide.foresight.advice import advise
from lowtide.foresight.forecaster import Forecaster
from lowtide.foresight.named_subjects import subject_named
from lowtide.foresight.training_setup import TrainingSetup

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512,
         "tie_word_embeddings": False}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def asked(model, usable_bytes, **options):
    device = replace(device_named("h100"), usable_bytes=usable_bytes, context_bytes=0, blas_workspace_bytes=0)
    return advise(Forecaster(subject_named(model)), device, seq_len=256, precision="bf16", **options)


def test_what_fits_is_ranked_and_makes_the_global_batch(model):
    advice = asked(model, 24 << 20, global_batch=8)
    rates = [forecast.tokens_per_second for forecast in advice.ranked]

    assert rates == sorted(rates, reverse=True) and len(rates) >= 3
    assert all(f.fits and f.setup.sequences == 8 for f in advice.ranked)
    assert {f.setup.offload_optimizer for f in advice.ranked} == {False, True}
    assert not advice.ranked[0].setup.offload_optimizer
    assert any(change.option == "--attention eager" for change in advice.toggles)


def test_where_nothing_fits_it_says_what_more_would(model):
    advice = asked(model, 1 << 20, global_batch=2)

    assert advice.ranked == [] and advice.nearest.setup.offload_optimizer


def test_several_devices_divide_the_work_in_every_way(capsys, model, monkeypatch):
    monkeypatch.setattr(advice_module, "RANKED", 100)  # dividing the layers of a model as small as this one is slow
    args = ("advise", "--model", model, "--device", "h100", "--gpus", "2", "--global-batch", "2", "--seq-len", "64",
            "--precision", "bf16", "--json")  # fmt: skip
    code = cli.main(args)
    body = json.loads(capsys.readouterr().out)
    ways = {(c["setup"]["sharding"], c["setup"]["tensor_parallel"]) for c in body["candidates"]}

    assert code == 0
    assert ways == {("none", 1), ("zero1", 1), ("zero2", 1), ("fsdp", 1), ("none", 2)}
    assert {"pipelines", "ZeRO 3"} <= set(body["not_tried"])


def test_a_batch_that_cannot_be_divided_is_refused(capsys, model):
    args = ("advise", "--model", model, "--device", "h100", "--gpus", "3", "--global-batch", "2", "--seq-len", "64")
    code = cli.main([*args, "--json"])

    assert code == 2 and "--global-batch 2 cannot be divided" in json.loads(capsys.readouterr().out)["error"]


def test_what_is_not_looked_at_is_not_faster(model, monkeypatch):
    everything = asked(model, 24 << 20, global_batch=8)

    monkeypatch.setattr(advice_module, "RANKED", 1)
    fewer = asked(model, 24 << 20, global_batch=8)

    assert len(fewer.ranked) < len(everything.ranked)
    assert fewer.ranked[0].tokens_per_second == everything.ranked[0].tokens_per_second


def test_a_deep_model_is_forecast_from_a_few_of_its_layers(model, tmp_path, monkeypatch):
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 12}))
    setup = TrainingSetup(device_named("h100"), seq_len=64)
    repeated = subject_named(model).trace(setup)

    monkeypatch.setattr(subjects, "_DEEP", 100)

    whole = subject_named(model).trace(setup)
    assert (repeated.ops, repeated.storages, repeated.resident) == (whole.ops, whole.storages, whole.resident)
