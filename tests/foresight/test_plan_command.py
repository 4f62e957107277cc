"""``lowtide plan`` on small models: what it answers, and what it refuses."""

import json
import sys
from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide import cli
from lowtide.estimation.device_table import device_named
from lowtide.foresight import rank_memory as rank_memory_module
from lowtide.foresight.forecaster import Forecaster
from lowtide.foresight.named_subjects import subject_named
from lowtide.foresight.rank_memory import rank_memory
from lowtide.foresight.training_setup import SetupError, TrainingSetup, degrees
from lowtide.hollow.devices import target_of
from lowtide.models.shipped import model_facts

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512,
         "tie_word_embeddings": False}  # fmt: skip
H100 = device_named("h100")


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "config.json")


def small(usable_bytes, **facts):
    """A device with little memory, and nothing beside tensors."""
    return replace(H100, usable_bytes=usable_bytes, context_bytes=0, blas_workspace_bytes=0, **facts)


def plan(capsys, *args):
    code = cli.main(["plan", "--json", *args])
    return code, json.loads(capsys.readouterr().out)


def test_the_answer_has_every_field_and_its_parts_add_up(capsys, model):
    code, body = plan(capsys, "--model", model, "--device", "h100", "--batch-size", "2", "--no-limits")

    assert code == 0 and body["fits"] is True and body["verdict"] == "fits" and body["status"] == "ok"
    assert body["parameters"] == 1000 * 64 * 2 + 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192 + 128) + 64
    assert sum(body["by_part"].values()) == body["peak_bytes"]["expected"]
    assert body["peak_bytes"]["low"] < body["peak_bytes"]["expected"] < body["peak_bytes"]["high"]
    assert body["step_ms"]["low"] < body["step_ms"]["expected"] < body["step_ms"]["high"]
    assert body["by_part"]["optimizer"] >= 4 * body["parameters"] == 2 * body["by_part"]["parameters"]
    assert body["plan"]["overhead"] == 0 and body["changes"] == [] and body["assumptions"]
    assert body["setup"]["seq_len"] == 512  # all positions


def test_float32_copies_of_16_bit_weights_count_and_an_optimizer_on_the_host_does_not(capsys, model):
    asked = ("--model", model, "--device", "h100", "--seq-len", "64", "--precision", "bf16", "--no-limits")
    plain, copies, on_host = (
        plan(capsys, *asked, *option)[1] for option in ((), ("--master-weights",), ("--offload-optimizer",))
    )

    more = copies["by_part"]["optimizer"] - plain["by_part"]["optimizer"]
    assert more == pytest.approx(8 * plain["parameters"], rel=0.02)  # the copy, and both moments in float32 too
    assert on_host["by_part"]["optimizer"] < plain["by_part"]["optimizer"] / 10


def test_activations_go_to_the_host_only_where_that_is_asked_for(capsys, model):
    asked = ("--model", model, "--device", "h100", "--batch-size", "8", "--seq-len", "128", "--budget", "93%")
    alone, moved = (plan(capsys, *asked, "--no-limits", *option)[1] for option in ((), ("--offload-activations",)))

    assert alone["plan"]["counts"]["cpu_offload"] == 0 < moved["plan"]["counts"]["cpu_offload"]
    assert moved["plan"]["overhead"] < alone["plan"]["overhead"]


def test_the_largest_batch_fits_and_one_more_does_not(model):
    from lowtide.foresight import limits

    forecaster, setup = Forecaster(subject_named(model)), TrainingSetup(small(24 << 20), seq_len=256)
    most = limits.max_batch_size(forecaster, setup)

    assert most > 1
    assert forecaster.forecast(replace(setup, batch_size=most)).fits
    assert not forecaster.forecast(replace(setup, batch_size=most + 1)).fits
    assert limits.max_seq_len(forecaster, replace(setup, batch_size=most // 2)) == 512


def test_what_does_not_fit_says_what_would(model):
    from lowtide.foresight import changes

    forecaster = Forecaster(subject_named(model))
    setup = TrainingSetup(small(12 << 20), seq_len=256, batch_size=8)
    forecast = forecaster.forecast(setup)
    helping = changes.helpful_changes(forecaster, setup)

    assert forecast.verdict == "does not fit" and forecast.plan is None
    assert helping[0].option == "--batch-size 1 --accumulate 8" and helping[0].forecast.fits


def test_what_is_resident_alone_is_refused_without_a_trace(model, monkeypatch):
    subject = subject_named(model)
    monkeypatch.setattr(subject, "trace", None)  # would fail
    forecast = Forecaster(subject).forecast(TrainingSetup(small(1 << 20), seq_len=256))

    assert forecast.verdict == "does not fit" and not forecast.traced and forecast.step_ms is None
    assert forecast.by_part["parameters"] > 1 << 19


def test_trace_takes_names_of_the_device_table(model):
    from lowtide.hollow.models import language_batch

    target = target_of("v100-16gb")
    config = subject_named(model).config
    graph = lowtide.trace(config, language_batch(1, 16), device="h100")

    assert (target.kernels, target.capability) == ("cuda", (7, 0))
    assert graph.device == "cuda" and graph.device_name == "NVIDIA H100 SXM 80 GB"
    with pytest.raises(ValueError, match="Nearest: h100"):
        lowtide.trace(config, language_batch(1, 16), device="h10")


def parts(model, **options):
    setup = TrainingSetup(H100, seq_len=256, **options)
    return rank_memory(subject_named(model).facts(setup), setup)


def test_each_rank_holds_its_part(model):
    whole = parts(model)
    ddp, zero1, zero2, zero3, fsdp = (
        parts(model, sharding=kind, data_parallel=4) for kind in ("none", "zero1", "zero2", "zero3", "fsdp")
    )

    assert ddp.gathered == ddp.gradients == whole.gradients and ddp.optimizer == whole.optimizer
    assert zero1.optimizer == pytest.approx(whole.optimizer / 4, rel=0.01) and zero1.gradients == whole.gradients
    assert zero2.gradients == whole.gradients / 4 and zero2.parameters == whole.parameters
    assert zero3.parameters == pytest.approx(whole.parameters / 4, rel=0.001)
    layer, root = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192 + 128), 2 * (1000 * 64 * 2 + 64)
    assert fsdp.parameters == whole.parameters / 4 and fsdp.gathered == 2 * root + 2 * 2 * layer


def test_a_tensor_parallel_rank_runs_a_part_of_the_heads(model):
    setup = TrainingSetup(H100, seq_len=64, tensor_parallel=2)
    subject = subject_named(model)
    whole = subject.trace(replace(setup, tensor_parallel=1))
    part = subject.trace(setup)

    embeddings = 2 * 2 * 1000 * 64
    assert part.resident["parameters"] - embeddings < 0.51 * (whole.resident["parameters"] - embeddings)
    with pytest.raises(SetupError, match="does not divide the 2 key_value_heads"):
        subject.trace(replace(setup, tensor_parallel=4))


@pytest.mark.parametrize(
    ("name", "states"), [("adamw", 2.0), ("sgd", 0.0), ("sgd_momentum", 1.0), ("adafactor", 0.1), ("adamw_8bit", 1.15),
                         ("none", 0.0)]
)  # fmt: skip
def test_optimizers_keep_what_they_keep(model, name, states):
    found = parts(model, optimizer=name)

    assert found.optimizer / found.parameters == pytest.approx(states, abs=0.06)


def test_muon_is_for_hidden_matrices_and_master_weights_are_float32(model):
    muon, adamw, master = (parts(model, **o) for o in ({"optimizer": "muon"}, {}, {"master_weights": True}))

    hidden = 2 * 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192)
    assert adamw.optimizer - muon.optimizer == pytest.approx(hidden, rel=0.01)
    assert master.optimizer == pytest.approx(6 * master.parameters, rel=0.02)


def test_setups_of_one_subject_keep_their_precision(model):
    subject = subject_named(model)
    sizes = [
        subject.facts(TrainingSetup(H100, seq_len=64, precision=p)).parameters[0].itemsize for p in ("fp32", "bf16")
    ]

    assert sizes == [4, 2]


def test_adapters_train_and_quantized_layers_take_half_a_byte(model):
    lora, quantized = parts(model, lora_rank=4), parts(model, lora_rank=4, quantized=True)
    matrices = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192)

    assert lora.gradients < 0.2 * lora.parameters
    assert lora.parameters - quantized.parameters == pytest.approx(matrices * (2 - 4.127 / 8), rel=0.001)


def test_a_script_runs_with_nothing_in_memory(capsys, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "def setup():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(1 << 15, 1 << 16), torch.nn.Tanh()).cuda()\n"
        "    return model, torch.zeros(64, 1 << 15, device='cuda')\n"
    )
    code, body = plan(capsys, "--model", f"{tmp_path}/train.py:setup", "--device", "h100", "--precision", "fp32")

    assert code == 0 and body["by_part"]["parameters"] == 4 * (1 << 31) + 4 * (1 << 16)
    assert body["max_batch_size"] is None


def test_a_committed_plan_is_checked_with_the_modules_that_grew(capsys, tmp_path, model):
    args = ("--model", model, "--device", "h100", "--seq-len", "256", "--no-limits")
    saved = str(tmp_path / "plan.json")
    assert plan(capsys, *args, "--save", saved)[0] == 0
    assert plan(capsys, *args, "--check", saved)[1]["check"]["worse"] == []

    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"intermediate_size": 2048}))
    code, body = plan(capsys, *args, "--check", saved, "--tolerance", "0.01")
    worse = {one["what"]: one for one in body["check"]["worse"]}
    assert code == 1 and body["fits"] and worse["peak_bytes"]["modules"][0]["module"] == "model.layers.*.mlp"
    assert plan(capsys, *args, "--check", saved, "--tolerance", "9")[0] == 0

    code, body = plan(capsys, *args, "--check", saved, "--optimizer", "sgd")
    assert code == 2 and "optimizer 'adamw', now 'sgd'" in body["error"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--device", "h10"), "Nearest: h100"),
        (("--optimizer", "adamx"), "Did you mean 'adam"),
        (("--precision", "bf17"), "--precision 'bf17'"),
        (("--seq-len", "513"), "longer than the 512 positions"),
        (("--gpus", "8", "--data-parallel", "2", "--tensor-parallel", "2"), "--gpus 8 is not"),
        (("--gpus", "3", "--tensor-parallel", "3"), "does not divide the 4 attention_heads"),
        (("--sharding", "fsdp"), "nothing to divide among"),
        (("--batch-size", "0"), "not positive"),
        (("--batch-size", "two"), "invalid int value"),
        (("--quantized",), "Pass --lora RANK"),
        (("--budget", "much"), "--budget"),
        (("--check", "nowhere.json"), "cannot read"),
        (("--model", "llama-3.1-9b"), "Did you mean 'llama-3.1-8b'"),
    ],
)
def test_bad_usage_is_json_with_the_error_and_exit_two(capsys, model, args, words):
    code, body = plan(capsys, "--model", model, "--device", "h100", *args)

    assert code == 2 and body["status"] == "bad_usage" and words in body["error"]


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5-0.5b", "bert-base-uncased", "whisper-large-v3"])
def test_models_have_their_published_number_of_parameters_embeddings_tied(name):
    facts = subject_named(name).facts(TrainingSetup(H100, seq_len=64))
    assert sum(p.elements for p in facts.parameters) == pytest.approx(model_facts(name)["parameters"], rel=0.001)


def test_degrees_follow_from_any_two_numbers():
    assert (
        degrees(8, None, 2) == (4, 2, 1) and degrees(None, 4, 2) == (4, 2, 1) and degrees(None, None, None) == (1, 1, 1)
    )


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused", "adafactor", "muon"])
def test_equal_blocks_are_multiplied_and_come_to_the_same_bytes(tmp_path, monkeypatch, optimizer):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 7}))
    multiplied = parts(str(tmp_path), optimizer=optimizer)
    monkeypatch.setattr(rank_memory_module, "_RUN_BLOCKS", 7)

    assert parts(str(tmp_path), optimizer=optimizer) == multiplied


def test_a_package_that_asks_once_for_cuda_sees_what_is_here(capsys, tmp_path, monkeypatch):
    """bitsandbytes would keep the answer for the rest of the process, and fails where CPUs stand for CUDA."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    del sys.modules["bitsandbytes"]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "bitsandbytes.py").write_text("import torch\nCUDA_IS_HERE = torch.cuda.is_available()\n")
    (tmp_path / "quantised.py").write_text(
        "import bitsandbytes, torch\nassert torch.cuda.is_available()\n"
        "def setup():\n    return torch.nn.Linear(8, 8).cuda(), torch.randn(4, 8).cuda()\n"
    )

    is_here = torch.cuda.is_available()
    code, body = plan(capsys, "--model", f"{tmp_path}/quantised.py:setup", "--device", "h100", "--precision", "fp32")

    assert (code, body["status"]) == (0, "ok")
    assert sys.modules["bitsandbytes"].CUDA_IS_HERE is torch.cuda.is_available() is is_here


def test_adapters_of_a_model_without_memory_take_none(model):
    subject = subject_named(model)
    setup = TrainingSetup(H100, seq_len=64, lora_rank=4)
    with subject._without_memory(target_of(H100)):
        built, _, _ = subject.build(setup)

    assert all(p.is_meta for name, p in built.named_parameters() if "lora_" in name)
    assert subject.trace(setup).ops
