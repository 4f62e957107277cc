"""Settings that are refused by name, and settings of which it is told that they do nothing."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.settings.frameworks import about_memory, describe, framework_of

FULL = {"recompute_granularity": "full"}
UNIFORM = FULL | {"recompute_method": "uniform"}


def stack(layers=4):
    """A model with repeated blocks that have a norm and an MLP."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm = nn.LayerNorm(8)
            self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(layers))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer.mlp(layer.input_layernorm(x))
            return x

    return Stack()


@pytest.mark.parametrize(
    ("framework", "settings", "message"),
    [
        ("megatron", FULL, '"full" without recompute_method'),
        ("megatron", UNIFORM, '"full" without recompute_num_layers'),
        ("megatron", UNIFORM | {"recompute_num_layers": 3}, "cannot cut 4 layers into groups of 3"),
        ("megatron", FULL | {"recompute_method": "recompute"}, "Use 'uniform' or 'block'"),
        ("megatron", {"recompute_granularity": "selektive"}, "Did you mean 'selective'?"),
        ("megatron", {"recompute_granularty": "full"}, "Did you mean 'recompute_granularity'"),
        ("megatron", {"recompute_granularity": "selective", "recompute_num_layers": 1}, "Leave recompute_num"),
        ("megatron", {"recompute_granularity": "selective", "recompute_modules": ["norm"]}, "does not know"),
        ("megatron", UNIFORM | {"recompute_num_layers": 1, "offload_modules": ["attn_norm"]}, "stores nothing inside"),
        ("megatron", UNIFORM | {"recompute_num_layers": 1, "cpu_offloading": True}, "refuses both together"),
        ("megatron", {"moe_layer_recompute": True, **UNIFORM, "recompute_num_layers": 1}, "full includes it"),
        ("megatron", {"fine_grained_activation_offloading": True}, "without offload_modules"),
        ("roll", FULL | {"recompute_method": "recompute"}, "ROLL's documented choices, and Megatron rejects it"),
        ("roll", {"disable_gradient_checkpoint": True}, "Did you mean 'disable_gradient_checkpointing'"),
        ("transformers", {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layer": 2}},
         "Did you mean 'every_n_layers'"),
        ("transformers", {"every_n_layers": 0}, "is not a whole number from 1 up"),
        ("transformers", {"activation_checkpointing": "maybe"}, "neither true nor false"),
        ("transformers", {"activation_checkpointing": True,
                          "activation_checkpointing_kwargs": {"use_reentrant": True, "debug": True}},
         "cannot be combined"),
        ("transformers", {"activation_checkpointing": True, "fsdp_config": {"activation_checkpointing": True}},
         "which the Trainer refuses"),
        ("trl", {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"selective": True}},
         "which is off"),
        ("trl", {"gradient_checkpointing_kwargs": {"selective": True, "use_reentrant": True}}, "not reentrant"),
        ("trl", {"activation_checkpointing_kwargs": {"selective": True}}, "Write it in gradient_checkpointing_kwargs"),
        ("colossalai", {"gradient_checkpointing_ratio": 1.5}, "not a share from 0 to 1"),
        ("colossalai", {"num_ckpt_layers_per_stage": [3, 0]}, "asks for 3 of 2 layers"),
        ("colossalai", {"num_ckpt_layers_per_stage": [1, 1, 1]}, "do not come out even"),
        ("deepspeed", {"activation_checkpointing": {"cpu_checkpoint": True}}, "Did you mean 'cpu_checkpointing'"),
        ("deepspeed", {"contiguous_memory_optimization": True}, "needs partition_activations"),
        ("torchtitan", {"mode": "selectiv"}, "Did you mean 'selective'"),
        ("torchtitan", {"mode": "selective", "selective_ac_option": "ops"}, "neither 'op' nor a number"),
        ("accelerate", {"activation_checkpointing_offload": True}, "needs activation_checkpointing"),
        ("accelerate", {"fsdp_config": {"fsdp_activation_checkpoint": True}}, "Did you mean 'fsdp_act"),
        ("accelerate", {"activation_checkpointing": True, "transformer_layer_cls_to_wrap": "Layer"}, "none is a Layer"),
        ("torch", {"activation_memory_budget": 0.5, "save_ops": ["mm"]}, "Keep one of them"),
        ("torch", {"modules": ["layers.9"]}, "which the model does not have"),
        ("megatrn", {}, "Did you mean 'megatron'"),
    ],
)  # fmt: skip
def test_refused_with_the_way_out(framework, settings, message):
    with pytest.raises(lowtide.SettingsError) as refused:
        describe(stack(), settings, framework)

    what, _, way_out = str(refused.value).partition("\n")
    assert message in str(refused.value)
    assert what.endswith((".", "?")) and way_out.endswith(".")


@pytest.mark.parametrize("framework", ["megatron", "colossalai", "torchtitan", "torch", "transformers"])
def test_a_model_without_layers_is_refused(framework):
    settings = {
        "megatron": {"recompute_granularity": "selective"},
        "transformers": {"activation_checkpointing": True},
        "torchtitan": {"mode": "full"},
        "torch": {"save_ops": ["mm"]},
    }
    with pytest.raises(lowtide.SettingsError, match="has no"):
        describe(nn.Linear(4, 4), settings.get(framework, {"gradient_checkpointing_ratio": 0.5}), framework)


@pytest.mark.parametrize(
    ("framework", "settings", "nothing"),
    [
        ("megatron", {"recompute_modules": ["mlp"]}, {"recompute_modules"}),
        ("megatron", {"recompute_method": "block", "recompute_num_layers": 2},
         {"recompute_method", "recompute_num_layers"}),
        ("megatron", {"offload_modules": ["attn_norm"]}, {"offload_modules"}),
        ("megatron", {"recompute_granularity": "selective", "recompute_modules": ["moe"]}, {"moe"}),
        ("megatron", {"recompute_granularity": "selective", "recompute_method": "block", "recompute_modules": ["mlp"]},
         {"recompute_method"}),
        ("transformers", {"activation_checkpointing": False, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
         {"activation_checkpointing_kwargs"}),
        ("transformers", {"activation_checkpointing": True, "gradient_checkpointing": False},
         {"gradient_checkpointing"}),
        ("roll", {"disable_gradient_checkpointing": True, "gradient_checkpointing_use_reentrant": True},
         {"gradient_checkpointing_use_reentrant"}),
        ("colossalai", {"gradient_checkpointing_ratio": 0.2}, {"gradient_checkpointing_ratio"}),
        ("colossalai", {"gradient_checkpointing_ratio": 0.5, "num_ckpt_layers_per_stage": [1, 1]},
         {"gradient_checkpointing_ratio"}),
        ("deepspeed", {"activation_checkpointing": {"partition_activations": True}},
         {"activation_checkpointing", "partition_activations"}),
        ("torchtitan", {"mode": "full", "selective_ac_option": "op"}, {"selective_ac_option"}),
        ("torch", {"activation_memory_budget": 1.0}, {"activation_memory_budget"}),
    ],
)  # fmt: skip
def test_what_does_nothing_is_told(framework, settings, nothing):
    found = describe(stack(), settings, framework).findings

    assert {f.key for f in found if f.kind == "does nothing"} == nothing


def test_in_eval_mode_transformers_checkpoints_nothing():
    found = describe(stack().eval(), {"activation_checkpointing": True}, "transformers")

    assert found.checkpoints == () and "eval mode" in str(found.findings[-1])


def test_deprecated_names_are_told_with_the_new_ones():
    old = describe(stack(), {"gradient_checkpointing": True}, "transformers").findings
    moe = describe(stack(), {"moe_layer_recompute": True, "recompute_modules": ["mlp"]}, "megatron").findings

    assert "gradient_checkpointing: deprecated: write activation_checkpointing; it goes in transformers 6" in map(
        str, old
    )
    assert any(f.kind == "deprecated" and 'recompute_modules: ["moe"]' in f.text for f in moe)


@pytest.mark.parametrize(
    ("settings", "framework"),
    [
        ({"recompute_num_layers": 2, "offload_modules": []}, "megatron"),
        ({"activation_checkpoint": {"mode": "full"}}, "torchtitan"),
        ({"num_ckpt_layers_per_stage": [1]}, "colossalai"),
        ({"disable_gradient_checkpointing": False}, "roll"),
        ({"fsdp_activation_checkpointing": True}, "accelerate"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "deepspeed"),
        ({"activation_offloading": True, "gradient_checkpointing": True}, "trl"),
        ({"activation_memory_budget": 0.5}, "torch"),
    ],
)
def test_the_framework_is_told_by_names_that_only_one_has(settings, framework):
    assert framework_of(settings) == framework


def test_names_that_several_have_need_the_framework():
    with pytest.raises(lowtide.SettingsError, match="may be settings of transformers or trl"):
        lowtide.from_settings(stack(), {"gradient_checkpointing": True}, batch=torch.ones(2, 8))
    with pytest.raises(lowtide.SettingsError, match="Did you mean 'recompute_modules'"):
        framework_of({"recompute_module": ["mlp"]})


def test_of_a_whole_file_what_is_about_memory_is_kept_and_so_is_a_typo():
    settings = {
        "learning_rate": 1e-4,
        "recompute_granularty": "full",
        "activation_func": "gelu",
        "recompute-method": "block",
    }
    kept, others = about_memory(settings, "megatron")

    assert set(kept) == {"recompute_granularty", "recompute_method"}
    assert others == ["learning_rate", "activation_func"]
