"""What published recipes say beside model and batch: adapters, 4-bit layers, FSDP2's policies, selective by op."""

import json
from dataclasses import replace

import pytest
import torch

from lowtide import cli
from lowtide.estimation.device_table import device_named
from lowtide.foresight import quantized_layers, subjects
from lowtide.foresight.changes import toggles
from lowtide.foresight.forecaster import Forecaster
from lowtide.foresight.named_subjects import subject_named
from lowtide.foresight.step_planner import StepPlanner
from lowtide.foresight.training_setup import SetupError, TrainingSetup

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512,
         "tie_word_embeddings": False}  # fmt: skip
A100 = device_named("a100-40gb")
MATRICES = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 192)  # elements of linear layers, without the head


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "config.json")


def forecast(model, **options):
    setup = TrainingSetup(A100, seq_len=128, **options)
    return Forecaster(subject_named(model)).forecast(setup, budget=None)


def refused(**options):
    with pytest.raises(SetupError) as error:
        TrainingSetup(A100, **options)
    return str(error.value)


def test_adapters_are_on_the_named_layers_alone(model):
    setup = TrainingSetup(A100, seq_len=128, lora_rank=4, lora_targets=("q_proj", "v_proj"))

    trained = [p for p in subject_named(model).facts(setup).parameters if p.trains]

    assert sum(p.elements for p in trained) == 4 * 4 * (64 + 64 + 64 + 32)  # layers, rank, sides of q and v
    assert all(".q_proj." in p.name or ".v_proj." in p.name for p in trained)


def test_dropout_before_adapters_keeps_its_output_and_mask(model):
    with_dropout, without = (forecast(model, lora_rank=4, lora_targets=("q_proj",), lora_dropout=p) for p in (0.1, 0.0))

    assert with_dropout.by_part["activations"] > without.by_part["activations"]
    assert with_dropout.by_part["parameters"] == without.by_part["parameters"]


def test_targets_that_are_no_layers_are_refused_with_those_that_are(model):
    with pytest.raises(SetupError, match=r"--lora-targets qkv: .*Linear layers are down_proj, gate_proj, k_proj"):
        forecast(model, lora_rank=4, lora_targets=("qkv",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_targets": ("q_proj",)}, "--lora-targets is of adapters. Pass --lora RANK"),
        ({"lora_dropout": 0.1}, "--lora-dropout is of adapters. Pass --lora RANK"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, "--lora-dropout 1.0 is no probability below 1."),
        ({"compute_dtype": "bfloat16", "precision": "fp32"}, "--compute-dtype is what FSDP2 gathers its shards in"),
        ({"reshard": False}, "--no-reshard is of FSDP2; --sharding is none."),
        ({"selective_op": True, "offload_activations": True}, "--selective-op is a plan of its own"),
        ({"cuda_version": "twelve"}, "--cuda-version 'twelve' is no version."),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(options, words):
    assert words in refused(**options)


def test_a_compute_dtype_is_for_float32_shards_and_a_known_one():
    fsdp = {"sharding": "fsdp", "data_parallel": 8}

    assert "--compute-dtype bfloat16 is for shards in float32; --precision is bf16." in refused(
        compute_dtype="bfloat16", **fsdp
    )
    assert "'bf16' is not known" in refused(compute_dtype="bf16", precision="fp32", **fsdp)


def test_shards_in_float32_compute_in_bfloat16(model):
    fsdp = {"sharding": "fsdp", "data_parallel": 8}
    wide, policy, narrow = (
        forecast(model, **fsdp, **more)
        for more in ({"precision": "fp32"}, {"precision": "fp32", "compute_dtype": "bfloat16"}, {"precision": "bf16"})
    )

    assert policy.by_part["parameters"] == wide.by_part["parameters"] == 2 * narrow.by_part["parameters"]
    assert policy.by_part["optimizer"] == wide.by_part["optimizer"]
    assert policy.by_part["activations"] == narrow.by_part["activations"]
    assert narrow.by_part["gathered"] < policy.by_part["gathered"] < wide.by_part["gathered"]


def test_without_resharding_all_units_stay_gathered(model):
    fsdp = {"sharding": "fsdp", "data_parallel": 8}
    two_units, all_units = (forecast(model, **fsdp, reshard=r).by_part["gathered"] for r in (True, False))

    layer = (MATRICES // 4 + 2 * 64) * 2
    assert all_units - two_units == (4 - 2) * layer


def test_selective_by_op_is_the_plan_that_torchtitans_setting_means(model):
    plain, selective = (forecast(model, selective_op=s) for s in (False, True))

    assert selective.plan.counts["recompute"] > 0 and plain.plan.counts["recompute"] == 0
    assert selective.by_part["activations"] < plain.by_part["activations"]
    assert any("every other matrix product" in line for line in selective.assumptions)


def test_selective_by_op_with_a_budget_is_two_plans(capsys, model):
    code = cli.main(["plan", "--model", model, "--device", "h100", "--selective-op", "--budget", "1GiB"])

    assert code == 2 and "--budget 1GiB asks for a plan, and --selective-op is one." in capsys.readouterr().err


def test_the_command_says_what_the_recipes_say(capsys, model):
    code = cli.main([
        "plan", "--json", "--model", model, "--device", "h100", "--gpus", "8", "--sharding", "fsdp", "--no-reshard",
        "--compute-dtype", "bfloat16", "--selective-op", "--seq-len", "128", "--no-limits",
    ])  # fmt: skip
    setup = json.loads(capsys.readouterr().out)["setup"]

    assert code == 0
    assert (setup["precision"], setup["compute_dtype"], setup["reshard"], setup["selective_op"]) == (
        "fp32", "bfloat16", False, True,
    )  # fmt: skip


def test_the_command_says_adapters_and_a_cuda(capsys, model):
    code = cli.main([
        "plan", "--json", "--model", model, "--device", "v100-16gb", "--precision", "fp16", "--seq-len", "128",
        "--lora", "4", "--lora-targets", "q_proj, v_proj", "--lora-dropout", "0.1", "--cuda-version", "11.2",
        "--no-limits",
    ])  # fmt: skip
    body = json.loads(capsys.readouterr().out)

    assert code == 0 and body["by_part"]["context"] == 1343 << 20
    assert body["setup"]["lora_targets"] == ["q_proj", "v_proj"] and body["setup"]["lora_dropout"] == 0.1
    assert "a context of CUDA 11.2" in body["assumptions"]


def test_4_bit_layers_are_expanded_at_the_peak_and_keep_inputs_where_the_library_does(model, monkeypatch):
    def peaks(version):
        monkeypatch.setattr(subjects, "installed_version", lambda: version)
        return forecast(model, lora_rank=4, lora_targets=("q_proj",), quantized=True)

    today, one_copy, two_copies = peaks("0.50.2"), peaks("0.43.1"), peaks("0.41.1")

    names = quantized_layers.expansion_of
    assert names("0.50.2") == (False, False) and names("0.43.1") == (True, False) and names("0.41.1") == (True, True)
    assert names(None) == (False, False)
    assert today.by_part["parameters"] == one_copy.by_part["parameters"]
    assert today.by_part["activations"] < one_copy.by_part["activations"] <= two_copies.by_part["activations"]


@pytest.mark.parametrize(("version", "copies"), [("0.50.2", 1), ("0.41.1", 2)])
def test_a_product_expands_its_weight_in_forward_and_in_backward(version, copies):
    import lowtide

    bf16 = {"bias": False, "dtype": torch.bfloat16, "device": "meta"}
    layer = torch.nn.Linear(64, 512, **bf16).requires_grad_(False)
    frozen = quantized_layers.FourBitLinear(layer, quantized_layers.expansion_of(version))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, **bf16), frozen)
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="meta")

    graph = lowtide.trace(model, x, device="cuda")

    made = [
        (op.backward, op.name) for op in graph.ops if any(graph.storages[s].bytes == 2 * 64 * 512 for s in op.makes)
    ]
    assert [backward for backward, _ in made] == [False] * copies + [True] * copies


def test_a_context_of_an_old_cuda_is_that_which_was_measured(model):
    v100 = device_named("v100-16gb")
    old, new, later = (TrainingSetup(v100, cuda_version=v).context_bytes for v in ("11.2", None, "11.7"))

    assert old == 1343 << 20 and new == later == v100.context_bytes
    assert replace(v100, eager_context_bytes=0).context_bytes_of("11.2") == v100.context_bytes  # not known


def test_a_forecast_counts_a_workspace_for_each_thread_that_multiplies(model):
    found = forecast(model)

    beside = ("context", "communication", "fragmentation")
    assert found.allocated_bytes == sum(size for part, size in found.by_part.items() if part not in beside)
    assert found.by_part["workspace"] == 2 * A100.blas_workspace_bytes
    assert found.reserved_bytes > found.allocated_bytes


def test_one_parameter_at_a_time_takes_fewer_temporaries_and_more_launches(model):
    lists, loop = (forecast(model, optimizer=o) for o in ("adamw", "adamw_for_loop"))
    facts = subject_named(model).facts(TrainingSetup(A100, seq_len=128))

    assert loop.by_part["optimizer"] == lists.by_part["optimizer"]
    assert loop.step_ms.expected - lists.step_ms.expected > 0.9 * len(facts.parameters) * 8 * 4 / 1e3


def test_a_large_step_is_planned_by_a_method_that_takes_seconds(model, monkeypatch):
    from lowtide.foresight import step_planner

    graph = subject_named(model).trace(TrainingSetup(A100, seq_len=128))
    planner = StepPlanner(graph, A100)
    budget = (planner.known[0].peak_bytes + min(line.peak_bytes for line in planner.known)) // 2
    monkeypatch.setattr(step_planner, "LARGE_OPS", 10)

    found = planner.within([budget], 0, thorough=True, offload=False).plan

    assert found.method == "knapsack" and found.predicted_peak_bytes <= budget and found.gap < 0.1


def test_an_optimizer_in_backward_holds_one_gradient_at_a_time(model):
    usual, stepping = (forecast(model, precision="fp32", optimizer_in_backward=on) for on in (False, True))
    largest = max(p.gradient_bytes for p in subject_named(model).facts(usual.setup).parameters)

    assert stepping.by_part["gradients"] == 0 and usual.by_part["parameters"] == stepping.by_part["parameters"]
    assert stepping.by_part["optimizer"] == usual.by_part["optimizer"]
    assert stepping.allocated_bytes < usual.allocated_bytes - usual.by_part["gradients"] + 2 * largest
    assert any("no clipping by the global norm" in line for line in stepping.assumptions)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"accumulate": 2}, "--accumulate 2"),
        ({"data_parallel": 2}, "several ranks"),
        ({"offload_optimizer": True}, "--offload-optimizer"),
        ({"optimizer": "none"}, "--optimizer none"),
        ({"master_weights": True}, "--master-weights"),
    ],
)
def test_what_needs_all_gradients_does_not_go_with_an_optimizer_in_backward(options, named):
    assert named in refused(optimizer_in_backward=True, **options)


def test_an_optimizer_in_backward_is_offered_where_one_device_steps_each_time():
    offered = [option for option, *_ in toggles(TrainingSetup(A100, batch_size=1))]
    assert "--optimizer-in-backward" in offered
    assert "--optimizer-in-backward" not in [option for option, *_ in toggles(TrainingSetup(A100, accumulate=2))]
